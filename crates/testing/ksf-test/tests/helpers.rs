//! The helpers see what they are there to see.

use std::io::Write;
use std::net::{SocketAddr, TcpListener};
use std::process::{Command, Output, Stdio};

use ksf_test::alloc::{Counting, allocations, allocations_of_all, bytes};
use ksf_test::*;
use rustix::process::Signal;

#[global_allocator]
static COUNTING: Counting = Counting;

/// Runs a helper below as `cargo test` would: the test runner shows what a test prints only if that test fails.
fn run_test(test: &str, env: &[(&str, &str)]) -> Output {
    let mut command = Helper::command(test);
    command
        .env_remove("CI")
        .env_remove("KSF_TEST_SEED")
        .env_remove("KSF_TEST_SKIPPED")
        .envs(env.iter().copied())
        .output()
        .unwrap()
}

#[test]
fn a_skipped_test_says_so_though_it_passes() {
    let output = run_test("helper_is_skipped", &[]);
    assert!(output.status.success(), "{}", stderr(&output));
    let lines = ["needs a unicorn", "needs 2 (it is even)"].map(|why| format!("skipped: helper_is_skipped: {why}\n"));
    assert_eq!(stderr(&output), lines.concat());
}

#[test]
fn in_ci_a_skipped_test_fails() {
    for value in ["true", "1"] {
        let output = run_test("helper_is_skipped", &[("CI", value)]);
        assert_eq!(output.status.code(), Some(101), "CI={value}");
        let said = stdout(&output) + &stderr(&output);
        assert!(said.contains("skipped in CI: needs a unicorn"), "{said}");
    }
}

#[test]
#[ignore = "a part of the tests above"]
fn helper_is_skipped() {
    if is_helper() {
        assert!(program_or_skip("a unicorn").is_none());
        let is_odd = |choice: u32| if choice.is_multiple_of(2) { Err("it is even") } else { Ok(()) };
        assert_eq!(working([1, 2, 3], is_odd), [1, 3]);
    }
}

#[test]
fn a_failed_test_says_its_seed_which_repeats_it() {
    let first = run_test("helper_fails_by_chance", &[]);
    assert_eq!(first.status.code(), Some(101));
    assert!(stdout(&first).contains("the same numbers again: KSF_TEST_SEED=17\n"), "{}", stdout(&first));
    let other = run_test("helper_fails_by_chance", &[("KSF_TEST_SEED", "18")]);
    let number = |output: &Output| stderr(output).lines().find(|line| line.starts_with("number ")).map(str::to_owned);
    assert_eq!(number(&first), Some(format!("number {}", Random::new(17).bits())));
    assert_eq!(number(&other), Some(format!("number {}", Random::new(18).bits())));
}

#[test]
#[ignore = "a part of the test above"]
fn helper_fails_by_chance() {
    if is_helper() {
        panic!("as the test asked for\nnumber {}", Random::of_test(17).bits());
    }
}

#[test]
fn a_network_of_its_own_has_every_port_free() {
    let Some(()) = own_network_or_skip("a network namespace") else { return };
    assert_own_network();
    let ours = TcpListener::bind("127.0.0.1:80").unwrap();
    in_new_network(|| {
        assert_own_network();
        drop(TcpListener::bind("127.0.0.1:80").unwrap());
    });
    let (mut client, mut server) = stream::pair(&ours);
    server.write_all(b"hello").unwrap();
    stream::ask(&mut client, b"", b"hello");
    drop(server);
    stream::expect_end(&mut client);
}

#[test]
fn a_far_end_is_another_network() {
    let Some(()) = own_network_or_skip("a network namespace") else { return };
    let far = veth();
    for address in FAR.1.map(|ip| SocketAddr::new(ip.parse().unwrap(), 7)) {
        far.run(move || stream::serve(TcpListener::bind(address).unwrap(), stream::echo));
        stream::ask(&mut stream::connect(address), b"anybody there?", b"anybody there?");
        drop(TcpListener::bind(address).expect_err("the address is another network's"));
    }
}

#[test]
fn a_program_is_talked_to_and_ends_with_its_value() {
    let script = "echo $$; while read -r word; do echo \"$word back\"; done; echo bye >&2";
    let mut shell = Command::new("sh");
    shell.args(["-c", script]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut program = Running::start(&mut shell);
    assert_eq!(program.out.line(), program.pid().to_string());
    program.tell("there and");
    assert_eq!(program.out.with("back"), "there and back");
    program.end_input();
    assert!(program.wait().success());
    assert_eq!(program.err.seen(), ["bye"]);

    // A group ends whole: the pipe is closed when the last of it is gone.
    let script = "sleep 1000 & echo started; wait";
    let mut program = Running::start_group(Command::new("sh").args(["-c", script]).stdout(Stdio::piped()));
    program.out.with("started");
    let mut out = std::mem::take(&mut program.out);
    drop(program);
    assert_eq!(out.to_the_end(), ["started"]);

    let mut program = Running::start(
        Command::new("sh").args(["-c", "trap 'exit 0' TERM; echo; while :; do :; done"]).stdout(Stdio::piped()),
    );
    program.out.line();
    assert_eq!(program.stop(Signal::TERM), "\n");
}

#[test]
fn a_helper_hears_and_says() {
    let mut helper = Helper::start("helper_counts", &[("FROM", "40".into())]);
    assert_eq!((helper.hear(), helper.ask("2")), ("40".into(), "42".into()));
    assert_eq!(helper.ask("1"), "43");
}

#[test]
#[ignore = "a part of the test above"]
fn helper_counts() {
    if !is_helper() {
        return;
    }
    let mut sum: u32 = std::env::var("FROM").unwrap().parse().unwrap();
    say(sum);
    while let Some(line) = listen() {
        sum += line.parse::<u32>().unwrap();
        say(sum);
    }
}

#[test]
fn allocations_are_counted_by_thread_and_by_process() {
    let (before, before_bytes, before_all) = (allocations(), bytes(), allocations_of_all());
    let ours = std::hint::black_box(vec![1u8; 1000]);
    assert_eq!((allocations() - before, bytes() - before_bytes), (1, 1000));
    let theirs = std::thread::spawn(|| {
        let before = allocations();
        drop(std::hint::black_box(vec![1u8; 1000]));
        allocations() - before
    });
    assert_eq!(theirs.join().unwrap(), 1);
    let before_bytes = bytes();
    drop(ours);
    assert_eq!(bytes() - before_bytes, -1000, "what was freed is no longer counted");
    assert!(allocations_of_all() - before_all >= 2);
}

#[test]
fn a_compiled_program_lies_in_a_folder_that_goes_with_it() {
    let folder = Folder::new();
    let source = folder.write("seven.c", "int main(void) { return 7; }");
    compile::cc(source, &folder.path("seven"), &["-O1"]);
    install(folder.path("seven"), &folder.path("bin/copy"));
    assert_eq!(Command::new(folder.path("bin/copy")).status().unwrap().code(), Some(7));
    let path = folder.path("");
    drop(folder);
    assert!(!path.exists());
}
