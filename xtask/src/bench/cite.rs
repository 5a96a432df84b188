//! Figures of a report in the text of a document.
//!
//! A marker says which figure stands behind it, up to the next `<!--/-->`, and is written by `cargo xtask speed`:
//!
//! ```text
//!   <!--report NAME-->[NAME](../bench/results/NAME/report.md)<!--/-->     the report of all that follow
//!   <!--ratio null-tcp-1 kernel same rtt_p50_us threads-->1.004<!--/-->   as in the table of goals
//!   <!--value null-tcp-1 threads same rtt_p50_us-->12.15<!--/-->          as in the table of the case
//!   <!--goal null-tcp-1 kernel same rtt_p50_us-->1.004<!--/-->            what was found for the goal
//!   <!--bound null-tcp-1 kernel same rtt_p50_us-->0.85<!--/-->            what the goal asks for
//!   <!--outcome null-tcp-1 kernel same rtt_p50_us-->lost<!--/-->          met, lost or undecided
//!   <!--host wake_up_us-->43.37<!--/-->                                   what the host takes
//!   <!--slowest null-tcp-128 kernel other messages_per_s-->0.904<!--/-->  of its runs, to their median
//!   <!--summary-->26 of 40 goals met, ...<!--/-->
//! ```
//!
//! Each of case, server and placement may be a list with commas: `low` and `high` in front of the marker's words take the
//! least and the greatest of them, `spread` both. `interval` in front adds the interval.

use std::fmt::Write;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use serde::de::DeserializeOwned;

use super::case::{CASES, Metric, Placement};
use super::contestant::Contestant;
use super::judge::{self, GoalOutcome};
use super::raw::{Raw, values};
use super::report;
use super::stats::Interval;

/// The first words of markers. Other comments are left alone.
const KINDS: [&str; 13] = [
    "report", "ratio", "value", "goal", "bound", "outcome", "slowest", "host", "summary", "low", "high", "spread",
    "interval",
];

const END: &str = "<!--/-->";

/// The text with the figures of the reports in `results` behind its markers.
pub(crate) fn fill(text: &str, results: &Path) -> Result<String> {
    let mut filled = String::new();
    let mut report = None;
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("<!--") {
        let (marker, after) = after.split_once("-->").context("a comment has no end")?;
        let _ = write!(filled, "{before}<!--{marker}-->");
        rest = after;
        let words: Vec<&str> = marker.split_whitespace().collect();
        let figure = match *words {
            [kind, ..] if !KINDS.contains(&kind) => continue,
            [] => continue,
            ["report", name] => {
                let dir = results.join(name);
                report = Some(Raw::read(&dir)?);
                format!("[{name}](../bench/results/{name}/report.md)")
            }
            _ => {
                let raw = report.as_ref().with_context(|| format!("no report is named before <!--{marker}-->"))?;
                cite(raw, &words).with_context(|| format!("<!--{marker}-->"))?
            }
        };
        let (_, after) = rest.split_once(END).with_context(|| format!("no {END} after <!--{marker}-->"))?;
        let _ = write!(filled, "{figure}{END}");
        rest = after;
    }
    filled.push_str(rest);
    Ok(filled)
}

/// A number of figures, in words.
fn cite(raw: &Raw, words: &[&str]) -> Result<String> {
    let (modifier, words) = match words {
        [modifier @ ("low" | "high" | "spread" | "interval"), words @ ..] => (*modifier, words),
        _ => ("", words),
    };
    let mut figures = figures(raw, words)?;
    figures.sort_by(|one, other| one.interval.median.total_cmp(&other.interval.median));
    let (Some(low), Some(high)) = (figures.first(), figures.last()) else { bail!("it was not measured") };
    Ok(match modifier {
        "low" => low.text(),
        "high" => high.text(),
        "spread" if low.text() == high.text() => low.text(),
        "spread" => format!("{} to {}", low.text(), high.text()),
        _ if figures.len() > 1 => bail!("{} figures; say low, high or spread", figures.len()),
        "interval" => report::with_interval(&low.interval, &low.format),
        _ => low.text(),
    })
}

struct Figure {
    interval: Interval,
    format: Box<dyn Fn(f64) -> String>,
}

impl Figure {
    fn new(interval: Interval, format: impl Fn(f64) -> String + 'static) -> Figure {
        Figure { interval, format: Box::new(format) }
    }

    fn text(&self) -> String {
        (self.format)(self.interval.median)
    }
}

fn figures(raw: &Raw, words: &[&str]) -> Result<Vec<Figure>> {
    match *words {
        ["summary"] => {
            let summary = report::goal_summary(&judge::judge(raw));
            let nothing = Interval::exact(0.0, 0);
            Ok(vec![Figure::new(nothing, move |_| summary.clone())])
        }
        ["host", cost] => {
            let all = raw.groups.iter().flat_map(|group| &group.host).map(|host| host.cost(cost));
            let found = Interval::of(all.collect::<Result<Vec<_>>>()?.concat()).context("it was not measured")?;
            Ok(vec![Figure::new(found, report::format_cost)])
        }
        [kind, cases, contestants, placements, metric, ref peers @ ..] => {
            let metric = named::<Metric>(metric)?;
            let mut found = Vec::new();
            for case in cases.split(',') {
                ensure!(CASES.iter().any(|known| known.name == case), "no case is called {case}");
                for contestant in contestants.split(',') {
                    for placement in placements.split(',') {
                        let place =
                            Place { case, contestant: named(contestant)?, placement: named(placement)?, metric };
                        let missing = || format!("{case} {contestant} {placement} was not measured");
                        found.push(place.figure(raw, kind, peers)?.with_context(missing)?);
                    }
                }
            }
            Ok(found)
        }
        _ => bail!("not the words of a marker"),
    }
}

/// A figure's place in the tables.
struct Place<'a> {
    case: &'a str,
    contestant: Contestant,
    placement: Placement,
    metric: Metric,
}

impl Place<'_> {
    fn figure(&self, raw: &Raw, kind: &str, peers: &[&str]) -> Result<Option<Figure>> {
        let Place { case, contestant, placement, metric } = *self;
        Ok(match (kind, peers) {
            ("value", []) => {
                let found = raw.summary(case, contestant, placement, metric);
                found.map(|found| Figure::new(found, move |value| metric.format(value)))
            }
            ("ratio", [peer]) => {
                let values = |contestant| values(&raw.samples, case, contestant, placement, metric);
                judge::ratios(&values(contestant), &values(named(peer)?))
                    .map(|found| Figure::new(found, judge::format_ratio))
            }
            ("slowest", []) => {
                let own = values(&raw.samples, case, contestant, placement, metric);
                let median = raw.summary(case, contestant, placement, metric);
                let worst = own.into_values().reduce(f64::min).zip(median);
                worst.map(|(worst, own)| {
                    Figure::new(Interval::exact(worst / own.median, own.count), judge::format_ratio)
                })
            }
            ("goal" | "bound" | "outcome", []) => {
                let verdicts = judge::judge(raw);
                let is_it = |verdict: &judge::Verdict| {
                    (verdict.case, verdict.subject, verdict.placement, verdict.metric)
                        == (case, contestant, placement, metric)
                };
                let verdict = verdicts.into_iter().find(is_it).context("there is no such goal")?;
                let bound = verdict.bound;
                let word = match verdict.outcome {
                    GoalOutcome::Lost => "lost".to_owned(),
                    outcome => outcome.to_string(),
                };
                match kind {
                    "bound" => Some(Figure::new(Interval::exact(bound, 0), |bound| bound.to_string())),
                    "outcome" => verdict.found.map(|found| Figure::new(found, move |_| word.clone())),
                    _ => verdict.found.map(|found| Figure::new(found, move |value| verdict.format(value))),
                }
            }
            _ => bail!("not the words of a marker"),
        })
    }
}

/// A value by the name that raw.json has for it.
fn named<T: DeserializeOwned>(name: &str) -> Result<T> {
    serde_json::from_value(name.into()).with_context(|| format!("nothing is called {name}"))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::fs;

    use super::super::case::Row;
    use super::super::host::HostCosts;
    use super::super::raw::{Group, Sample};
    use super::*;
    use crate::machine::{Machine, Revision};

    fn results() -> tempfile::TempDir {
        let mut raw = Raw::new(Machine::default());
        let mut group = Group::new(Row::RoundTrip, &Revision::default(), 5, 1.0);
        group.host.push(HostCosts { wake_up_us: vec![40.0, 43.0, 50.0], ..HostCosts::default() });
        raw.groups.push(group);
        let case = CASES.iter().find(|case| case.name == "null-tcp-1").unwrap();
        for (contestant, us) in [(Contestant::Threads, 12.0), (Contestant::Kernel, 6.0), (Contestant::Uring, 12.3)] {
            for round in 0..5 {
                raw.samples.push(Sample {
                    metrics: BTreeMap::from([(Metric::RttP50Us, us + f64::from(round))]),
                    ..Sample::new(case, contestant, Placement::Same, round)
                });
            }
        }
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("day")).unwrap();
        raw.write(&dir.path().join("day")).unwrap();
        dir
    }

    #[test]
    fn figures_stand_behind_their_markers() {
        let results = results();
        let filled = |marker: &str| {
            let text = format!("<!--report day--><!--/--> a <!-- b --> <!--{marker}-->old<!--/--> c\n");
            let filled = fill(&text, results.path())?;
            assert_eq!(fill(&filled, results.path()).unwrap(), filled, "a filled text stays as it is");
            let start = "<!--report day-->[day](../bench/results/day/report.md)<!--/--> a <!-- b --> ";
            let figure = filled.strip_prefix(&format!("{start}<!--{marker}-->")).unwrap();
            Ok::<_, anyhow::Error>(figure.strip_suffix("<!--/--> c\n").unwrap().to_owned())
        };
        for (marker, figure) in [
            ("value null-tcp-1 threads same rtt_p50_us", "14.00"),
            ("interval value null-tcp-1 threads same rtt_p50_us", "14.00 [12.00 16.00]"),
            ("ratio null-tcp-1 kernel same rtt_p50_us threads", "0.571"),
            ("spread ratio null-tcp-1 kernel,uring same rtt_p50_us threads", "0.571 to 1.021"),
            ("high value null-tcp-1 kernel,uring same rtt_p50_us", "14.30"),
            ("goal null-tcp-1 kernel same rtt_p50_us", "0.571"),
            ("bound null-tcp-1 kernel same rtt_p50_us", "0.85"),
            ("outcome null-tcp-1 kernel same rtt_p50_us", "met"),
            ("slowest null-tcp-1 threads same rtt_p50_us", "0.857"),
            ("host wake_up_us", "43.00"),
            ("summary", "2 of 5 goals met, 0 lost, 0 undecided, 3 not measured."),
        ] {
            assert_eq!(filled(marker).unwrap(), figure, "{marker}");
        }
        for (marker, why) in [
            ("value null-tcp-1 kernel other rtt_p50_us", "was not measured"),
            ("value null-tcp-1 kernel,uring same rtt_p50_us", "say low, high or spread"),
            ("value null-tcp-9 kernel same rtt_p50_us", "no case"),
            ("value null-tcp-1 kernal same rtt_p50_us", "nothing is called kernal"),
            ("ratio null-tcp-1 kernel same rtt_p50_us", "not the words"),
            ("goal null-tcp-1 epoll same rtt_p50_us", "no such goal"),
            ("outcome null-tcp-1 kernel other rtt_p50_us", "was not measured"),
        ] {
            let said = format!("{:#}", filled(marker).unwrap_err());
            assert!(said.contains(why) && said.contains(marker), "{said}");
        }
        for (text, why) in
            [("<!--value a", "no end"), ("<!--summary-->1", "no report"), ("<!--report day-->1", "no <!--/-->")]
        {
            let said = format!("{:#}", fill(text, results.path()).unwrap_err());
            assert!(said.contains(why), "{said}");
        }
    }
}
