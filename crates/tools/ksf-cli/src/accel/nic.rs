//! `ksf accel nic`: which CPU serves a network interface. The work is done by the crate `ksf-nic`; here are the flags,
//! the tables and the exit statuses.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, Subcommand, ValueEnum, ValueHint};
use ksf_nic::{
    CpuSet, Finding, Group, Intent, Item, Netlink, NicError, NicReport, PlannedAction, ReceiveSteering, RecordFolder,
    Setting, Tree, Tuner, TuningPlan, Wish,
};
use serde::Serialize;

use crate::output::{Failure, Status, json_line, print, say};

/// Schema name of the JSON form; the number goes up when a field changes its meaning or goes.
const SCHEMA: &str = "ksf-nic/2";

/// Tune a network interface: queues, interrupts, RPS, RFS, XPS, coalescing, NAPI; reversibly
///
/// plan shows what apply would do. apply shows its plan, records the old values, and changes. verify reads every setting
/// back. rollback restores the old values exactly, and leaves alone what somebody else has changed since. docs/nic.md
/// explains each choice.
#[derive(Debug, Args)]
pub(crate) struct NicArgs {
    #[command(subcommand)]
    command: NicCommand,
}

#[derive(Debug, Subcommand)]
enum NicCommand {
    Plan(PlanArgs),
    Apply(ApplyArgs),
    Verify(VerifyArgs),
    Rollback(RollbackArgs),
}

/// Show what would be changed, and what not, and why; changes nothing
#[derive(Debug, Args)]
struct PlanArgs {
    /// The interface
    #[arg(value_name = "IFACE")]
    iface: String,
    #[command(flatten)]
    wish: WishFlags,
    #[command(flatten)]
    output: OutputFlags,
}

/// Show the plan, record the old values, and change the settings
#[derive(Debug, Args)]
struct ApplyArgs {
    /// The interface
    #[arg(value_name = "IFACE")]
    iface: String,
    #[command(flatten)]
    wish: WishFlags,
    /// Also if the interface carries the default route, where a mistake can cost the connection to this machine
    #[arg(long)]
    yes: bool,
    #[command(flatten)]
    state: StateFlags,
    #[command(flatten)]
    output: OutputFlags,
}

/// Read every applied setting back; exit status 1 if one does not hold
#[derive(Debug, Args)]
struct VerifyArgs {
    /// The interface
    #[arg(value_name = "IFACE")]
    iface: String,
    #[command(flatten)]
    state: StateFlags,
    #[command(flatten)]
    output: OutputFlags,
}

/// Restore the recorded values, also after an apply that was interrupted
#[derive(Debug, Args)]
struct RollbackArgs {
    /// The interface
    #[arg(value_name = "IFACE")]
    iface: String,
    /// Restore also what somebody else has changed since
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    state: StateFlags,
    #[command(flatten)]
    output: OutputFlags,
}

#[derive(Debug, Args)]
struct WishFlags {
    /// What the settings are for
    #[arg(long = "for", value_enum, value_name = "INTENT", default_value_t = IntentFlag::Throughput)]
    intent: IntentFlag,
    /// CPUs to serve the interface, as in 0-3,8; the mask of the process is never widened [default: all of it]
    #[arg(long, value_name = "LIST")]
    cpus: Option<CpuSet>,
    /// Groups of settings to leave alone
    #[arg(long, value_name = "GROUP", value_delimiter = ',', value_parser = groups())]
    skip: Vec<Group>,
    /// Run NAPI in kernel threads, or not [default: leave it as it is]
    #[arg(long, value_enum, value_name = "SWITCH")]
    threaded_napi: Option<SwitchFlag>,
}

#[derive(Debug, Args)]
struct StateFlags {
    /// Folder of the records of old values
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath, default_value = ksf_nic::FOLDER)]
    state_dir: PathBuf,
}

#[derive(Debug, Args)]
struct OutputFlags {
    /// JSON instead of text, one document per line
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum IntentFlag {
    /// Interrupts at once, and more of them
    Latency,
    /// Fewer interrupts, and some microseconds more
    Throughput,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum SwitchFlag {
    On,
    Off,
}

/// A group by its name.
fn groups() -> impl TypedValueParser<Value = Group> {
    let find = |name: String| Group::ALL.into_iter().find(|group| group.name() == name).ok_or("there is no such group");
    PossibleValuesParser::new(Group::ALL.map(Group::name)).try_map(find)
}

/// Runs the command.
pub(crate) fn run(args: NicArgs) -> Result<ExitCode, Failure> {
    match args.command {
        NicCommand::Plan(args) => plan(&args),
        NicCommand::Apply(args) => apply(&args),
        NicCommand::Verify(args) => {
            let report = tuner(&args.state)?.verify(&args.iface).map_err(failure)?;
            show(&report_text("verify", &report, &args.output)?)?;
            let bad = report.outcomes.len() - report.count(Finding::Holds);
            Ok(ended(bad, 1, || {
                format!(
                    "{bad} of {} settings do not hold on {}; apply again, or roll back",
                    report.outcomes.len(),
                    args.iface
                )
            }))
        }
        NicCommand::Rollback(args) => {
            let report = tuner(&args.state)?.rollback(&args.iface, args.force).map_err(failure)?;
            show(&report_text("rollback", &report, &args.output)?)?;
            let all = report.outcomes.len();
            let (refused, left) = (report.count(Finding::Refused), report.count(Finding::LeftAlone));
            if refused > 0 {
                return Ok(ended(refused, Status::Unavailable as u8, || {
                    format!("{refused} of {all} settings of {} could not be restored; they stay on record", args.iface)
                }));
            }
            Ok(ended(left, 1, || {
                format!(
                    "{left} of {all} settings of {} left alone, because somebody else has changed them since; they stay \
                     on record, and --force restores them too",
                    args.iface
                )
            }))
        }
    }
}

fn plan(args: &PlanArgs) -> Result<ExitCode, Failure> {
    let nowhere = RecordFolder::new("/nonexistent");
    let plan = Tuner::new(Tree::new("/"), netlink()?, nowhere).plan(&args.iface, &args.wish.wish()).map_err(failure)?;
    show(&plan_text(&plan, &args.output)?)?;
    Ok(ExitCode::SUCCESS)
}

fn apply(args: &ApplyArgs) -> Result<ExitCode, Failure> {
    let mut shown = Ok(());
    let announce = |plan: &TuningPlan| shown = plan_text(plan, &args.output).and_then(|text| show(&text));
    let report = tuner(&args.state)?.apply(&args.iface, &args.wish.wish(), args.yes, announce).map_err(failure)?;
    shown?;
    show(&report_text("apply", &report, &args.output)?)?;
    let refused = report.count(Finding::Refused);
    Ok(ended(refused, Status::Unavailable as u8, || {
        format!(
            "{refused} of {} settings were refused on {}; the others are applied, and rollback undoes them",
            report.outcomes.len(),
            args.iface
        )
    }))
}

impl WishFlags {
    fn wish(&self) -> Wish {
        let mut wish = Wish::new(match self.intent {
            IntentFlag::Latency => Intent::Latency,
            IntentFlag::Throughput => Intent::Throughput,
        });
        wish.cpus.clone_from(&self.cpus);
        wish.skip = self.skip.iter().copied().collect();
        wish.threaded = self.threaded_napi.map(|switch| switch == SwitchFlag::On);
        wish
    }
}

fn netlink() -> Result<Netlink, Failure> {
    Netlink::open().map_err(|error| Failure::os("cannot open a netlink socket", &error))
}

fn tuner(state: &StateFlags) -> Result<Tuner<Tree, Netlink, RecordFolder>, Failure> {
    Ok(Tuner::new(Tree::new("/"), netlink()?, RecordFolder::new(&state.state_dir)))
}

fn failure(error: NicError) -> Failure {
    let status = match &error {
        error if error.is_rights() => Status::NoPermission,
        NicError::BadName { .. } | NicError::Cpus { .. } => Status::Data,
        NicError::DefaultRoute { .. } => Status::Usage,
        NicError::Record { .. } | NicError::Read { .. } | NicError::Interface { .. } => Status::Os,
        NicError::Content { .. } => Status::Internal,
        _ => Status::Unavailable,
    };
    Failure::new(status, error.to_string()).remedy(error.remedy())
}

/// Success, unless `bad` settings are not as they should be; then a line and a status.
fn ended(bad: usize, status: u8, line: impl FnOnce() -> String) -> ExitCode {
    if bad == 0 {
        return ExitCode::SUCCESS;
    }
    say(&line());
    ExitCode::from(status)
}

fn show(text: &str) -> Result<(), Failure> {
    print(text.as_bytes())
}

/// A document on one line: its schema and kind, then the fields of `body`.
#[derive(Serialize)]
struct Document<'a, T> {
    schema: &'static str,
    document: &'static str,
    #[serde(flatten)]
    body: &'a T,
}

fn json<T: Serialize>(document: &'static str, body: &T) -> Result<String, Failure> {
    json_line(&Document { schema: SCHEMA, document, body })
}

fn plan_text(plan: &TuningPlan, output: &OutputFlags) -> Result<String, Failure> {
    if output.json {
        return json("plan", plan);
    }
    let intent = match plan.intent {
        Intent::Latency => "latency",
        Intent::Throughput => "throughput",
    };
    let mut out = format!("{} ({}), for {intent}, with CPUs {}", plan.iface, plan.driver, plan.cpus);
    if let Some(node) = plan.node {
        let _ = write!(out, "; its interrupts go to {}, of NUMA node {node}", plan.near_cpus);
    }
    out.push('\n');
    let rows = plan.items.iter().map(|item| Row {
        word: action_word(item.action),
        key: &item.key,
        value: plan_value(item),
        why: item.why.clone(),
    });
    out += &table(rows.collect());
    out += &steering_text(&plan.steering);
    for note in &plan.notes {
        let _ = writeln!(out, "note: {note}");
    }
    Ok(out)
}

fn report_text(document: &'static str, report: &NicReport, output: &OutputFlags) -> Result<String, Failure> {
    if output.json {
        return json(document, report);
    }
    let mut out = match report.outcomes.len() {
        0 => format!("{document} {}: nothing to do\n", report.iface),
        _ => format!("{document} {}\n", report.iface),
    };
    let rows = report.outcomes.iter().map(|outcome| Row {
        word: finding_word(outcome.finding),
        key: &outcome.key,
        value: outcome.key.shown(&outcome.wanted),
        why: outcome.detail.clone(),
    });
    out += &table(rows.collect());
    if let Some(steering) = &report.steering {
        out += &steering_text(steering);
    }
    if document == "rollback" {
        for note in &report.notes {
            let _ = writeln!(out, "note: {note}");
        }
    }
    Ok(out)
}

fn steering_text(steering: &ReceiveSteering) -> String {
    format!("receive CPU selection: {} ({})\n", if steering.on { "yes" } else { "no" }, steering.why)
}

fn action_word(action: PlannedAction) -> &'static str {
    match action {
        PlannedAction::Change => "change",
        PlannedAction::Holds => "holds",
        PlannedAction::NotSupported => "cannot",
        PlannedAction::LeftAlone => "left alone",
    }
}

fn finding_word(finding: Finding) -> &'static str {
    match finding {
        Finding::Done => "done",
        Finding::Holds => "holds",
        Finding::Differs => "differs",
        Finding::Refused => "refused",
        Finding::Gone => "gone",
        Finding::LeftAlone => "left alone",
        Finding::HandedOver => "handed over",
    }
}

fn plan_value(item: &Item) -> String {
    let shown = |value: &Option<String>| value.as_deref().map(|value| item.key.shown(value));
    match (shown(&item.now), shown(&item.wanted)) {
        (Some(now), Some(wanted)) if item.action == PlannedAction::Change => format!("{now} -> {wanted}"),
        (Some(now), _) => now,
        (None, _) => "-".to_owned(),
    }
}

/// A line of a table.
struct Row<'a> {
    word: &'static str,
    key: &'a Setting,
    value: String,
    why: String,
}

/// Lines in columns. Neighbouring queues with the same to say share a line: a device may have 512 of them.
fn table(rows: Vec<Row<'_>>) -> String {
    let mut lines: Vec<(&'static str, String, String, String)> = Vec::new();
    let mut rest = &rows[..];
    while let Some(first) = rest.first() {
        let run = rest.windows(2).take_while(|pair| are_neighbours(&pair[0], &pair[1])).count() + 1;
        let name = match (first.key.queue(), rest[run - 1].key.queue()) {
            (Some((direction, low)), Some((_, high))) if run > 1 => {
                format!("{direction}-{low} to {direction}-{high} {}", first.key.name())
            }
            _ => first.key.to_string(),
        };
        lines.push((first.word, name, first.value.clone(), first.why.clone()));
        rest = &rest[run..];
    }
    let width = |column: fn(&(&'static str, String, String, String)) -> usize| lines.iter().map(column).max();
    let (names, values) = (width(|line| line.1.len()).unwrap_or(0), width(|line| line.2.len()).unwrap_or(0));
    lines
        .iter()
        .map(|(word, name, value, why)| {
            format!("  {word:<11} {name:<names$}  {value:<values$}  {why}").trim_end().to_owned() + "\n"
        })
        .collect()
}

fn are_neighbours(one: &Row<'_>, other: &Row<'_>) -> bool {
    let follows = match (one.key.queue(), other.key.queue()) {
        (Some((one, low)), Some((other, high))) => one == other && high == low + 1,
        _ => false,
    };
    follows
        && one.key.name() == other.key.name()
        && (one.word, &one.value, &one.why) == (other.word, &other.value, &other.why)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(queue: u32, value: &str) -> (Setting, String) {
        (Setting::Rps { queue }, value.to_owned())
    }

    #[test]
    fn neighbours_share_a_line() {
        let keys = [row(0, "a"), row(1, "a"), row(2, "b"), row(4, "b"), row(5, "b")];
        let rows = keys.iter().map(|(key, value)| Row { word: "holds", key, value: value.clone(), why: String::new() });
        let text = table(rows.collect());
        let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(
            lines,
            [
                vec!["holds", "rx-0", "to", "rx-1", "rps_cpus", "a"],
                vec!["holds", "rx-2", "rps_cpus", "b"],
                vec!["holds", "rx-4", "to", "rx-5", "rps_cpus", "b"],
            ]
        );
    }

    #[test]
    fn every_group_can_be_skipped() {
        for group in Group::ALL {
            let args = WishFlags::augment_args(clap::Command::new("x")).get_matches_from(["x", "--skip", group.name()]);
            assert_eq!(args.get_many::<Group>("skip").unwrap().collect::<Vec<_>>(), [&group]);
        }
    }
}
