//! `ksf accel status`: what is accelerated, what not, and why.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use ksf_accel::Level;
use ksf_accel::status::{self, ListenerStatus, Status as Program, WorkerCounters};
use serde::Serialize;

use super::run::failure;
use crate::output::{Align, Failure, Status, escaped, json_line, print, table};

/// Schema name of the JSON form; the number goes up when a field changes its meaning or goes.
const SCHEMA: &str = "ksf-accel/1";

/// Show accelerated programs: their listeners, workers, and where connections went
#[derive(Debug, Args)]
pub(crate) struct StatusArgs {
    /// Process id of the program, of one of its workers, or of its holder [default: all programs]
    #[arg(value_name = "PID")]
    pid: Option<u32>,
    /// One JSON document instead of tables
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Document {
    schema: &'static str,
    programs: Vec<Program>,
}

/// Runs the command.
pub(super) fn run(args: &StatusArgs) -> Result<ExitCode, Failure> {
    let programs = match args.pid {
        Some(pid) => of_process(pid)?,
        None => all()?,
    };
    let programs: Vec<Program> = programs.into_iter().map(|(_, program)| program).collect();
    let text = if args.json {
        let document = Document { schema: SCHEMA, programs };
        json_line(&document)?
    } else {
        text(&escaped(&programs))
    };
    print(text.as_bytes())?;
    Ok(ExitCode::SUCCESS)
}

/// Accelerated programs of this user, with the sockets of their holders.
type Programs = Vec<(PathBuf, Program)>;

/// Those that this process is of: the program, one of its workers, or its holder. One at least.
pub(super) fn of_process(pid: u32) -> Result<Programs, Failure> {
    let mut programs = all()?;
    programs.retain(|(_, program)| {
        program.pid == pid || program.processes.iter().any(|worker| *worker == pid || is_master(pid, *worker))
    });
    if programs.is_empty() {
        return Err(Failure::new(Status::Unavailable, format!("process {pid} is not accelerated"))
            .remedy("see ksf accel status for those that are; each is shown to the user who has started it"));
    }
    Ok(programs)
}

/// True for the parent, or its parent, and so on, in the same process group: a daemon's master, which forks after its
/// program has begun and then says nothing to the holder.
fn is_master(pid: u32, worker: u32) -> bool {
    // The fields of proc_pid_stat(5) after the name: state, parent, process group.
    let parent_and_group = |pid: u32| -> Option<(u32, u32)> {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let mut fields = stat.rsplit_once(") ")?.1.split(' ').skip(1);
        Some((fields.next()?.parse().ok()?, fields.next()?.parse().ok()?))
    };
    let Some((mut parent, group)) = parent_and_group(worker) else { return false };
    while let Some((next, its_group)) = parent_and_group(parent) {
        if its_group != group {
            return false;
        }
        if parent == pid {
            return true;
        }
        parent = next;
    }
    false
}

fn all() -> Result<Programs, Failure> {
    let folder = status::folder().ok_or_else(|| {
        Failure::new(
            Status::Unavailable,
            "there is no folder where programs could be found: XDG_RUNTIME_DIR is not set",
        )
        .remedy("set it for ksf accel run and for this command; as a rule it is /run/user/UID")
    })?;
    status::all_with_sockets(&folder).map_err(|error| failure(&error))
}

fn text(programs: &[Program]) -> String {
    if programs.is_empty() {
        return "no program is accelerated\n".to_owned();
    }
    programs.iter().map(of_program).collect::<Vec<_>>().join("\n")
}

fn of_program(program: &Program) -> String {
    let mut out = String::new();
    let off = if program.on { "" } else { ", switched off" };
    let _ = writeln!(out, "{} (holder {})", program.program.join(" "), program.pid);
    let _ = writeln!(out, "  steering: {}{off}", program.level.name());
    for refused in &program.refused {
        let _ = writeln!(out, "    not {}: {}", refused.level.name(), refused.why);
    }
    for other in &program.other_programs {
        let _ = writeln!(out, "    beside another sk_lookup program: {other}");
    }
    let processes: String = program.processes.iter().map(|pid| format!(" {pid}")).collect();
    let _ = writeln!(out, "  processes:{}", if processes.is_empty() { " none" } else { &processes });
    if let Some(ports) = &program.source_ports {
        let _ = writeln!(out, "  source ports of its connections: {ports}");
    }
    if program.attached {
        let _ = writeln!(out, "  steered from outside: what its workers accept is not counted");
    } else {
        let _ = writeln!(out, "  stalls: {}, rescues: {}", program.stalls, program.rescues);
    }
    for refused in &program.refused_requests {
        let _ = writeln!(out, "  refused {} times: {}", refused.count, refused.why);
    }
    if program.listeners.is_empty() {
        // While it is off, the library says nothing.
        let why = if program.on { "it does not listen on TCP" } else { "switched off" };
        let _ = writeln!(out, "  not accelerated because {why}");
    }
    for listener in &program.listeners {
        of_listener(&mut out, program, listener);
    }
    of_workers(&mut out, program);
    out
}

fn of_listener(out: &mut String, program: &Program, listener: &ListenerStatus) {
    let workers = program.workers.iter().filter(|worker| worker.ready.contains(&listener.address)).count();
    let _ = match (&listener.not_accelerated, workers) {
        (Some(why), _) => writeln!(out, "  {}: not accelerated because: {why}", listener.address),
        (None, _) if !program.on => writeln!(out, "  {}: not accelerated because switched off", listener.address),
        (None, 0) => {
            writeln!(out, "  {}: not accelerated because no worker waits for it by epoll or accept", listener.address)
        }
        (None, _) => {
            let own = if listener.own_reuseport { ", sockets of the program's own" } else { "" };
            let waiting: u32 = listener.queues.iter().map(|queue| queue.waiting).sum();
            let waiting = if program.attached { String::new() } else { format!(", waiting {waiting}") };
            let (mechanism, queues) = (listener.mechanism.name(), listener.queues.len());
            writeln!(
                out,
                "  {}: accelerated by {mechanism}; workers {workers}, queues {queues}{own}{waiting}",
                listener.address
            )
        }
    };
    if let Some(trouble) = &listener.trouble {
        let _ = writeln!(out, "    a worker of it is not accelerated because: {trouble}");
    }
    for excluded in &listener.excluded {
        let _ = writeln!(out, "    left to another listener: {excluded}");
    }
}

const COLUMNS: [&str; 11] =
    ["worker", "pid", "tid", "cpu", "state", "own", "fallback", "stolen", "local", "remote", "listeners"];

fn of_workers(out: &mut String, program: &Program) {
    let mut rows = vec![COLUMNS.map(str::to_owned)];
    for worker in &program.workers {
        let state = match (worker.stalled, worker.ready.is_empty()) {
            (true, _) => "stalled",
            (false, true) => "away",
            (false, false) => "ready",
        };
        let cpu = worker.cpu.map_or("-".to_owned(), |cpu| cpu.to_string());
        let names = [worker.index.to_string(), worker.pid.to_string(), worker.tid.to_string(), cpu, state.to_owned()];
        let listeners = if worker.ready.is_empty() { "-".to_owned() } else { worker.ready.join(" ") };
        rows.push(row(names, &worker.counters, program, listeners));
    }
    if program.ended_workers != WorkerCounters::default() {
        let names = ["ended", "-", "-", "-", "-"].map(str::to_owned);
        rows.push(row(names, &program.ended_workers, program, "-".to_owned()));
    }
    if rows.len() == 1 {
        return;
    }
    out.push_str(&table(2, [Align::Left; COLUMNS.len()], &rows));
}

fn row(names: [String; 5], counters: &WorkerCounters, program: &Program, listeners: String) -> [String; COLUMNS.len()] {
    // Only an eBPF program counts where requests arrive.
    let steered = |count: u64| match program.level {
        Level::SkLookup => count.to_string(),
        _ => "-".to_owned(),
    };
    let accepted = |count: u64| if program.attached { "-".to_owned() } else { count.to_string() };
    let [index, pid, tid, cpu, state] = names;
    [
        index,
        pid,
        tid,
        cpu,
        state,
        accepted(counters.accepted_own),
        accepted(counters.accepted_fallback),
        accepted(counters.accepted_stolen),
        steered(counters.steered_local),
        steered(counters.steered_remote),
        listeners,
    ]
}

#[cfg(test)]
mod tests {
    use ksf_accel::Refused;
    use ksf_accel::status::{QueueStatus, WorkerStatus};

    use super::*;

    fn listener(address: &str) -> ListenerStatus {
        ListenerStatus {
            address: address.to_owned(),
            mechanism: Level::ClassicBpf,
            not_accelerated: None,
            trouble: None,
            own_reuseport: false,
            excluded: vec!["127.0.0.1:80".to_owned()],
            queues: vec![QueueStatus { worker: 0, ready: true, waiting: 3, waiting_max: 128 }],
        }
    }

    fn program() -> Program {
        let refused = ListenerStatus {
            not_accelerated: Some("the kernel said no".to_owned()),
            excluded: Vec::new(),
            ..listener("[::1]:90")
        };
        Program {
            pid: 7,
            name: "ksf-accel-7".to_owned(),
            attached: false,
            program: vec!["nginx".to_owned(), "-e".to_owned()],
            source_ports: Some("13:4:0-1".to_owned()),
            on: true,
            level: Level::ClassicBpf,
            refused: vec![Refused { level: Level::SkLookup, why: "not permitted".to_owned() }],
            other_programs: Vec::new(),
            processes: vec![8, 9],
            listeners: vec![listener("0.0.0.0:80"), listener("0.0.0.0:81"), refused],
            workers: vec![WorkerStatus {
                index: 0,
                pid: 8,
                tid: 8,
                cpu: Some(1),
                ready: vec!["0.0.0.0:80".to_owned()],
                stalled: false,
                counters: WorkerCounters { accepted_own: 12, accepted_stolen: 1, ..WorkerCounters::default() },
            }],
            ended_workers: WorkerCounters { accepted_own: 5, ..WorkerCounters::default() },
            stalls: 2,
            rescues: 3,
            refused_requests: Vec::new(),
        }
    }

    #[test]
    fn the_text_says_what_is_accelerated_and_why_not() {
        let expected = "\
nginx -e (holder 7)
  steering: classic_bpf
    not sk_lookup: not permitted
  processes: 8 9
  source ports of its connections: 13:4:0-1
  stalls: 2, rescues: 3
  0.0.0.0:80: accelerated by classic_bpf; workers 1, queues 1, waiting 3
    left to another listener: 127.0.0.1:80
  0.0.0.0:81: not accelerated because no worker waits for it by epoll or accept
    left to another listener: 127.0.0.1:80
  [::1]:90: not accelerated because: the kernel said no
  worker  pid  tid  cpu  state  own  fallback  stolen  local  remote  listeners
  0       8    8    1    ready  12   0         1       -      -       0.0.0.0:80
  ended   -    -    -    -      5    0         0       -      -       -
";
        assert_eq!(text(&[program()]), expected);
    }

    #[test]
    fn silence_has_its_words_too() {
        assert_eq!(text(&[]), "no program is accelerated\n");
        let silent = Program { listeners: Vec::new(), workers: Vec::new(), ..program() };
        let said = text(&[silent]);
        assert!(said.contains("not accelerated because it does not listen on TCP"), "{said}");
        let said = text(&[Program { on: false, ..program() }]);
        assert!(said.contains("steering: classic_bpf, switched off"), "{said}");
        assert!(said.contains("0.0.0.0:80: not accelerated because switched off"), "{said}");
    }
}
