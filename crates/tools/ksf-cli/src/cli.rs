//! From the words on the command line to the command that runs.

use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{CommandFactory, FromArgMatches};
use ksf_load::LoadError;

use crate::args::{Cli, Command};
use crate::load::{LoadArgs, Protocol};
use crate::output::{Failure, Status, one_line, say};
use crate::{accel, doctor, kcm_run, manual, output, serve, stats};

/// Runs `ksf`; `words` begin with the name of the program.
pub(crate) fn main(words: impl IntoIterator<Item = OsString>) -> ExitCode {
    let words: Vec<OsString> = words.into_iter().collect();
    let result = match parse(&words) {
        Ok(Some(cli)) => run(cli.command),
        // Help or the version was asked for and printed.
        Ok(None) => Ok(ExitCode::SUCCESS),
        Err(failure) => Err(failure),
    };
    result.unwrap_or_else(|failure| {
        say(&failure);
        failure.code()
    })
}

fn run(command: Command) -> Result<ExitCode, Failure> {
    match command {
        Command::Accel(args) => return accel::run(args),
        Command::Service(command) => return serve::command(command),
        Command::Serve(args) => return serve::config(args),
        Command::Echotest(args) => return measured("echotest", ksf_load::echo::run(args), |end| end.exit_code()),
        Command::Rpctest(args) => return measured("rpctest", ksf_load::rpc::run(args), |end| end.exit_code()),
        Command::Worktest(args) => return measured("worktest", ksf_load::work::run(args), |end| end.exit_code()),
        Command::Load(LoadArgs { protocol: Protocol::Http(args) }) => {
            return measured("http", ksf_load::http::run(*args), |end| end.exit_code());
        }
        Command::Load(LoadArgs { protocol: Protocol::Kv(args) }) => {
            return measured("kv", ksf_load::kv::run(*args), |end| end.exit_code());
        }
        Command::Load(LoadArgs { protocol: Protocol::Nfs(args) }) => {
            return measured("nfs", ksf_load::nfs::run(*args), |end| end.exit_code());
        }
        Command::Load(LoadArgs { protocol: Protocol::Ninep(args) }) => {
            return measured("9p", ksf_load::ninep::run(*args), |end| end.exit_code());
        }
        Command::Doctor(args) => {
            let report = doctor::examine();
            output::print(if args.json { output::json_pretty(&report)? } else { report.text() })
        }
        Command::Stat(args) => stats::client::run(&args),
        Command::Completions(args) => output::print(manual::completions(args.shell)),
        Command::Man(args) => match &args.dir {
            Some(folder) => manual::write_pages(folder),
            None => output::print(manual::page(args.command.as_deref())?),
        },
        Command::KcmRun(args) => match kcm_run::run(&args)? {},
        Command::Sdk(args) => write_sdk(&args.dir),
    }
    .map(|()| ExitCode::SUCCESS)
}

/// How a measurement ended. The tools have spoken about wrong replies themselves.
fn measured<T>(tool: &str, result: Result<T, LoadError>, code: fn(T) -> u8) -> Result<ExitCode, Failure> {
    Ok(ExitCode::from(match result {
        Ok(end) => code(end),
        Err(error) => {
            say(&format_args!("{tool}: {}", one_line(&error.to_string())));
            error.exit_code()
        }
    }))
}

/// Writes the headers of the SDK, so that a program can be compiled without ksf's sources.
fn write_sdk(folder: &Path) -> Result<(), Failure> {
    ksf_bpf::write_sdk(folder, &[ksf_kernel::SDK, ksf_accel::flow::SDK, ksf_bpf_framing::SDK])
        .map_err(|error| Failure::os(format!("cannot write the headers to {}", folder.display()), &error))
}

/// Understands the words; `None` if they asked for help or the version.
fn parse(words: &[OsString]) -> Result<Option<Cli>, Failure> {
    let program = words.first().map(OsString::as_os_str).unwrap_or_default();
    let parsed = match bare_name(program) {
        Some(name) => parse_bare(name, words),
        None => Cli::command().try_get_matches_from(words),
    };
    let cli = parsed.and_then(|matches| Cli::from_arg_matches(&matches));
    match cli {
        Ok(cli) => Ok(Some(cli)),
        Err(error) => match error.kind() {
            ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
                output::print(error.render().to_string())?;
                Ok(None)
            }
            ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand | ErrorKind::MissingSubcommand => {
                Err(Failure::new(Status::Usage, "no command was given")
                    .remedy("see ksf --help; to begin with, try ksf doctor or ksf kecho"))
            }
            kind => Err(usage_failure(kind, &error.render().to_string(), words)),
        },
    }
}

/// The command a program name stands for, when the binary is called by a link.
fn bare_name(program: &OsStr) -> Option<&'static str> {
    let name = Path::new(program).file_name()?;
    manual::BARE_NAMES.iter().find(|bare| name == **bare).copied()
}

/// `kecho --listen ...` is `ksf kecho --listen ...`, with help that says `kecho`.
fn parse_bare(name: &'static str, words: &[OsString]) -> clap::error::Result<clap::ArgMatches> {
    Cli::command()
        .mut_subcommand(name, |command| command.bin_name(name).display_name(name))
        .multicall(true)
        .try_get_matches_from(std::iter::once(OsString::from(name)).chain(words[1..].iter().cloned()))
}

/// Makes one line of clap's message, which is a paragraph, a usage and a hint.
fn usage_failure(kind: ErrorKind, rendered: &str, words: &[OsString]) -> Failure {
    let status = match kind {
        ErrorKind::ValueValidation => Status::Data,
        _ => Status::Usage,
    };
    let text = rendered.strip_prefix("error: ").unwrap_or(rendered);
    let text = text.split("\n\nUsage:").next().unwrap_or(text);
    let text = text.split("\n\nFor more information").next().unwrap_or(text);
    let (what, tip) = text.split_once("\n\n  tip: ").unwrap_or((text, ""));
    let help = help_of(words);
    let remedy = if tip.is_empty() { format!("see {help}") } else { format!("{}; see {help}", one_line(tip)) };
    Failure::new(status, what).remedy(remedy)
}

/// The help that explains the command the words meant.
fn help_of(words: &[OsString]) -> String {
    let program = words.first().map(OsString::as_os_str).unwrap_or_default();
    if let Some(name) = bare_name(program) {
        return format!("{name} --help");
    }
    let ksf = Cli::command();
    let mut command = &ksf;
    let mut path = String::from("ksf");
    for word in words.iter().skip(1).filter_map(|word| word.to_str()) {
        if let Some(found) = command.find_subcommand(word) {
            command = found;
            path = format!("{path} {word}");
        }
    }
    format!("{path} --help")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse_text(text: &str) -> Result<Option<Cli>, Failure> {
        let words: Vec<OsString> = text.split_whitespace().map(OsString::from).collect();
        parse(&words)
    }

    #[test]
    fn mistakes_are_one_line_with_the_right_status() {
        for (text, status, part) in [
            ("ksf", Status::Usage, "no command"),
            ("ksf nonsense", Status::Usage, "see ksf --help"),
            ("ksf kech", Status::Usage, "kecho"),
            ("ksf kecho --nonsense", Status::Usage, "see ksf kecho --help"),
            ("ksf kecho --lisen x", Status::Usage, "--listen"),
            ("ksf kecho --listen localhost:1", Status::Data, "in numbers"),
            ("ksf kecho --engine fast", Status::Usage, "auto, kernel, uring, epoll"),
            ("ksf kecho --cpus 3-1", Status::Data, "list of CPUs"),
            ("ksf kecho --connections-max x", Status::Data, "not a number"),
            ("ksf kecho --connections-max 0", Status::Data, "out of range"),
            ("ksf kecho --xdp lo --no-xdp", Status::Usage, "cannot be used with"),
            ("ksf krpc2 --program 7", Status::Data, "100003:3-4"),
            ("ksf serve", Status::Usage, "CONFIG"),
            ("ksf stat --watch 0", Status::Data, "seconds"),
            ("ksf load", Status::Usage, "no command"),
            ("ksf load nonsense", Status::Usage, "see ksf load --help"),
            ("ksf load http", Status::Usage, "see ksf load http --help"),
            ("ksf load http http://h/ -n x", Status::Data, "see ksf load http --help"),
            ("ksf load kv", Status::Usage, "see ksf load kv --help"),
            ("ksf load kv h --zipf 2", Status::Data, "see ksf load kv --help"),
            ("ksf load kv h --audit f --journal g", Status::Usage, "cannot be used with"),
            ("ksf accel nic plan", Status::Usage, "see ksf accel nic plan --help"),
            ("ksf accel nic plan eth0 --cpus 3-1", Status::Data, "list of CPUs"),
            ("ksf accel nic plan eth0 --for fun", Status::Usage, "latency, throughput"),
            ("ksf accel nic plan eth0 --skip rps,nonsense", Status::Usage, "coalescing"),
            ("ksf accel flow attach lo --policy fast", Status::Data, "round-robin"),
            ("ksf accel flow attach lo --loopback", Status::Usage, "--cgroup"),
            ("ksf accel flow check --cpus 3-1", Status::Data, "list of CPUs"),
            ("kecho --nonsense", Status::Usage, "see kecho --help"),
        ] {
            let failure = parse_text(text).unwrap_err();
            let line = failure.to_string();
            assert_eq!(failure.status, status, "{text}: {line}");
            assert!(line.contains(part), "{text}: {line}");
            assert!(!line.contains('\n'), "{text}: {line}");
        }
    }

    #[test]
    fn bare_names_are_commands() {
        for (text, wanted) in
            [("/usr/bin/kecho --engine epoll", "Kecho"), ("krpc2 -v", "Krpc2"), ("./ksf kecho", "Kecho")]
        {
            let cli = parse_text(text).unwrap().unwrap();
            assert!(format!("{:?}", cli.command).starts_with(&format!("Service({wanted}(")), "{text}");
        }
    }
}
