//! Manual pages and completion scripts, made from the definitions of the command line.

use std::fs;
use std::io::{self, Write};
use std::path::Path;

use clap::{Command, CommandFactory};
use clap_mangen::Man;
use clap_mangen::roff::{Roff, bold, roman};

use crate::args::Cli;
use crate::output::{EXIT_STATUSES, Failure, Status};

/// Commands that are also installed, as links, under their bare names.
pub(crate) const BARE_NAMES: &[&str] = &["kecho", "krpc2", "echotest", "rpctest"];

/// The page of `ksf`, or of one of its commands: `accel-nic` is that of `ksf accel nic`.
pub(crate) fn page(command: Option<&str>) -> Result<Vec<u8>, Failure> {
    let name = match command {
        None | Some("ksf") => "ksf".to_owned(),
        Some(name) => format!("ksf-{name}"),
    };
    let found = commands().into_iter().find(|command| page_name(command) == name).ok_or_else(|| {
        Failure::new(Status::Usage, format!("there is no command \"{}\"", command.unwrap_or("ksf")))
            .remedy("see ksf --help")
    })?;
    render(found).map_err(|error| Failure::os("cannot make the manual page", &error))
}

/// Writes a page for every command, and for every bare name a page that refers to it.
pub(crate) fn write_pages(folder: &Path) -> Result<(), Failure> {
    let write = || {
        fs::create_dir_all(folder)?;
        for command in commands() {
            fs::write(folder.join(format!("{}.1", page_name(&command))), render(command)?)?;
        }
        BARE_NAMES
            .iter()
            .try_for_each(|name| fs::write(folder.join(format!("{name}.1")), format!(".so man1/ksf-{name}.1\n")))
    };
    write().map_err(|error| Failure::os(format!("cannot write manual pages to {}", folder.display()), &error))
}

/// A completion script for `ksf`.
pub(crate) fn completions(shell: clap_complete::Shell) -> Vec<u8> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "ksf", &mut script);
    script
}

/// `ksf` and all commands below it. Building gives each the name of its page and the words that call it.
fn commands() -> Vec<Command> {
    fn add(command: &Command, all: &mut Vec<Command>) {
        all.push(command.clone());
        command.get_subcommands().for_each(|below| add(below, all));
    }
    let mut ksf = Cli::command().disable_help_subcommand(true);
    ksf.build();
    let mut all = Vec::new();
    add(&ksf, &mut all);
    all
}

/// Name of the page of a command: `ksf-accel-nic`.
fn page_name(command: &Command) -> &str {
    command.get_display_name().unwrap_or("ksf")
}

fn render(command: Command) -> io::Result<Vec<u8>> {
    let name = page_name(&command).to_owned();
    let source = format!("ksf {}", env!("CARGO_PKG_VERSION"));
    let has_subcommands = command.has_subcommands();
    let serves = name == "ksf" || command.get_arguments().any(|argument| argument.get_id() == "stats_socket");
    let man = Man::new(command).title(name.to_uppercase()).section("1").date("").source(source).manual("ksf manual");
    let mut out = Vec::new();
    man.render_title(&mut out)?;
    man.render_name_section(&mut out)?;
    man.render_synopsis_section(&mut out)?;
    man.render_description_section(&mut out)?;
    man.render_options_section(&mut out)?;
    if has_subcommands {
        man.render_subcommands_section(&mut out)?;
    }
    if serves {
        server_sections(&mut out)?;
    }
    if name == "ksf-serve" {
        example_section(&mut out)?;
    }
    section("EXIT STATUS", EXIT_STATUSES.iter().map(|(code, meaning)| (code.to_string(), *meaning)), &mut out)?;
    see_also(&name, &mut out)?;
    Ok(out)
}

/// A section of terms with their explanations.
fn section<'a>(
    title: &str,
    entries: impl IntoIterator<Item = (String, &'a str)>,
    out: &mut dyn Write,
) -> io::Result<()> {
    let mut roff = Roff::new();
    roff.control("SH", [title]);
    for (term, text) in entries {
        roff.control("TP", []);
        roff.text([bold(term)]);
        roff.text([roman(text)]);
    }
    roff.to_writer(out)
}

/// What concerns every server.
fn server_sections(out: &mut dyn Write) -> io::Result<()> {
    let sections: &[(&str, &[(&str, &str)])] = &[
        (
            "SIGNALS",
            &[
                (
                    "SIGTERM, SIGINT",
                    "Stop listening, answer what was received, close, and exit with 0. A second one ends at once with 71.",
                ),
                (
                    "SIGHUP",
                    "Read the limits again: --config-limits FILE, or the tables [limits] of the configuration file. If the file is wrong, the old limits stay and a line says why.",
                ),
            ],
        ),
        (
            "RIGHTS",
            &[
                (
                    "kernel engine, XDP",
                    "CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON: run as root, or setcap cap_bpf,cap_net_admin,cap_perfmon+ep on the binary.",
                ),
                ("uring and epoll", "None, for ports from 1024 on."),
            ],
        ),
        (
            "FILES",
            &[("/run/ksf/PID.sock", "Socket of ksf stat; below $XDG_RUNTIME_DIR where /run/ksf cannot be written.")],
        ),
        (
            "ENVIRONMENT",
            &[
                ("LISTEN_FDS, LISTEN_PID, LISTEN_FDNAMES", "Sockets passed by the service manager (sd_listen_fds(3))."),
                ("NOTIFY_SOCKET, WATCHDOG_USEC", "Readiness, reloading, stopping and the watchdog (sd_notify(3))."),
            ],
        ),
    ];
    sections.iter().try_for_each(|(title, entries)| {
        section(title, entries.iter().map(|(term, text)| ((*term).to_owned(), *text)), out)
    })
}

/// The example configuration is the reference of its keys, so the page shows it whole.
fn example_section(out: &mut dyn Write) -> io::Result<()> {
    let mut roff = Roff::new();
    roff.control("SH", ["EXAMPLE"]);
    roff.control("nf", []);
    for line in include_str!("../../../../packaging/ksf.toml").lines() {
        roff.text([roman(line)]);
    }
    roff.control("fi", []);
    roff.to_writer(out)
}

fn see_also(name: &str, out: &mut dyn Write) -> io::Result<()> {
    let ksf = Cli::command();
    let pages: Vec<String> = std::iter::once("ksf".to_owned())
        .chain(ksf.get_subcommands().map(|command| format!("ksf-{}", command.get_name())))
        .filter(|page| page != name)
        .map(|page| format!("{page}(1)"))
        .collect();
    let mut roff = Roff::new();
    roff.control("SH", ["SEE ALSO"]);
    roff.text([roman(pages.join(", "))]);
    roff.to_writer(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_has_a_page_with_exit_statuses() {
        for command in commands() {
            let name = page_name(&command).to_owned();
            let text = String::from_utf8(render(command).unwrap()).unwrap();
            assert!(text.contains("EXIT STATUS") && text.contains(".TH"), "{name}");
        }
        let apply = String::from_utf8(page(Some("accel-nic-apply")).unwrap()).unwrap();
        assert!(apply.contains("ksf accel nic apply") && apply.contains("\\-\\-yes"), "{apply}");
        let serve = String::from_utf8(page(Some("serve")).unwrap()).unwrap();
        assert!(serve.contains("[[service]]"));
        assert_eq!(page(Some("nonsense")).unwrap_err().status, Status::Usage);
    }
}
