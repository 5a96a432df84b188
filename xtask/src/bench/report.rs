//! report.md, and on demand report.html with charts: both are made from raw.json alone, at any time.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use clap::ValueEnum;

use super::case::{CASES, Case, Metric, Placement, Row};
use super::chart;
use super::host::HostCosts;
use super::judge::{GoalOutcome, Verdict, judge};
use super::raw::{Raw, Step};
use super::stats::Interval;
use super::vm;

const STYLE: &str = include_str!("report.css");

/// The document below docs/ that has the goals of a report.
const SPEED: &str = "speed.md";
/// The comment behind a table of it.
const END: &str = "<!-- end -->";

/// How to read the figures; the same text in both reports.
const NOTES: &[&str] = &[
    "Client and server are on one machine, over loopback. Absolute figures belong to this machine; compare \
     within one table only.",
    "Figures are medians of the rounds, with an interval in brackets that holds the true median with a confidence of at least \
     98.75 %, whatever the distribution: from the k-th smallest to the k-th largest value, for of n independent values the \
     number below the median is binomial (J.-Y. Le Boudec, Performance Evaluation of Computer and Communication Systems, \
     2010, section 2.2). With fewer than 8 rounds it is from the smallest to the largest value, and the confidence less: \
     93.75 % of 5 rounds.",
    "Found is the ratio to the peer in the same round, which was measured just before or after: its median and interval. A \
     goal is met if all of the interval is on its side, lost if nothing is, else undecided. Undecided ones are measured \
     again, at most up to three times the rounds, and looked at four times at most: so a verdict is right with 95 %. Of several \
     peers each must be beaten; the hardest is shown. Goals of every run and of the slowest run have no interval: one run \
     loses them.",
    "Within a case the contestants are measured in turn, each alone. All but sockperf, which has \
     its own client, are loaded by echotest and rpctest, which verify every reply and use one \
     system call per request and reply: with many requests in flight the client is the limit \
     wherever it shares its CPU with the server.",
    "Server CPU is the time of the server's process. Other CPU is all the machine's time that is \
     neither the server's nor the client's: the kernel engine's work queues, softirq, and whatever \
     else ran. Total is the sum. On loopback the receive path of the server, and with it the \
     kernel engine's program, mostly runs within the client's send and is charged to the client: \
     machine CPU has it all, the client included.",
    "Work is loaded by worktest, which drives all connections from one thread and sends and \
     receives as much as it can at once. Placement \"two CPUs\": the server's threads where the \
     scheduler puts them on two CPUs, the client pinned to the first of these, so that the two share \
     it. Time of work sleeps or computes in the server. Where connections are split or skewed, \
     each message goes to a connection drawn by weight, 32 are in flight in all, and the bound is what \
     workers that are never idle gain over pinned loops: the number of loops times the share of the \
     busiest.",
    "The ideal queue is no server: worktest computes what one queue before four workers does with the \
     very messages of the round.",
    "Web servers are loaded by ksf load http, with a thread on each CPU of the client, and have a worker on each CPU \
     of theirs. Round trip is from the intended start of a request, connecting included, to the end of its answer. \
     Server CPU is that of the server's whole process tree; only machine CPU can be compared between set-ups that \
     move work from one CPU, or from the server to the client's system calls, to another. On loopback a connection \
     arrives on the CPU of the client's thread: it is local if the worker that answered it is bound to that CPU. \
     Failed requests of the other tables are in every round none, or the measurement itself has failed.",
    "nginx has the same configuration in all its forms but for what is named: mutex is `accept_mutex on`, reuseport is \
     `listen ... reuseport`, the plain form is its default, which wakes one of the workers that wait (EPOLLEXCLUSIVE). \
     ksf accel runs the plain form; off, it is loaded but steers nothing. Reloads are SIGHUP to the master until the old \
     workers have gone. A worker is killed (SIGKILL) only while it has no request of its own: one that it has taken \
     dies with it, however it came there.",
    "Key-value servers are loaded by ksf load kv on one thread, which checks every reply, on connections that are kept; what \
     is read was written before, and a journal says what it must be. Each server has an empty folder on the disk named \
     above. Written bytes are those of /proc/PID/io, of key and value in SET. Of the goals for the rate and for the server CPU \
     of a case one is enough: where the client is the limit, the rate cannot be met. redis-benchmark counts, and checks no \
     reply. Redis has no AOF and no snapshots unless its name says so. As Debian's redis.conf has it, it has no AOF either, \
     and its first snapshot comes after 60 s: that is no AOF here. io-threads is `io-threads 2`, which redis.conf advises \
     from four CPUs on, and which needs a second one: it is unpinned only.",
    "Cleaning is measured beside the same store with a log of 1 GiB, in which nothing need be cleaned: keys with values of 1,024 \
     bytes fill 70 % of a log of 128 MiB, are written once more, and then at random while the figures are taken. More bytes \
     were written to the log than it holds, and less than three quarters of the other one, or the measurement has failed.",
    "Keys are recovered from the start of the process to its first answer to DBSIZE, on one CPU. Recovered bytes are those \
     that the store had written to its log, records with heads and the ends of blocks. Memory is anonymous memory after the \
     keys less that before. Of keys and bytes recovered per second one goal is enough.",
    "Requests of HTTP are those of PASTE's phttpd: POST, the first 8 bytes of the body are the key, of which there are 1,000. \
     They have 1,400 bytes with their heads; answers have 64, those of ksf store an ETag more. wrk sends them from one thread \
     for whole seconds, checks the status alone, and corrects its latencies for what it sent late. epoll http is \
     bench/peers/http_log.c: for each request a read, a write to a file of which all bytes are there, fdatasync, and a write \
     of the answer; without the file or without fdatasync as its name says. ksf store none answers before a write is where \
     it is to be.",
    "9P of 512 KiB: diod takes messages of 64 KiB, and nfs-ganesha 4.3 ends at longer reads. Their messages have 65,512 bytes of \
     data, so that data bytes per second can be compared, and messages and round trips cannot.",
    "PASTE's medium, persistent memory, is not built yet. In its place stands tmpfs, a file system in memory: it shows what \
     waiting for each write costs where writes cost nothing, and nothing about flushes; io_uring writes to it from threads of \
     its own.",
    "Placement \"VM (shape)\": server and client on one emulated machine with two CPUs, whose kernel has \
     AF_KCM (Debian's; see docs/lab.md). Compare these rows with each other only.",
    "The stack floor is one thread that plays both ends, of a TCP connection or of two UDP sockets: what the system's stack takes without a server.",
    "What the host takes: a context switch is half of a round trip between two processes on one CPU, with a write and a read of a \
     pipe; a wake-up half of one between two threads that sleep on two CPUs, with a write and a read of an eventfd.",
    "Counts are of each message. The server's system calls are counted in runs of their own, by perf or strace; nothing else is \
     taken from these. How often a server slept, which is how often it was woken, or was preempted is of its whole life, \
     start and warm-up included, and of its threads and processes. Context switches, interrupts and softirqs are those of the \
     machine, so that kernel threads, which answer for the kernel engine, are among them. Interrupts between CPUs wake a \
     task on the other CPU, or run a function there.",
];

/// Writes report.md beside the raw.json in the directory.
pub(crate) fn write_markdown(dir: &Path) -> Result<()> {
    write(dir, "report.md", ReportPage::new(&Raw::read(dir)?)?.markdown())
}

/// Writes report.md, and report.html, the same with charts, beside the raw.json in the directory; with `speed` its goals
/// into docs/speed.md, too.
pub(crate) fn write_all(dir: &Path, speed: bool) -> Result<()> {
    write_markdown(dir)?;
    let raw = Raw::read(dir)?;
    write(dir, "report.html", ReportPage::new(&raw)?.html())?;
    if speed {
        let docs = crate::root().join("docs");
        let text = fs::read_to_string(docs.join(SPEED)).with_context(|| format!("cannot read docs/{SPEED}"))?;
        let dir = fs::canonicalize(dir)?;
        let name = dir.file_name().context("a report has a directory of its own")?.to_string_lossy();
        write(&docs, SPEED, with_goals(&text, &name, &raw).with_context(|| format!("docs/{SPEED}"))?)?;
    }
    Ok(())
}

/// A text with a report's goals: a table for each row, between the comments `<!-- ROW -->` and `<!-- end -->`. Between
/// `<!-- report -->` and `<!-- end -->` it says which report that is.
fn with_goals(text: &str, name: &str, raw: &Raw) -> Result<String> {
    let verdicts = judge(raw);
    let report = format!("Report [{name}](../bench/results/{name}/report.md): {}\n", goal_summary(&verdicts));
    let mut text = between_comments(text, "report", &report)?;
    for row in Row::value_variants() {
        let is_of_row = |verdict: &&Verdict| CASES.iter().any(|case| case.name == verdict.case && case.row == *row);
        let table = goal_table(verdicts.iter().filter(is_of_row));
        let table = if table.rows.is_empty() { "This report has no such row.\n".to_owned() } else { table.markdown() };
        text = between_comments(&text, &row.name(), &table)?;
    }
    Ok(text)
}

/// A text with something else between a comment of this name and the next end.
fn between_comments(text: &str, name: &str, new: &str) -> Result<String> {
    let begin = format!("<!-- {name} -->\n");
    let (before, rest) = text.split_once(&begin).with_context(|| format!("has no line {}", begin.trim_end()))?;
    let (_, after) = rest.split_once(END).with_context(|| format!("has no {END} after {}", begin.trim_end()))?;
    Ok(format!("{before}{begin}\n{new}\n{END}{after}"))
}

fn write(dir: &Path, name: &str, text: String) -> Result<()> {
    let path = dir.join(name);
    fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
}

/// The report, before it is written as Markdown or HTML.
struct ReportPage {
    origin: Vec<[String; 2]>,
    parts: Vec<Part>,
}

enum Part {
    Heading(&'static str),
    Text(String),
    Table(ReportTable),
    List(Vec<String>),
    /// A picture as SVG, which Markdown has not.
    Chart(String),
    Commands(Vec<String>),
}

struct ReportTable {
    head: Vec<String>,
    rows: Vec<Vec<String>>,
}

impl ReportPage {
    fn new(raw: &Raw) -> Result<ReportPage> {
        use Part::{Chart, Commands, Heading, Text};
        let verdicts = judge(raw);
        let mut parts = vec![Heading("Groups"), Part::Table(group_table(raw))];
        let media = raw.groups.iter().filter_map(|group| Some((group.row.name(), group.medium.as_ref()?)));
        parts.extend(media.map(|(row, medium)| Text(format!("Servers of the group {row} write to {medium}."))));
        let host = host_table(raw);
        if !host.rows.is_empty() {
            parts.extend([Heading("What the host takes"), Part::Table(host)]);
        }
        parts.extend([Heading("Goals"), Text(goal_summary(&verdicts)), Part::Table(goal_table(&verdicts))]);
        for case in CASES {
            let table = case_table(raw, case, |metric| !metric.is_count());
            let counts = case_table(raw, case, Metric::is_count);
            if table.rows.is_empty() {
                continue;
            }
            parts.push(Heading(case.title));
            parts.extend(chart::draw(raw, case)?.map(Chart));
            parts.push(Part::Table(table));
            if !counts.rows.is_empty() {
                parts.extend([Text("Counted for each message:".into()), Part::Table(counts)]);
            }
        }
        for (title, items) in [
            ("Notes", NOTES.iter().map(ToString::to_string).collect()),
            ("Left out", left_out(raw)),
            ("Requests that failed", failures(raw)),
            ("What the generators warned of", warnings(raw)),
        ] {
            if !items.is_empty() {
                parts.extend([Heading(title), Part::List(items)]);
            }
        }
        parts.extend([Heading("Commands"), Commands(commands(raw))]);
        Ok(ReportPage { origin: origin_rows(raw), parts })
    }

    fn markdown(&self) -> String {
        let mut out = String::from("# Bench report\n\n| | |\n|---|---|\n");
        for [name, value] in &self.origin {
            let _ = writeln!(out, "| {name} | {value} |");
        }
        for part in &self.parts {
            let text = match part {
                Part::Heading(title) => format!("## {title}\n"),
                Part::Text(text) => format!("{text}\n"),
                Part::Table(table) => table.markdown(),
                Part::List(items) => items.iter().map(|item| format!("- {}\n", item.replace('\n', " "))).collect(),
                Part::Chart(_) => continue,
                Part::Commands(commands) => format!("```\n{}\n```\n", commands.join("\n")),
            };
            let _ = write!(out, "\n{text}");
        }
        out
    }

    fn html(&self) -> String {
        let mut out = format!(
            "<!DOCTYPE html>\n<html lang=\"en\">\n<meta charset=\"utf-8\">\n\
             <meta name=\"viewport\" content=\"width=device-width\">\n<title>Bench report</title>\n\
             <style>\n{STYLE}</style>\n<h1>Bench report</h1>\n<table class=\"origin\">\n"
        );
        for [name, value] in &self.origin {
            let _ = writeln!(out, "<tr><th>{}<td>{}", escape(name), escape(value));
        }
        out.push_str("</table>\n");
        for part in &self.parts {
            out.push_str(&match part {
                Part::Heading(title) => format!("<h2>{}</h2>\n", escape(title)),
                Part::Text(text) => format!("<p>{}\n", escape(text)),
                Part::Table(table) => table.html(),
                Part::List(items) => {
                    let items: String = items.iter().map(|item| format!("<li>{}\n", escape(item))).collect();
                    format!("<ul>\n{items}</ul>\n")
                }
                Part::Chart(svg) => format!("<figure>{svg}</figure>\n"),
                Part::Commands(commands) => format!("<pre>{}</pre>\n", escape(&commands.join("\n"))),
            });
        }
        out
    }
}

impl ReportTable {
    fn markdown(&self) -> String {
        let line = |cells: &Vec<String>| format!("| {} |\n", cells.join(" | "));
        let rows: String = self.rows.iter().map(line).collect();
        format!("{}|{}\n{rows}", line(&self.head), "---|".repeat(self.head.len()))
    }

    fn html(&self) -> String {
        let line = |tag: &str, cells: &[String]| {
            let cells = cells.iter().map(|cell| match cell.as_str() {
                // Colour helps the eye; the word stays for those who do not see it.
                "met" | "LOST" | "undecided" => format!("<{tag} class=\"{cell}\">{cell}"),
                _ => format!("<{tag}>{}", escape(cell)),
            });
            format!("<tr>{}\n", cells.collect::<String>())
        };
        let rows: String = self.rows.iter().map(|row| line("td", row)).collect();
        format!("<table>\n{}{rows}</table>\n", line("th", &self.head))
    }
}

fn origin_rows(raw: &Raw) -> Vec<[String; 2]> {
    let machine = &raw.machine;
    let versions: Vec<String> = machine.versions.iter().map(|(name, version)| format!("{name} {version}")).collect();
    let row = |name: &str, value: String| [name.to_owned(), value];
    let revision = raw.groups.first().map(|group| {
        let dirty = if group.revision.dirty { ", with changes" } else { "" };
        row("Commit", format!("{}{dirty}", group.revision.commit))
    });
    let mut rows: Vec<_> = revision.into_iter().collect();
    rows.extend([
        row("CPU", format!("{} x {}", machine.cpus, machine.cpu)),
        row("Memory", format!("{} MiB", machine.memory_mib)),
        row("Kernel", machine.kernel.clone()),
        row("System", machine.os.clone()),
        row("Versions", versions.join("; ")),
    ]);
    rows
}

/// What was measured when, and what is missing.
fn group_table(raw: &Raw) -> ReportTable {
    let head = ["Group", "Begun", "Rounds", "Measured", "Still open"].map(str::to_owned).to_vec();
    let step = |step: &Step| format!("{} {}", step.case, step.placement);
    let rows = Row::value_variants().iter().map(|&row| {
        let Some(group) = raw.groups.iter().find(|group| group.row == row) else {
            return vec![row.name(), "-".into(), "-".into(), "0".into(), "all".into()];
        };
        let open: Vec<String> = group.open.iter().map(step).collect();
        vec![
            row.name(),
            group.date.clone(),
            format!("{} of {} s each", group.runs, group.seconds),
            group.done.len().to_string(),
            if open.is_empty() { "nothing".into() } else { open.join(", ") },
        ]
    });
    ReportTable { head, rows: rows.collect() }
}

/// The costs that no server can avoid, as each session found them.
fn host_table(raw: &Raw) -> ReportTable {
    let head = ["Group", "Measured", "system call us", "context switch us", "wake-up on another CPU us"];
    let cell = |batches: &Vec<f64>| {
        let interval = Interval::of(batches.clone());
        interval.map_or("-".to_owned(), |found| with_interval(&found, format_cost))
    };
    let row = |row: Row, host: &HostCosts| {
        let costs = [&host.system_call_us, &host.context_switch_us, &host.wake_up_us].map(cell);
        [row.name(), host.date.clone()].into_iter().chain(costs).collect()
    };
    let rows = raw.groups.iter().flat_map(|group| group.host.iter().map(move |host| row(group.row, host)));
    ReportTable { head: head.map(str::to_owned).to_vec(), rows: rows.collect() }
}

fn goal_table<'a>(verdicts: impl IntoIterator<Item = &'a Verdict>) -> ReportTable {
    let head = ["Case", "Server", "Placement", "Goal", "Found", "Rounds", "Result"];
    let mut case_above = "";
    let mut rows = Vec::new();
    for verdict in verdicts {
        let case = CASES.iter().find(|case| case.name == verdict.case);
        let title = case.map_or("", |case| case.title);
        let (found, count) = match &verdict.found {
            Some(found) => (with_interval(found, |value| verdict.format(value)), found.count.to_string()),
            None => ("-".to_owned(), "0".to_owned()),
        };
        // A case's name once, above its goals: the column then reads as headings.
        let shown = if title == case_above { "" } else { title };
        case_above = title;
        rows.push(vec![
            shown.to_owned(),
            verdict.subject.to_string(),
            verdict.placement.to_string(),
            verdict.goal.clone(),
            found,
            count,
            verdict.outcome.to_string(),
        ]);
    }
    ReportTable { head: head.map(str::to_owned).to_vec(), rows }
}

/// A cost of the host, in microseconds.
fn format_cost(us: f64) -> String {
    format!("{us:.2}")
}

/// "1.02 [1.01 1.04]"; of all values that are the same, one.
fn with_interval(found: &Interval, format: impl Fn(f64) -> String) -> String {
    let median = format(found.median);
    match found.low == found.high {
        true => median,
        false => format!("{median} [{} {}]", format(found.low), format(found.high)),
    }
}

/// "12 of 40 goals met, 3 lost, 2 undecided, 23 not measured."
fn goal_summary(verdicts: &[Verdict]) -> String {
    let count = |outcome| verdicts.iter().filter(|verdict| verdict.outcome == outcome).count();
    format!(
        "{} of {} goals met, {} lost, {} undecided, {} not measured.",
        count(GoalOutcome::Met),
        verdicts.len(),
        count(GoalOutcome::Lost),
        count(GoalOutcome::Undecided),
        count(GoalOutcome::NotMeasured)
    )
}

/// A row for each contestant and placement, a column for each metric that was measured.
fn case_table(raw: &Raw, case: &Case, is_shown: impl Fn(Metric) -> bool) -> ReportTable {
    let metrics: Vec<Metric> = Metric::ALL
        .into_iter()
        .filter(|&metric| is_shown(metric))
        .filter(|metric| {
            let samples = raw.samples.iter().filter(|sample| sample.case == case.name);
            samples.into_iter().any(|sample| sample.metrics.contains_key(metric))
        })
        .collect();
    let mut rows = Vec::new();
    for placement in Placement::ALL {
        for contestant in vm::contestants_in(case, placement) {
            let summaries: Vec<_> =
                metrics.iter().map(|&metric| raw.summary(case.name, contestant, placement, metric)).collect();
            if summaries.iter().all(Option::is_none) {
                continue;
            }
            let mut row = vec![placement.to_string(), contestant.to_string()];
            row.extend(metrics.iter().zip(summaries).map(|(metric, summary)| {
                summary.map_or("-".to_owned(), |summary| with_interval(&summary, |value| metric.format(value)))
            }));
            rows.push(row);
        }
    }
    let titles = metrics.iter().map(|metric| metric.title().to_owned());
    ReportTable { head: ["Placement", "Server"].map(str::to_owned).into_iter().chain(titles).collect(), rows }
}

/// What was not measured, and why.
fn left_out(raw: &Raw) -> Vec<String> {
    let skipped: BTreeSet<&String> = raw.groups.iter().flat_map(|group| &group.skipped).collect();
    let failed = raw.samples.iter().filter_map(|sample| {
        let error = sample.error.as_ref()?;
        let (case, round) = (&sample.case, sample.round + 1);
        Some(format!("{case}, {}, round {round}, failed: {error}", sample.contestant))
    });
    skipped.into_iter().cloned().chain(failed).collect()
}

/// "accel-kill, same CPU: nginx reuseport: 3 receive_reset, 1 refused": over all rounds.
fn failures(raw: &Raw) -> Vec<String> {
    let mut counts: BTreeMap<_, BTreeMap<&str, u64>> = BTreeMap::new();
    for sample in &raw.samples {
        for (kind, count) in &sample.failures {
            let place = (&sample.case, sample.placement, sample.contestant);
            *counts.entry(place).or_default().entry(kind).or_default() += count;
        }
    }
    let line = |((case, placement, contestant), kinds): (_, BTreeMap<&str, u64>)| {
        let kinds: Vec<String> = kinds.iter().map(|(kind, count)| format!("{count} {kind}")).collect();
        format!("{case}, {placement}: {contestant}: {}", kinds.join(", "))
    };
    counts.into_iter().map(line).collect()
}

/// "busy-generator: null-tcp-128, same CPU: threads 5, ksf uring 5": measurements by server.
fn warnings(raw: &Raw) -> Vec<String> {
    let mut counts: BTreeMap<_, BTreeMap<_, u32>> = BTreeMap::new();
    for sample in &raw.samples {
        for warning in &sample.warnings {
            let place = (warning, &sample.case, sample.placement);
            *counts.entry(place).or_default().entry(sample.contestant).or_default() += 1;
        }
    }
    let line = |((warning, case, placement), servers): (_, BTreeMap<_, _>)| {
        let servers: Vec<String> = servers.iter().map(|(server, count)| format!("{server} {count}")).collect();
        format!("{warning}: {case}, {placement}: {}", servers.join(", "))
    };
    counts.into_iter().map(line).collect()
}

/// Every command once, as it was in the first round.
fn commands(raw: &Raw) -> Vec<String> {
    let mut seen = BTreeSet::new();
    raw.samples
        .iter()
        .filter(|sample| sample.round == 0)
        .flat_map(|sample| [&sample.server_command, &sample.client_command])
        .filter(|command| !command.is_empty() && seen.insert((*command).clone()))
        .cloned()
        .collect()
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::super::contestant::Contestant::{Kernel, Threads};
    use super::super::raw::{Group, Sample};
    use super::*;
    use crate::machine::{Machine, Revision};

    fn raw() -> Raw {
        let sample = |contestant, placement, round, value| Sample {
            case: "null-tcp-1".into(),
            contestant,
            placement,
            round,
            server_command: format!("server of {contestant} <x>"),
            client_command: "client".into(),
            metrics: BTreeMap::from([(Metric::RttP50Us, value)]),
            failures: BTreeMap::new(),
            warnings: Vec::new(),
            error: None,
        };
        let mut doubtful = sample(Kernel, Placement::Same, 0, 9.0);
        doubtful.warnings.push("busy-generator".into());
        doubtful.failures.insert("refused".into(), 7);
        let mut broken = sample(Kernel, Placement::Unpinned, 0, 0.0);
        broken.metrics.clear();
        broken.error = Some("lost 3 replies".into());
        let mut group = Group::new(Row::RoundTrip, &Revision { commit: "abc".into(), dirty: false }, 2, 0.5);
        group.done.insert(CASES[0].step(Placement::Same));
        group.open.insert(CASES[0].step(Placement::Unpinned));
        group.skipped.push("nfs-ganesha: needs root".into());
        let system_call_us = vec![0.11, 0.12, 0.13];
        group.host.push(HostCosts { system_call_us, ..HostCosts::default() });
        Raw {
            groups: vec![group],
            samples: vec![
                sample(Threads, Placement::Same, 0, 4.0),
                sample(Threads, Placement::Same, 1, 5.0),
                doubtful,
                broken,
            ],
            ..Raw::new(Machine::default())
        }
    }

    #[test]
    fn both_reports_tell_the_same() {
        let page = ReportPage::new(&raw()).unwrap();
        let (markdown, html) = (page.markdown(), page.html());
        for text in [
            "4.50 [4.00 5.00]",
            "2.250",
            "undecided",
            "not measured",
            "nfs-ganesha: needs root",
            "null-tcp-1 unpinned",
            "lost 3 replies",
            "0.12 [0.11 0.13]",
            "busy-generator: null-tcp-1, same CPU: ksf kernel 1",
            "null-tcp-1, same CPU: ksf kernel: 7 refused",
            "round trip p50 us",
            "0 of 5 goals met, 0 lost, 1 undecided, 4 not measured.",
        ] {
            assert!(markdown.contains(text), "no '{text}' in {markdown}");
            assert!(html.contains(text), "no '{text}' in {html}");
        }
        assert!(markdown.contains("server of threads <x>"));
        assert!(html.contains("server of threads &lt;x&gt;"));
        assert!(html.contains("<svg"));
    }

    #[test]
    fn older_results_stay_readable_and_fit_into_the_document() {
        let document = fs::read_to_string(crate::root().join("docs").join(SPEED)).unwrap();
        for dir in fs::read_dir(crate::root().join("bench/results")).unwrap() {
            let raw = Raw::read(&dir.unwrap().path()).unwrap();
            assert!(!raw.samples.is_empty());
            with_goals(&document, "day", &raw).unwrap();
        }
    }

    #[test]
    fn each_row_has_a_table_in_the_document() {
        let names: Vec<String> = Row::value_variants().iter().map(|row| row.name()).collect();
        let places: String =
            names.iter().map(|name| format!("## {name}\n<!-- {name} -->\nold\n{END}\nwhy\n")).collect();
        let document = format!("# Speed\n<!-- report -->{places}");
        assert!(with_goals(&document, "day", &raw()).is_err(), "the comment is not a line");
        let document = format!("# Speed\n<!-- report -->\n{END}\n{places}");
        let filled = with_goals(&document, "day", &raw()).unwrap();
        assert!(filled.contains("[day](../bench/results/day/report.md): 0 of 5 goals met"), "{filled}");
        let (_, row) = filled.split_once("<!-- round-trip -->\n\n| Case |").unwrap();
        assert!(row.split_once(END).unwrap().0.contains("0.85 x threads"), "{row}");
        assert!(
            filled.contains("<!-- udp -->\n\nThis report has no such row.\n") && !filled.contains("old"),
            "{filled}"
        );
        assert_eq!(filled.matches("why").count(), names.len());
        assert_eq!(with_goals(&filled, "day", &raw()).unwrap(), filled, "a filled text stays as it is");
    }

    #[test]
    fn reports_are_made_from_the_file() {
        let dir = tempfile::tempdir().unwrap();
        assert!(write_markdown(dir.path()).is_err());
        raw().write(dir.path()).unwrap();
        write_markdown(dir.path()).unwrap();
        assert!(fs::read_to_string(dir.path().join("report.md")).unwrap().contains("## Goals"));
        assert!(!dir.path().join("report.html").exists(), "the page is made on demand");
        write_all(dir.path(), false).unwrap();
        assert!(fs::read_to_string(dir.path().join("report.html")).unwrap().contains("<svg"));
    }
}
