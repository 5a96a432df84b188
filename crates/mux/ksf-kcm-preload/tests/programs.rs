//! Programs written for AF_KCM, run with the library preloaded.

use std::collections::BTreeSet;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use ksf_test::compile::cc;
use ksf_test::{Folder, effort, own_network, repository, root_or_skip, run, skip};
use object::read::elf::ElfFile64;
use object::{Object, ObjectSymbol};

/// Compiles a program into a folder that any user may read, beside the library.
struct Compiled {
    folder: Folder,
    program: PathBuf,
}

impl Compiled {
    fn of(source: &str, flags: &[&str]) -> Self {
        let folder = Folder::new();
        let program = folder.path("program");
        cc(repository().join(source), &program, flags);
        // Where cargo leaves it for tests.
        let built = std::env::current_exe().unwrap().with_file_name("libksf_kcm_preload.so");
        std::fs::copy(built, folder.path("library.so")).unwrap();
        Self { folder, program }
    }

    fn preloaded(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.env("LD_PRELOAD", self.folder.path("library.so"));
        command
    }
}

fn record(name: &str) -> String {
    std::fs::read_to_string(repository().join("lab/kcm").join(name)).unwrap()
}

fn check(observed: &str, name: &str) {
    let ours = record(name);
    for (wanted, observed) in ours.lines().zip(observed.lines()) {
        assert_eq!(observed, wanted);
    }
    assert_eq!(observed.lines().count(), ours.lines().count());
}

/// For all users; both wait most of the time.
#[test]
fn contract_under_kcm_run() {
    std::thread::scope(|scope| {
        scope.spawn(contract_without_the_right_to_load_programs);
        own_network();
        let program = Compiled::of("lab/kcm/contract.c", &["-O1"]);
        check(&run(&mut program.preloaded()), "ours.txt");
    });
}

fn contract_without_the_right_to_load_programs() {
    let Some(()) = root_or_skip("to become a user without rights") else { return };
    let bpf = std::fs::read_to_string("/proc/sys/kernel/unprivileged_bpf_disabled").unwrap_or_default();
    if bpf.trim() == "0" {
        return skip("needs kernel.unprivileged_bpf_disabled, or the verifier's rules for users apply");
    }
    own_network();
    let program = Compiled::of("lab/kcm/contract.c", &["-O2", "-D_FORTIFY_SOURCE=2"]);
    check(&run(program.preloaded().uid(65_534).gid(65_534)), "ours.txt");
}

/// What is not done as AF_KCM does it is told once by each process that meets it.
#[test]
fn processes_signals_and_programs() {
    own_network();
    let program = Compiled::of("lab/kcm/processes.c", &["-O1"]);
    let output = program.preloaded().output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{}\n{said}", output.status);
    check(std::str::from_utf8(&output.stdout).unwrap(), "ours_processes.txt");
    let said: Vec<_> = said.lines().collect();
    let [after_fork, after_exec, passed, foreign] = said[..] else { panic!("{said:#?}") };
    for line in [after_fork, after_exec, passed] {
        assert!(line.contains("cannot be used after fork or exec, nor where it was passed to (EOPNOTSUPP)"), "{line}");
    }
    assert!(foreign.contains("its instructions are not known (ENOEXEC)"), "{foreign}");
    assert!(
        said.iter().all(|line| line.starts_with("ksf kcm-run: ") && line.ends_with("see docs/kcm.md")),
        "{said:#?}"
    );
}

#[test]
fn forks_under_load() {
    own_network();
    let program = Compiled::of("crates/mux/ksf-kcm-preload/tests/forks.c", &["-O1"]);
    run(&mut program.preloaded());
}

/// The program that a handler interrupts, and the handler.
const INTERRUPTED: &str = "crates/mux/ksf-kcm-preload/tests/handlers.c";
const HANDLED: &str = "crates/mux/ksf-kcm-preload/tests/handled.c";

/// Functions of the library that POSIX does not allow a handler to call.
const NOT_FOR_HANDLERS: [&str; 14] = [
    "__sysv_signal",
    "bsd_signal",
    "epoll_ctl",
    "epoll_pwait",
    "epoll_pwait2",
    "epoll_wait",
    "fopen",
    "fopen64",
    "recvmmsg",
    "sendmmsg",
    "splice",
    "ssignal",
    "syscall",
    "sysv_signal",
];

/// The symbols that a source file in C uses and does not define.
fn used(source: &str) -> BTreeSet<String> {
    let folder = Folder::new();
    let object = folder.path("object.o");
    cc(repository().join(source), &object, &["-c"]);
    let bytes = std::fs::read(object).unwrap();
    let file = ElfFile64::<object::Endianness>::parse(&*bytes).unwrap();
    file.symbols().filter(|symbol| symbol.is_undefined()).map(|symbol| symbol.name().unwrap().to_owned()).collect()
}

/// A function that the library begins to define is also called by the program that is interrupted, and in the handler.
#[test]
fn handlers_interrupt_and_make_every_call_of_the_library() {
    let library = std::env::current_exe().unwrap().with_file_name("libksf_kcm_preload.so");
    let bytes = std::fs::read(library).unwrap();
    let library = ElfFile64::<object::Endianness>::parse(&*bytes).unwrap();
    let defined = library.dynamic_symbols().filter(|symbol| symbol.is_global() && !symbol.is_undefined());
    let hooks: BTreeSet<String> = defined.map(|symbol| symbol.name().unwrap().to_owned()).collect();
    assert!(hooks.contains("socket"), "{hooks:?}");
    let missing: Vec<_> = hooks.difference(&used(INTERRUPTED)).cloned().collect();
    assert_eq!(missing, [""; 0], "no call of handlers.c");
    let missing: Vec<_> = hooks.difference(&used(HANDLED)).cloned().collect();
    assert_eq!(missing, NOT_FOR_HANDLERS, "no calls of handled.c");
}

/// A handler may call what POSIX allows, on the same message socket, wherever it interrupts these calls of the program.
fn handlers_interrupt(work: &str) {
    own_network();
    let handled = repository().join(HANDLED);
    let program = Compiled::of(INTERRUPTED, &[handled.to_str().unwrap(), "-O1"]);
    let rounds = effort(60, 1000).to_string();
    for handler in ["restart", "end"] {
        run(program.preloaded().args([work, handler, &rounds]));
    }
}

#[test]
fn handlers_interrupt_calls_on_descriptors() {
    handlers_interrupt("descriptors");
}

#[test]
fn handlers_interrupt_sending_receiving_and_splice() {
    handlers_interrupt("messages");
    handlers_interrupt("splice");
    handlers_interrupt("names");
}

#[test]
fn handlers_interrupt_calls_that_are_refused() {
    handlers_interrupt("refusals");
}

#[test]
fn handlers_interrupt_open_and_fopen() {
    handlers_interrupt("files");
}

#[test]
fn handlers_interrupt_loading_programs_and_installing_handlers() {
    handlers_interrupt("programs");
    handlers_interrupt("handlers");
}

/// Also: a child of fork, `_Fork` or vfork waits for no lock that a thread of its parent holds.
#[test]
fn handlers_interrupt_fork_and_vfork() {
    handlers_interrupt("processes");
}

#[test]
fn handlers_interrupt_waits_for_messages() {
    handlers_interrupt("waits");
}

#[test]
fn handlers_interrupt_clone_attach_and_options() {
    handlers_interrupt("sockets");
}

#[test]
fn handlers_interrupt_poll_select_and_epoll() {
    handlers_interrupt("events");
}

#[test]
fn handlers_interrupt_malloc() {
    handlers_interrupt("memory");
}

/// Neither libc's allocator nor pthread_create is entered by the handler that opens and closes the first message sockets.
#[test]
fn handlers_interrupt_malloc_before_the_first_socket() {
    handlers_interrupt("first");
}

#[test]
fn socket_fails_where_no_thread_can_be_started() {
    handlers_interrupt("limit");
}

/// Eight clients, four clones, a thread for each: as the kernel's documentation has it, and with several messages a call.
#[test]
fn every_client_gets_its_own_answers() {
    own_network();
    let program = Compiled::of("lab/kcm/answers.c", &["-O1"]);
    for how in ["each", "many"] {
        assert_eq!(run(program.preloaded().arg(how)), "160000 answers\n", "{how}");
    }
}

#[test]
fn the_tables_of_the_document_are_the_records() {
    let document = std::fs::read_to_string(repository().join("docs/kcm.md")).unwrap();
    for suffix in ["", "_processes"] {
        let (theirs, ours) = (record(&format!("af_kcm{suffix}.txt")), record(&format!("ours{suffix}.txt")));
        assert_eq!(theirs.lines().count(), ours.lines().count());
        let rows = theirs.lines().zip(ours.lines()).map(|(theirs, ours)| {
            let (row, theirs) = theirs.split_once(": ").unwrap();
            let ours = ours.strip_prefix(row).and_then(|ours| ours.strip_prefix(": ")).expect(row);
            format!("| {row} | {theirs} | {ours} |\n")
        });
        let table: String = rows.collect();
        assert!(document.contains(&table), "docs/kcm.md should have:\n{table}");
    }
}

#[test]
fn loops_duplicates_and_workers() {
    own_network();
    let program = Compiled::of("crates/mux/ksf-kcm-preload/tests/loops.c", &["-O1"]);
    run(&mut program.preloaded());
}

#[test]
fn a_program_closes_and_replaces_numbers_that_it_does_not_know() {
    own_network();
    let program = Compiled::of("crates/mux/ksf-kcm-preload/tests/own.c", &["-O1"]);
    for way in ["close", "close_range", "closefrom", "dup2", "dup3"] {
        run(program.preloaded().arg(way));
    }
}

#[test]
fn a_program_closes_numbers_while_another_thread_attaches() {
    own_network();
    let program = Compiled::of("crates/mux/ksf-kcm-preload/tests/own.c", &["-O1"]);
    for way in ["loop", "long dup2", "long close", "long close_range"] {
        run(program.preloaded().arg(way));
    }
}

#[test]
fn threads_go_on_while_a_range_of_numbers_is_closed() {
    own_network();
    let program = Compiled::of("crates/mux/ksf-kcm-preload/tests/own.c", &["-O1"]);
    run(program.preloaded().arg("range"));
}

#[test]
fn fork_after_dup_of_a_connection() {
    own_network();
    let program = Compiled::of("crates/mux/ksf-kcm-preload/tests/own.c", &["-O1"]);
    // A backtrace would be printed by way of the library.
    run(program.preloaded().arg("dup").env("RUST_BACKTRACE", "1"));
}

/// Nothing changes for a program that has nothing to do with AF_KCM.
#[test]
fn other_programs_run_as_ever() {
    own_network();
    let program = Compiled::of("crates/mux/ksf-kcm-preload/tests/loops.c", &["-O1"]);
    let text = run(Command::new("sh")
        .args(["-c", "printf 'b\\na\\n' | sort | tr -d '\\n'"])
        .env("LD_PRELOAD", program.folder.path("library.so")));
    assert_eq!(text, "ab");
    // It does not hide that this kernel lacks the family where it is not preloaded, nor change another's errors.
    if !Path::new("/proc/net/kcm").exists() {
        assert!(!Command::new(&program.program).output().unwrap().status.success());
    }
}
