//! Figures of a report in the text of a document.
//!
//! A marker says which figure stands behind it, up to the next `<!--/-->`. `cargo xtask speed` writes the figures, and its
//! `--names` says what can be cited:
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

use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::case::{CASES, Metric, Placement};
use super::contestant::Contestant;
use super::host::HOST_COSTS;
use super::judge::{self, GoalOutcome};
use super::raw::{Raw, values};
use super::report;
use super::stats::Interval;

/// The first words of markers. Comments that begin with a space are left alone.
const KINDS: [&str; 13] = [
    "report", "ratio", "value", "goal", "bound", "outcome", "slowest", "host", "summary", "low", "high", "spread",
    "interval",
];

pub(crate) const END: &str = "<!--/-->";

/// What is wrong in a line of a text.
pub(crate) struct Problem {
    /// Counted from 1.
    pub(crate) line: usize,
    pub(crate) what: String,
}

/// A text with figures behind its markers.
pub(crate) struct Filled {
    pub(crate) text: String,
    /// Markers without a figure: what stands behind them stays.
    pub(crate) problems: Vec<Problem>,
    /// Figures that the text had otherwise.
    pub(crate) stale: Vec<Problem>,
}

/// Puts the figures of the reports in `results` behind the markers of a text. `link`: where `results` is, seen from it.
pub(crate) fn fill(text: &str, results: &Path, link: &str) -> Filled {
    let mut filled = Filled { text: String::new(), problems: Vec::new(), stale: Vec::new() };
    let mut report = Err("no report is named before it".to_owned());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("<!--") {
        let line = 1 + text[..text.len() - after.len()].matches('\n').count();
        let Some((marker, after)) = after.split_once("-->") else {
            filled.problems.push(Problem { line, what: "a comment has no end".to_owned() });
            break;
        };
        let _ = write!(filled.text, "{before}<!--{marker}-->");
        rest = after;
        let words: Vec<&str> = marker.split_whitespace().collect();
        if marker.starts_with(' ') || marker == "/" {
            continue;
        }
        let mut problem =
            |what: String| filled.problems.push(Problem { line, what: format!("<!--{marker}-->: {what}") });
        if !words.first().is_some_and(|kind| KINDS.contains(kind)) {
            problem("no marker begins like this, and other comments begin with a space".to_owned());
            continue;
        }
        let Some((old, after)) = rest.split_once(END) else {
            problem(format!("no {END} after it"));
            continue;
        };
        let figure = match *words {
            ["report", name] => {
                report = Raw::read(&results.join(name)).map_err(|error| format!("{error:#}"));
                report.as_ref().map(|_| format!("[{name}]({link}/{name}/report.md)")).map_err(Clone::clone)
            }
            _ => report
                .as_ref()
                .map_err(Clone::clone)
                .and_then(|raw| cite(raw, &words).map_err(|error| format!("{error:#}"))),
        };
        let figure = figure.unwrap_or_else(|what| {
            problem(what);
            old.to_owned()
        });
        if figure != old {
            filled.stale.push(Problem { line, what: format!("<!--{marker}-->: {old} is {figure}") });
        }
        let _ = write!(filled.text, "{figure}{END}");
        rest = after;
    }
    filled.text.push_str(rest);
    filled
}

/// All markers that the report in a directory has a figure for, with these.
pub(crate) fn names(dir: &Path) -> Result<Vec<String>> {
    let raw = Raw::read(dir)?;
    let name = dir.file_name().context("a report has a directory of its own")?.to_string_lossy();
    let mut found = vec![format!("<!--report {name}--><!--/-->"), "<!--summary--><!--/-->".to_owned()];
    found.extend(HOST_COSTS.map(|cost| format!("<!--host {cost}--><!--/-->")));
    for verdict in judge::judge(&raw).iter().filter(|verdict| verdict.found.is_some()) {
        let (subject, placement) = (name_of(verdict.subject), name_of(verdict.placement));
        let place = format!("{} {subject} {placement} {}", verdict.case, name_of(verdict.metric));
        found.extend(["interval goal", "bound", "outcome"].map(|kind| format!("<!--{kind} {place}--><!--/-->")));
    }
    let places: BTreeSet<[String; 4]> = raw
        .samples
        .iter()
        .flat_map(|sample| sample.metrics.keys().map(move |metric| (sample, *metric)))
        .map(|(sample, metric)| {
            [sample.case.clone(), name_of(sample.contestant), name_of(sample.placement), name_of(metric)]
        })
        .collect();
    found.extend(places.iter().map(|place| format!("<!--interval value {}--><!--/-->", place.join(" "))));
    let filled = fill(&found.join("\n"), dir.parent().unwrap_or(dir), "../bench/results");
    let missing: BTreeSet<usize> = filled.problems.iter().map(|problem| problem.line).collect();
    let lines = filled.text.lines().zip(1..).filter(|(_, line)| !missing.contains(line));
    Ok(lines.map(|(line, _)| line.to_owned()).collect())
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

/// The name that raw.json has for a value.
fn name_of(value: impl Serialize) -> String {
    let name = serde_json::to_value(value).ok();
    name.and_then(|name| Some(name.as_str()?.to_owned())).expect("case, server, placement and metric are strings there")
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
        let fill = |text: &str| {
            let filled = super::fill(text, results.path(), "../bench/results");
            match filled.problems.into_iter().next() {
                Some(problem) => bail!("{}", problem.what),
                None => Ok(filled.text),
            }
        };
        let filled = |marker: &str| {
            let text = format!("<!--report day--><!--/--> a <!-- b --> <!--{marker}-->old<!--/--> c\n");
            let filled = fill(&text)?;
            assert_eq!(fill(&filled).unwrap(), filled, "a filled text stays as it is");
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
        for (text, why) in [
            ("<!--value a", "no end"),
            ("<!--summary-->1<!--/-->", "no report"),
            ("<!--report day-->1", "no <!--/-->"),
            ("<!--valeu a-->", "no marker"),
        ] {
            let said = format!("{:#}", fill(text).unwrap_err());
            assert!(said.contains(why), "{said}");
        }
    }

    #[test]
    fn every_marker_that_is_wrong_is_told_with_its_line() {
        let results = results();
        let text = "<!--report day-->[day](results/day/report.md)<!--/-->\n<!--host wake_up_us-->43.00<!--/-->\n\
                    <!--host wake_up_us-->41<!--/--> <!--host walk_us-->7<!--/-->\n<!--value a b c d-->8<!--/-->\n";
        let filled = fill(text, results.path(), "results");
        assert_eq!(filled.text, text.replace(">41<", ">43.00<"), "what has no figure stays");
        let lines = |problems: &[Problem]| problems.iter().map(|problem| problem.line).collect::<Vec<_>>();
        assert_eq!((lines(&filled.problems), lines(&filled.stale)), (vec![3, 4], vec![3]));
    }
}
