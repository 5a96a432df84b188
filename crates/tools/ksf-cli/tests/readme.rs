//! The commands of README.md, of the guides and of the examples do what they say: they are read out of the documents and
//! typed one after the other, into a copy of the files they name, with `ksf` as `make install` has installed it.
//!
//! A block of commands is one terminal: a server in it runs until the next command of its block is typed (after Ctrl-C),
//! or until the end of the document. In an `sh` block every line is a command; in a `console` block commands begin with
//! `$ ` and what follows is their output. In a gate a load has fewer requests than the document says. Needs root.

use crate::support;
use std::collections::BTreeSet;
use std::fs;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use crate::support::{
    Folder, PATIENCE, Running, Server, built_folder, private_network_and_run, stderr, stdout, wait_until,
};
use ksf_test::effort;
use rustix::process::{Pid, Signal, kill_process_group};

/// Commands of the documents that are not typed: what `make -n` must say that they do, and why they are not.
const NOT_RUN: [(&str, &str, &str); 2] = [
    ("make demo", "xtask demo", "needs a release build; xtask's tests/demo.rs runs the rest of it"),
    ("make test", "scripts/test.sh test", "runs this test"),
];

/// Commands that go on until they are told to end: by a signal; they tell the service manager how they are.
const SERVERS: [&str; 10] = [
    "ksf kecho",
    "kecho",
    "ksf krpc2",
    "ksf serve",
    "ksf nfs --export",
    "ksf 9p --export",
    "ksf store",
    "ksf run",
    "make run",
    "ksf accel flow attach",
];

/// Commands that go on until their input ends (Ctrl-D), and print a line when they serve.
const READERS: [&str; 1] = ["./echo_workers"];

const REPOSITORY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../..");

/// Kinds of blocks without commands.
const OTHER_BLOCKS: [&str; 6] = ["text", "rust", "c", "toml", "json", "ini"];

#[test]
fn the_commands_of_the_readme_work() {
    type_alone("README.md", "");
}

#[test]
fn the_commands_of_the_guide_work() {
    type_alone("docs/writing-a-kernel-service.md", "examples/ksf-uppercase");
}

#[test]
fn the_commands_of_the_examples_work() {
    for example in examples() {
        type_alone(&format!("{example}/README.md"), &example);
    }
}

/// "Copy this directory to anywhere": where there is nothing of the source tree beside it.
#[test]
fn examples_are_made_anywhere() {
    let checkout = Checkout::new();
    checkout.types("make install", &checkout.root);
    for example in ["examples/ksf-uppercase", "examples/rps-policy"] {
        assert!(read(&format!("{example}/README.md")).contains("copy this directory to anywhere"));
        let copy = Folder::new();
        checkout.types(&format!("cp -r . {}", copy.path("copy").display()), &checkout.root.join(example));
        checkout.types("make && ls *.bpf.o && make clean && ! ls *.bpf.o sdk 2>/dev/null", &copy.path("copy"));
    }
}

#[test]
fn the_commands_about_interfaces_work() {
    // With one CPU there is nothing to apply.
    let Some(_) = ksf_test::two_cpus_or_skip() else { return };
    let Some(()) = support::private_network_and_run() else { return };
    shell(
        "ip link add eth0 numtxqueues 2 numrxqueues 2 type veth peer name far0 && \
         ip link set eth0 up && ip link set far0 up && mount -t sysfs sysfs /sys",
    );
    type_all("docs/nic.md", "");
}

#[test]
fn the_commands_about_flows_work() {
    let Some(()) = support::private_network_and_run() else { return };
    shell(
        "ip netns add far && ip link add eth1 type veth peer name far1 netns far && \
         ip addr add 10.0.0.1/24 dev eth1 && ip link set eth1 up && ip -n far link set lo up && \
         ip -n far addr add 10.0.0.9/24 dev far1 && ip -n far link set far1 up",
    );
    let cgroups = Cgroups::mount();
    let mut service = Command::new("ip");
    service.args(["netns", "exec", "far", env!("CARGO_BIN_EXE_ksf"), "kecho", "--listen", "10.0.0.9:80"]);
    let service = Server::start_command(service, 1);
    type_all("docs/flow.md", "");
    drop(service);
    cgroups.unmount();
}

/// What the documents call the root of cgroup2: a cgroup of the test's own, with one for proxies in it.
struct Cgroups {
    folder: Folder,
    own: PathBuf,
}

impl Cgroups {
    /// In a mount namespace of the test's own.
    fn mount() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let (folder, number) = (Folder::new(), COUNT.fetch_add(1, Ordering::Relaxed));
        let own = folder.path(&format!("ksf-readme-{}-{number}", std::process::id()));
        let (all, one) = (folder.path(""), own.display());
        shell(&format!(
            "mount -t cgroup2 none {} && mkdir -p {one}/proxies && mount -t sysfs sysfs /sys && \
             mount --bind {one} /sys/fs/cgroup",
            all.display()
        ));
        Self { folder, own }
    }

    fn unmount(self) {
        let (all, one) = (self.folder.path(""), self.own.display());
        shell(&format!("umount /sys/fs/cgroup && rmdir {one}/proxies {one} && umount {}", all.display()));
    }
}

fn shell(commands: &str) {
    let output = Command::new("sh").args(["-c", commands]).output().unwrap();
    assert!(output.status.success(), "{commands}: {}", stderr(&output));
}

#[test]
fn no_document_has_commands_that_nobody_tries() {
    let guides = ["README.md", "docs/writing-a-kernel-service.md", "docs/nic.md", "docs/flow.md"];
    let mut tried = BTreeSet::from(guides.map(str::to_owned));
    tried.extend(examples().iter().map(|example| format!("{example}/README.md")));
    let mut with_commands = BTreeSet::new();
    let guides = files_in("docs").into_iter().filter(|path| path.ends_with(".md"));
    for document in tried.iter().cloned().chain(guides) {
        if !blocks(&read(&document)).unwrap_or_else(|error| panic!("{document}:{error}")).is_empty() {
            with_commands.insert(document);
        }
    }
    assert_eq!(with_commands, tried);
}

#[test]
fn what_is_not_typed_is_in_the_readme_and_in_the_makefile() {
    let blocks = blocks(&read("README.md")).unwrap();
    for (command, does, why) in NOT_RUN {
        let is_there = blocks.iter().flatten().any(|step| without_comment(&step.command) == command);
        assert!(is_there, "README.md has no `{command}` any more, which is not tried because it {why}");
        let arguments = command.strip_prefix("make ").expect("only these can be looked at without running them");
        let output = Command::new("make").args(["-n", arguments]).current_dir(REPOSITORY).output().unwrap();
        assert!(output.status.success(), "{command}: {}", stderr(&output));
        assert!(stdout(&output).contains(does), "{command} does not run `{does}`: {}", stdout(&output));
    }
}

#[test]
fn blocks_are_read_as_they_are_written() {
    let text =
        "# T\n```text\nmake\n```\n```sh\nmake    # all\n\nksf stat\n```\n\n```console\n$ od x\n0 a\n1\n$ true\n```\n";
    let step = |line, command: &str, output: Option<&str>| Step {
        line,
        command: command.to_owned(),
        output: output.map(str::to_owned),
    };
    let sh = vec![step(6, "make    # all", None), step(8, "ksf stat", None)];
    let console = vec![step(12, "od x", Some("0 a\n1\n")), step(15, "true", Some(""))];
    assert_eq!(blocks(text).unwrap(), [sh, console]);
    for (text, error) in [
        ("```\nmake\n```\n", "1: what kind of block is ``"),
        ("\n```bash\nmake\n```\n", "2: what kind of block is `bash`"),
        ("```sh\nmake \\\n  all\n```\n", "2: a command has one line"),
        ("```console\nmake\n```\n", "2: a command begins with `$ `"),
        ("```sh\nmake\n", "1: the block does not end"),
    ] {
        assert!(blocks(text).unwrap_err().contains(error), "{text}");
    }
}

/// A command, in which line it stands, and what it prints if the document says so.
#[derive(Debug, PartialEq)]
struct Step {
    line: usize,
    command: String,
    output: Option<String>,
}

/// The blocks of commands in a Markdown text.
fn blocks(text: &str) -> Result<Vec<Vec<Step>>, String> {
    let mut blocks = Vec::new();
    let mut lines = text.lines().zip(1..);
    while let Some((fence, start)) = lines.next() {
        let Some(kind) = fence.strip_prefix("```") else { continue };
        if !["sh", "console"].contains(&kind) && !OTHER_BLOCKS.contains(&kind) {
            return Err(format!(
                "{start}: what kind of block is `{kind}`? Commands: sh or console; else: {OTHER_BLOCKS:?}"
            ));
        }
        let mut steps: Vec<Step> = Vec::new();
        loop {
            let (text, line) = lines.next().ok_or(format!("{start}: the block does not end"))?;
            let command = if kind == "console" { text.strip_prefix("$ ") } else { Some(text) };
            match command {
                _ if text == "```" => break,
                _ if OTHER_BLOCKS.contains(&kind) || text.is_empty() => {}
                Some(command) if command.ends_with('\\') => return Err(format!("{line}: a command has one line")),
                Some(command) => {
                    let output = (kind == "console").then(String::new);
                    steps.push(Step { line, command: command.to_owned(), output });
                }
                None => {
                    let step = steps.last_mut().ok_or(format!("{line}: a command begins with `$ `"))?;
                    step.output.get_or_insert_default().extend([text, "\n"]);
                }
            }
        }
        if !steps.is_empty() {
            blocks.push(steps);
        }
    }
    Ok(blocks)
}

fn without_comment(command: &str) -> &str {
    command.split(" #").next().unwrap_or_default().trim()
}

fn read(document: &str) -> String {
    fs::read_to_string(Path::new(REPOSITORY).join(document)).unwrap_or_else(|error| panic!("{document}: {error}"))
}

fn files_in(folder: &str) -> Vec<String> {
    let entries = fs::read_dir(Path::new(REPOSITORY).join(folder)).unwrap();
    entries.map(|entry| format!("{folder}/{}", entry.unwrap().file_name().display())).collect()
}

fn examples() -> Vec<String> {
    let examples = files_in("examples");
    assert!(!examples.is_empty());
    examples
}

/// Types the commands of a document whose reader is in `folder` of a fresh clone, on a machine without a network card.
fn type_alone(document: &str, folder: &str) {
    if private_network_and_run().is_some() {
        type_all(document, folder);
    }
}

/// The same, on the machine as it is.
fn type_all(document: &str, folder: &str) {
    let checkout = Checkout::new();
    if document != "README.md" {
        // Its reader has read the README first.
        checkout.types("make install", &checkout.root);
    }
    let mut terminals = Vec::new();
    for block in blocks(&read(document)).unwrap_or_else(|error| panic!("{document}:{error}")) {
        let mut terminal =
            Terminal { checkout: &checkout, folder: checkout.root.join(folder), foreground: None, jobs: Vec::new() };
        for step in block {
            let command = without_comment(&step.command);
            if NOT_RUN.iter().any(|(not_run, ..)| *not_run == command) {
                continue;
            }
            println!("{document}:{}: {command}", step.line);
            let printed = terminal.types(&effort(shortened(command), command.to_owned()));
            if let Some(expected) = step.output {
                assert_eq!(printed, expected, "{document}:{}: {command}", step.line);
            }
        }
        terminals.push(terminal);
    }
    terminals.into_iter().for_each(Terminal::close);
}

/// A load with fewer requests, which is what most of a gate's time in a document goes to.
fn shortened(command: &str) -> String {
    let is_load = command.starts_with("ksf load ") || command.starts_with("ksf rpctest ");
    let counts = [("-c100k ", "-c2k "), ("-c10k ", "-c1k "), ("-c 10k ", "-c 1k ")];
    counts.iter().filter(|_| is_load).fold(command.to_owned(), |text, (count, fewer)| text.replace(count, fewer))
}

/// What cargo has built for these tests; the newest, where its names have a number.
fn built(name: &str, extension: &str) -> PathBuf {
    let files = fs::read_dir(built_folder()).unwrap().map(|entry| entry.unwrap()).filter(|entry| {
        let file = entry.file_name().into_string().unwrap_or_default();
        file.starts_with(name) && file.ends_with(extension)
    });
    let newest = files.max_by_key(|file| file.metadata().unwrap().modified().unwrap());
    newest.unwrap_or_else(|| panic!("cargo has built no {name}*{extension}")).path()
}

/// What the commands need of a clone, in a folder of its own. Instead of what installs packages and compiles Rust it has
/// scripts that put the tested binary where a build would.
struct Checkout {
    root: PathBuf,
    prefix: PathBuf,
    _folder: Folder,
}

impl Checkout {
    fn new() -> Self {
        let folder = Folder::new();
        let checkout = Checkout { root: folder.path("ksf"), prefix: folder.path("usr-local"), _folder: folder };
        let parts = ["Makefile", "packaging", "examples", "crates/mux/libksf", "scripts/link-libksf.sh"];
        for part in parts {
            let to = checkout.root.join(part);
            fs::create_dir_all(to.parent().unwrap()).unwrap();
            let copy = Command::new("cp").arg("-r").arg(Path::new(REPOSITORY).join(part)).arg(&to).output().unwrap();
            assert!(copy.status.success(), "{}", stderr(&copy));
        }
        checkout.script("scripts/setup.sh", "exit 0");
        let build = format!(
            "[ \"$*\" = 'build --release --locked -p ksf-cli -p ksf-kcm-preload -p ksf-preload -p libksf -p xtask' ] ||\n\
             {{ echo \"unexpected: cargo $*\" >&2; exit 1; }}\n\
             mkdir -p target/release && cp '{}' target/release/ksf && cd target/release &&\n\
             ln -sf '{}' libksf_capi.a && ln -sf '{}' libksf_kcm_preload.so && ln -sf '{}' libksf_preload.so",
            env!("CARGO_BIN_EXE_ksf"),
            built("libksf_capi", ".a").display(),
            built("libksf_kcm_preload", ".so").display(),
            built("libksf_preload", ".so").display(),
        );
        checkout.script("scripts/cargo", &build);
        // The reader is root already.
        checkout.script("bin/sudo", "exec \"$@\"");
        for example in examples() {
            checkout.types("make clean", &checkout.root.join(example));
        }
        // The service that the README calls the reader's own.
        checkout.types(
            concat!(
                "make KSF=",
                env!("CARGO_BIN_EXE_ksf"),
                " && cp uppercase.bpf.o ../../my_service.bpf.o && make clean"
            ),
            &checkout.root.join("examples/ksf-uppercase"),
        );
        checkout
    }

    fn script(&self, name: &str, text: &str) {
        let path = self.root.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
        assert!(Command::new("chmod").arg("755").arg(&path).status().unwrap().success());
    }

    /// `program`, in the environment of a reader who has just logged in.
    fn command(&self, program: &str, folder: &Path) -> Command {
        let mut command = Command::new(program);
        let path = std::env::var("PATH").unwrap_or_default();
        let (installed, own) = (self.prefix.join("bin"), self.root.join("bin"));
        let described = self.prefix.join("lib/pkgconfig");
        command
            .env("PATH", format!("{}:{}:{path}:/usr/sbin:/sbin", installed.display(), own.display()))
            .env("PREFIX", &self.prefix)
            // A reader without a PREFIX of their own needs none: /usr/local/lib/pkgconfig is looked into.
            .env("PKG_CONFIG_PATH", described)
            .current_dir(folder)
            .stdin(Stdio::null());
        // `make test` has set these for its own.
        for variable in
            ["MAKEFLAGS", "MFLAGS", "MAKELEVEL", "CARGO_TARGET_DIR", "RUSTC_WORKSPACE_WRAPPER", "CLIPPY_ARGS"]
        {
            command.env_remove(variable);
        }
        command
    }

    /// Runs a command, which must succeed. Returns what it prints.
    fn types(&self, line: &str, folder: &Path) -> String {
        let patience = PATIENCE.as_secs().to_string();
        let output = self.command("timeout", folder).args([&patience, "bash", "-c", line]).output().unwrap();
        let (out, err) = (stdout(&output), stderr(&output));
        assert!(output.status.success(), "`{line}` ends with {}:\n{out}{err}", output.status);
        out
    }
}

/// Where the commands of a block are typed.
struct Terminal<'a> {
    checkout: &'a Checkout,
    folder: PathBuf,
    foreground: Option<Served>,
    /// `%1` and so on.
    jobs: Vec<Option<Served>>,
}

impl Terminal<'_> {
    fn types(&mut self, line: &str) -> String {
        if let Some(running) = self.foreground.take() {
            running.end(Signal::INT);
        }
        for (kill, signal) in [("kill %", Signal::TERM), ("kill -9 %", Signal::KILL)] {
            let Some(number) = line.strip_prefix(kill) else { continue };
            let number: usize = number.parse().unwrap_or_else(|_| panic!("`{line}`: the number of a job"));
            let job = self.jobs.get_mut(number - 1).and_then(Option::take);
            job.unwrap_or_else(|| panic!("`{line}`: there is no such job")).end(signal);
            return String::new();
        }
        let (command, in_background) = match line.strip_suffix('&') {
            Some(command) => (command.trim(), true),
            None => (line, false),
        };
        let words = command.strip_prefix("sudo ").unwrap_or(command);
        let is = |commands: &[&str]| commands.iter().any(|server| words.starts_with(server));
        let running = if is(&SERVERS) {
            Served::start(self.checkout, command, &self.folder)
        } else if is(&READERS) {
            Served::start_reader(self.checkout, command, &self.folder)
        } else {
            assert!(!in_background, "`{line}`: only servers run in the background");
            return self.checkout.types(command, &self.folder);
        };
        match in_background {
            true => self.jobs.push(Some(running)),
            false => self.foreground = Some(running),
        }
        String::new()
    }

    fn close(self) {
        self.foreground.into_iter().for_each(|running| running.end(Signal::INT));
        self.jobs.into_iter().flatten().for_each(|running| running.end(Signal::TERM));
    }
}

/// A server that a terminal has started.
struct Served {
    line: String,
    program: Running,
    /// Where it tells the service manager how it is.
    news: Option<UnixDatagram>,
    _folder: Folder,
}

impl Served {
    /// Starts it and waits until it serves.
    fn start(checkout: &Checkout, line: &str, at: &Path) -> Self {
        let folder = Folder::new();
        let socket = folder.path("notify");
        let news = UnixDatagram::bind(&socket).unwrap();
        news.set_nonblocking(true).unwrap();
        let mut command = checkout.command("bash", at);
        command.args(["-c", &format!("exec {line}")]).env("NOTIFY_SOCKET", &socket).stdout(Stdio::null());
        // As a terminal does, in a group, so that a signal reaches all of it.
        let program = Running::start_group(command.stderr(Stdio::piped()));
        let mut served = Served { line: line.to_owned(), program, news: Some(news), _folder: folder };
        served.hears("READY=1");
        served
    }

    /// The same, of one of [`READERS`].
    fn start_reader(checkout: &Checkout, line: &str, at: &Path) -> Self {
        let mut command = checkout.command("bash", at);
        command.args(["-c", &format!("exec {line}")]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut program = Running::start_group(command.stderr(Stdio::piped()));
        let first = program.out.within(PATIENCE);
        assert!(first.is_some(), "`{line}` ends before it serves:\n{:#?}", program.err.now());
        Served { line: line.to_owned(), program, news: None, _folder: Folder::new() }
    }

    /// Waits for the server to say this. If it ends instead, that is a failure.
    fn hears(&mut self, state: &str) {
        let Served { line, program, news, .. } = self;
        wait_until(format_args!("`{line}` says {state}"), || {
            let status = program.ended();
            let mut message = [0; 1000];
            while let Some(length) = news.as_ref().and_then(|news| news.recv(&mut message).ok()) {
                if String::from_utf8_lossy(&message[..length]).lines().any(|line| line == state) {
                    return true;
                }
            }
            assert!(status.is_none(), "`{line}` ends with {status:?} before {state}:\n{:#?}", program.err.now());
            false
        });
    }

    /// Sends the signal that ends it, which must be an orderly end unless it kills.
    fn end(mut self, signal: Signal) {
        if signal == Signal::KILL {
            // Dropped, a program is killed, and waited for.
            return;
        }
        if self.news.is_some() {
            kill_process_group(Pid::from_raw(self.program.pid() as i32).unwrap(), signal).unwrap();
            self.hears("STOPPING=1");
        } else {
            self.program.end_input();
        }
        let status = self.program.wait();
        // make calls it an error that it was interrupted.
        if !self.line.contains("make ") {
            assert_eq!(status.code(), Some(0), "`{}`:\n{:#?}", self.line, self.program.err.now());
        }
    }
}
