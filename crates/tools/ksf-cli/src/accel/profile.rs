//! What `ksf accel` knows of programs: how they accept, what they need for a queue per worker, and what cannot be helped.
//!
//! A profile is chosen by the name of the program's file, or by `--profile`. It changes as little as possible: variables
//! that the user has not set. Everything else is advice, which `ksf accel profile` shows. Where the facts come from stands beside them; how they were checked is in docs/accel-profiles.md.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::path::Path;
use std::process::ExitCode;

use clap::Args;
use clap::builder::PossibleValuesParser;

use crate::output::{Failure, print};

/// The word for no profile.
const NONE: &str = "none";

/// One program, or several that accept in the same way.
#[derive(Debug)]
pub(super) struct Profile {
    pub(super) name: &'static str,
    /// Names of files it is recognised by; those of Python modules, too.
    files: &'static [&'static str],
    /// What has a queue.
    worker: &'static str,
    /// Variables it is started with, unless the user has set them: name, value, and what for.
    pub(super) environment: &'static [(&'static str, &'static str, &'static str)],
    /// Settings to look at, and why.
    settings: &'static [(&'static str, &'static str)],
    /// What is not helped.
    limits: &'static [&'static str],
    source: &'static str,
}

/// All profiles, in the order of their names.
pub(super) const PROFILES: &[Profile] = &[
    Profile {
        name: "gunicorn",
        files: &["gunicorn", "gunicorn3"],
        worker: "a worker process of the classes gthread, uvicorn, gevent and other event loops",
        environment: &[],
        settings: &[
            ("-w N", "one worker per CPU at least; without it there is one in all"),
            (
                "-k gthread, or --threads N",
                "waits by epoll; the default class sync waits by select() and is not helped",
            ),
            ("--reuse-port", "leave it off: it makes gunicorn's own sockets, which are not needed"),
        ],
        limits: &["the class sync: its workers share one queue as before, and nothing is worse"],
        source: "gunicorn.org/design; gunicorn/workers/sync.py",
    },
    Profile {
        name: "haproxy",
        files: &["haproxy"],
        worker: "a thread",
        environment: &[],
        settings: &[
            ("nbthread", "leave it out: there is a thread per CPU of the process"),
            (
                "bind ... shards by-thread",
                "a socket for each thread, which keeps what it accepts. Without it there is one socket; ksf divides it \
                 among the threads, but HAProxy passes on to others what they accept (tune.listener.multi-queue)",
            ),
            (
                "tune.listener.multi-queue off",
                "as good as shards: each thread keeps what it accepts from the queue that ksf gives it",
            ),
        ],
        limits: &["without one of these settings, connections are accepted on their CPU, and served on any"],
        source: "configuration manual of HAProxy 2.6, sections 3.1 and 3.2",
    },
    Profile {
        name: "lighttpd",
        files: &["lighttpd"],
        worker: "a worker process",
        environment: &[],
        settings: &[(
            "server.max-worker = N",
            "one per CPU; without it one process accepts and there is nothing to steer. lighttpd advises against \
             workers where one process suffices, and some modules do not work with them",
        )],
        limits: &["one process without workers has one queue"],
        source: "redmine.lighttpd.net, Server_max-workerDetails",
    },
    Profile {
        name: "nginx",
        files: &["nginx"],
        worker: "a worker process",
        environment: &[],
        settings: &[
            ("worker_processes auto", "one per CPU; the default is 1, and then there is nothing to steer"),
            ("accept_mutex off", "the default since 1.11.3; with it on, workers accept by turns instead of at home"),
            (
                "listen ... reuseport",
                "leave it off: own sockets of workers lose connections at a reload, queues do not",
            ),
            ("worker_cpu_affinity", "leave it out: each worker is bound to the CPU of its queue"),
        ],
        limits: &["UDP (stream, QUIC) is left to nginx"],
        source: "nginx.org/en/docs/ngx_core_module.html",
    },
    Profile {
        name: "node",
        files: &["node", "nodejs"],
        worker: "a worker process of the module cluster",
        environment: &[(
            "NODE_CLUSTER_SCHED_POLICY",
            "none",
            "workers accept by themselves; by default the primary accepts for all of them and hands connections out",
        )],
        settings: &[
            ("cluster.fork()", "one worker per CPU; a process without workers has one queue"),
            (
                "cluster.schedulingPolicy",
                "set in the program it wins over the variable: then the primary accepts alone",
            ),
        ],
        limits: &["worker_threads do not accept; each server of one process has one queue"],
        source: "nodejs.org/api/cluster.html",
    },
    Profile {
        name: "uvicorn",
        files: &["uvicorn", "hypercorn"],
        worker: "a worker process",
        environment: &[],
        settings: &[("--workers N", "one per CPU; without it one process accepts and there is nothing to steer")],
        limits: &["--reload starts one process"],
        source: "uvicorn.org/settings, uvicorn.org/deployment",
    },
];

/// The names of all profiles, and the word for none.
pub(super) fn names() -> PossibleValuesParser {
    PossibleValuesParser::new(PROFILES.iter().map(|profile| profile.name).chain([NONE]))
}

/// The profile that was asked for, or that of the program.
pub(super) fn choose(wish: Option<&str>, command: &[OsString]) -> Option<&'static Profile> {
    match wish {
        Some(wish) => PROFILES.iter().find(|profile| profile.name == wish),
        None => of_command(command),
    }
}

fn of_command(command: &[OsString]) -> Option<&'static Profile> {
    let name = name(command)?;
    PROFILES.iter().find(|profile| profile.files.contains(&name))
}

/// That of the program's file; of `python3 -m NAME`, that name.
fn name(command: &[OsString]) -> Option<&str> {
    let (program, arguments) = command.split_first()?;
    let file = Path::new(program).file_name()?.to_str()?;
    let is_python =
        file.strip_prefix("python").is_some_and(|version| version.chars().all(|c| c == '.' || c.is_ascii_digit()));
    if !is_python {
        return Some(file);
    }
    let module = arguments.iter().skip_while(|word| *word != "-m").nth(1)?;
    module.to_str()?.split('.').next()
}

impl Profile {
    /// The variables that the user has not set.
    pub(super) fn unset_variables(&self) -> impl Iterator<Item = (&'static str, &'static str)> {
        let unset = |(name, ..): &&(&str, &str, &str)| std::env::var_os(name).is_none();
        self.environment.iter().filter(unset).map(|(name, value, _)| (*name, *value))
    }

    fn describe(&self) -> String {
        let mut out = String::new();
        let _ = writeln!(out, "{} ({})", self.name, self.files.join(", "));
        let _ = writeln!(out, "  a queue for: {}", self.worker);
        for (name, value, why) in self.environment {
            let _ = writeln!(out, "  set unless it is: {name}={value}\n    {why}");
        }
        for (setting, why) in self.settings {
            let _ = writeln!(out, "  {setting}\n    {why}");
        }
        for limit in self.limits {
            let _ = writeln!(out, "  not helped: {limit}");
        }
        let _ = writeln!(out, "  source: {}", self.source);
        out
    }
}

/// Show what ksf accel knows of programs: what has a queue, what to set, what is not helped and why
#[derive(Debug, Args)]
pub(crate) struct ProfileArgs {
    /// The program [default: all of them]
    #[arg(value_name = "NAME", value_parser = PossibleValuesParser::new(PROFILES.iter().map(|profile| profile.name)))]
    name: Option<String>,
}

/// Runs the command.
pub(super) fn run(args: &ProfileArgs) -> Result<ExitCode, Failure> {
    let wanted = |profile: &&Profile| args.name.as_ref().is_none_or(|name| name == profile.name);
    let texts: Vec<_> = PROFILES.iter().filter(wanted).map(Profile::describe).collect();
    print(texts.join("\n").as_bytes())?;
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(wish: Option<&str>, command: &str) -> Option<&'static str> {
        let words: Vec<OsString> = command.split(' ').map(OsString::from).collect();
        choose(wish, &words).map(|profile| profile.name)
    }

    #[test]
    fn programs_are_recognised_by_the_name_of_their_file() {
        for (command, name) in [
            ("nginx -c x", Some("nginx")),
            ("/usr/sbin/nginx", Some("nginx")),
            ("/opt/node-20/bin/node app.js", Some("node")),
            ("redis-server --port 1", None),
            ("python3 -m gunicorn app:app", Some("gunicorn")),
            ("/usr/bin/python3.11 -X dev -m uvicorn app:app", Some("uvicorn")),
            ("python3 -m http.server", None),
            ("python3 nginx", None),
            ("python-nginx -m uvicorn", None),
            ("nginx-debug", None),
            ("sh -c nginx", None),
        ] {
            assert_eq!(chosen(None, command), name, "{command}");
        }
    }

    #[test]
    fn a_wish_wins() {
        assert_eq!(chosen(Some("node"), "nginx"), Some("node"));
        assert_eq!(chosen(Some(NONE), "nginx"), None);
    }

    #[test]
    fn profiles_are_sorted_and_no_file_has_two() {
        assert!(PROFILES.is_sorted_by_key(|profile| profile.name));
        let mut files: Vec<_> = PROFILES.iter().flat_map(|profile| profile.files).collect();
        let all = files.len();
        files.sort();
        files.dedup();
        assert_eq!(files.len(), all);
    }
}
