//! The holder as `ksf accel run` starts it, in a process of its own: killed, stopped, and ended by the program's end.

use std::net::Ipv4Addr;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use crate::common::*;
use ksf_accel::status::{self, Status};
use ksf_accel::{AccelOptions, run};
use rustix::process::Signal;

/// `ksf accel run -- PROGRAM`, with a holder whose status is in the folder.
fn accel_run(program: &Path, folder: &Path) -> Command {
    let mut command = Helper::command("deaths::helper_run");
    command.env("PROGRAM", program).env("FOLDER", folder).env("LIBRARY", library());
    command
}

#[test]
#[ignore = "a part of the tests below"]
fn helper_run() {
    if !is_helper() {
        return;
    }
    let variable = |name| std::env::var_os(name).unwrap();
    let mut options = AccelOptions::default();
    options.status_folder = Some(variable("FOLDER").into());
    let prepared =
        run::prepare(&options, Helper::command("deaths::helper_holder"), variable("LIBRARY").as_ref()).unwrap();
    let arguments = std::env::var("ARGUMENTS").unwrap_or_default();
    let mut command = Command::new(variable("PROGRAM"));
    panic!("{}", command.args(arguments.split_whitespace()).envs(prepared.environment).exec());
}

#[test]
#[ignore = "a part of the tests below"]
fn helper_holder() {
    if is_helper() {
        run::holder_main().unwrap();
    }
}

/// The only holder of the folder, with so many workers ready.
fn holder_of(folder: &Path, workers: usize) -> Status {
    let mut found = None;
    wait_until("the workers are ready", || {
        found = status::all(folder).unwrap().into_iter().find(|status| ready_in(status) == workers);
        found.is_some()
    });
    found.unwrap()
}

fn ready_in(status: &Status) -> usize {
    status.workers.iter().filter(|worker| !worker.ready.is_empty()).count()
}

/// The server of `tests/c` under a holder of its own. Its first line of output comes after the test runner's.
fn server(style: &str, workers: usize, folder: &Path) -> Server {
    let mut command = accel_run(&compiled("server"), folder);
    command.env("ARGUMENTS", format!("{style} {workers} 0"));
    Server::start_after(command, style)
}

#[test]
fn a_holder_that_is_killed_under_load_costs_no_connection() {
    let Some(()) = own_network() else { return };
    for style in ["prefork-epoll", "threads-epoll", "prefork-blocking", "prefork-reuseport"] {
        let folder = folder();
        let server = server(style, 2, &folder);
        let holder = holder_of(&folder, 2);
        let load = Load::start(server.port, "who\n", 8);
        let accepted = || counted(&status::all(&folder).unwrap()[0]).accepted_own;
        wait_until("there is load", || accepted() > 200);
        signal(holder.pid, Signal::KILL);
        wait_until("the holder is gone", || !is_alive(holder.pid));
        // Everybody is served by the program's own listener now; new workers too.
        let after = ask_each(Ipv4Addr::LOCALHOST, server.port, "who\n", 200);
        let (answered, lost) = load.end();
        assert!(lost.is_empty(), "{style}: {answered} answered, lost: {lost:?}");
        assert_eq!(after.len(), 200);
    }
}

#[test]
fn a_program_that_is_started_as_another_user_has_queues() {
    let Some(()) = own_network() else { return };
    let folder = folder();
    let mut command = accel_run(Path::new("/usr/bin/setpriv"), &folder);
    let server = compiled("server");
    command.env("ARGUMENTS", format!("--reuid=33 --clear-groups {} prefork-epoll 2 0", server.display()));
    let server = Server::start_after(command, "prefork-epoll");
    holder_of(&folder, 2);
    assert_eq!(ask_each(Ipv4Addr::LOCALHOST, server.port, "who\n", 50).len(), 50);
    assert!(counted(&status::all(&folder).unwrap()[0]).accepted_own > 0);
}

#[test]
fn a_worker_that_begins_after_the_holders_end_serves_the_listener() {
    let Some(()) = own_network() else { return };
    let folder = folder();
    let server = server("prefork-epoll", 2, &folder);
    let holder = holder_of(&folder, 2);
    let old: Vec<u32> = holder.workers.iter().map(|worker| worker.pid).collect();
    signal(holder.pid, Signal::KILL);
    wait_until("the holder is gone", || !is_alive(holder.pid));
    old.iter().for_each(|pid| signal(*pid, Signal::KILL));
    // Until the signal has arrived they may accept, and what they have in hand then is lost.
    wait_until("the workers are gone", || old.iter().all(|pid| !is_alive(*pid)));
    assert_eq!(ask_each(Ipv4Addr::LOCALHOST, server.port, "who\n", 50).len(), 50);
}

/// The actor under a holder of its own, and that one's process.
fn actors(folder: &Path) -> (Actors, u32) {
    let mut command = accel_run(&compiled("actor"), folder);
    command.env("ARGUMENTS", "");
    let actors = Actors::start_as(command);
    let mut holder = None;
    wait_until("there is a holder", || {
        holder = status::all(folder).unwrap().pop();
        holder.is_some()
    });
    (actors, holder.unwrap().pid)
}

fn stop(holder: u32) {
    signal(holder, Signal::STOP);
    let stat = format!("/proc/{holder}/stat");
    wait_until("it has stopped", || std::fs::read_to_string(&stat).unwrap().contains(") T "));
}

#[test]
fn a_program_that_begins_while_the_holder_does_not_answer_becomes_a_worker_later() {
    let Some(()) = own_network() else { return };
    let folder = folder();
    let (mut actors, holder) = actors(&folder);
    let (listener, port) = actors.listener();
    let epoll = actors.watching(0, listener);
    holder_of(&folder, 1);
    // What comes now waits in its queue, which ends with it.
    stop(holder);
    let waiting = Client::connect(port, 'w');
    actors.begin(0, "reexec");
    assert_eq!(actors.result(0), "started");
    signal(holder, Signal::CONT);
    let _ = epoll;
    // A child of what was not greeted, and the program itself.
    actors.zero(0, "fork 1");
    let epoll = actors.watching(1, listener);
    holder_of(&folder, 1);
    let mut taken = String::new();
    wait_until("it is taken", || {
        taken += &actors.take_all(1, epoll, listener);
        taken == "w"
    });
    assert!(waiting.was_served());
    let epoll = actors.number(0, "epoll");
    wait_until("both are workers", || {
        actors.zero(0, &format!("add {epoll} {listener} 1 7"));
        let ready = status::all(&folder).unwrap().iter().any(|status| ready_in(status) == 2);
        if !ready {
            actors.zero(0, &format!("del {epoll} {listener}"));
        }
        ready
    });
    actors.serves_soon(0, port, epoll, listener);
}

#[test]
fn a_holder_that_does_not_answer_holds_nobody_up_for_long_and_is_asked_again() {
    let Some(()) = own_network() else { return };
    let folder = folder();
    let (mut actors, holder) = actors(&folder);
    let (listener, port) = actors.listener();
    stop(holder);
    // Watches without a queue, after a while.
    let epoll = actors.watching(0, listener);
    let serve = |actors: &mut Actors| {
        actors.serves_soon(0, port, epoll, listener);
    };
    serve(&mut actors);
    signal(holder, Signal::CONT);
    // Some accept() later it is a worker with a queue.
    wait_until("it is a worker", || {
        serve(&mut actors);
        status::all(&folder).unwrap().iter().any(|status| ready_in(status) == 1)
    });
    serve(&mut actors);
}

#[test]
fn everything_ends_with_the_program() {
    let Some(()) = own_network() else { return };
    for how in [Signal::TERM, Signal::KILL] {
        let folder = folder();
        let server = server("threads-epoll", 2, &folder);
        let holder = holder_of(&folder, 2);
        signal(server.pid(), how);
        wait_until("the holder ends", || !is_alive(holder.pid));
        assert!(refused(server.port));
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 0, "the status socket stays");
    }
}
