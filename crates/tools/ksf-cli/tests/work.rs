//! The work service, on shards and on workers, under worktest's loads.

use std::io::{ErrorKind, Read as _, Write as _};

use crate::support::{Folder, Server, first_cpu, run, stderr, stdout};
use ksf_test::wait_until;

/// Serves work; `workers`: 0 for shards alone.
fn serve(folder: &Folder, workers: u32) -> Server {
    let workers_line = if workers == 0 { String::new() } else { format!("workers = {workers}\n") };
    let text = format!(
        "cpus = \"{}\"\n[[service]]\nname = \"work\"\nkind = \"work\"\nengine = \"epoll\"\n{workers_line}\
         listen = [\"tcp:127.0.0.1:0\"]\n",
        first_cpu()
    );
    let path = folder.write(&format!("work-{workers}.toml"), &text);
    Server::start(&["serve", path.to_str().unwrap()], 1)
}

/// Runs worktest to its end; every reply must have been right.
fn worktest(server: &Server, options: &str) -> serde_json::Value {
    let address = server.address(" tcp ").to_string();
    let mut words = vec!["worktest", "--no-pin", "--json", &address];
    words.extend(options.split_whitespace());
    let output = run(&words);
    assert_eq!(output.status.code(), Some(0), "{options}: {}", stderr(&output));
    serde_json::from_str(&stdout(&output)).expect("worktest prints JSON")
}

#[test]
fn every_load_is_answered_with_and_without_workers() {
    let folder = Folder::new();
    for workers in [0, 1, 4] {
        let server = serve(&folder, workers);
        for options in [
            "-c 800 -k discard -n 8",
            "-c 300 -k sleep -n 4 -a 32 --spread",
            "-c 300 -k compute --weights 8:1:1:1 -a 32 --spread",
            "-c 20000 -n 4 -a 256",
            "-c 100 --rate 2000 --slow 20:5ms",
        ] {
            let document = worktest(&server, options);
            let count: u64 = options.split_whitespace().nth(1).unwrap().parse().unwrap();
            assert_eq!(document["run"]["messages"], count, "{options} on {workers} workers");
        }
        server.stop();
    }
}

/// One worker answers a connection's messages in their order, several do not: a slow one lets the quick ones pass.
#[test]
fn quick_messages_pass_a_slow_one_where_there_is_a_second_worker() {
    let folder = Folder::new();
    let reordered = |workers| {
        let server = serve(&folder, workers);
        let document = worktest(&server, "-c 400 -a 16 --slow 10:3ms");
        server.stop();
        document["run"]["reordered"].as_u64().unwrap()
    };
    assert_eq!(reordered(1), 0);
    assert!(reordered(2) > 0);
}

#[test]
fn workers_stay_on_the_cpus_of_the_service() {
    let folder = Folder::new();
    for cpu in ksf::cpus::allowed().unwrap().into_iter().take(2) {
        let text = format!(
            "cpus = \"{cpu}\"\n[[service]]\nname = \"work\"\nkind = \"work\"\nworkers = 3\n\
             listen = [\"tcp:127.0.0.1:0\"]\n"
        );
        let path = folder.write(&format!("cpu-{cpu}.toml"), &text);
        let server = Server::start(&["serve", path.to_str().unwrap()], 1);
        // A thread gives itself its name, and its CPUs, after it was begun.
        wait_until("three workers are on the CPU", || {
            let tasks = std::fs::read_dir(format!("/proc/{}/task", server.pid())).unwrap();
            let on_cpu = tasks.filter(|task| {
                let status = std::fs::read_to_string(task.as_ref().unwrap().path().join("status")).unwrap_or_default();
                let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or("").trim();
                field("Name:").starts_with("ksf-worker") && field("Cpus_allowed_list:") == cpu.to_string()
            });
            on_cpu.count() == 3
        });
        server.stop();
    }
}

/// Two workers, of which long messages may occupy one.
#[test]
fn a_class_of_the_configuration_leaves_a_worker_for_the_others() {
    const SLEEP: u32 = 1;
    const INLINE: u32 = 0;
    let folder = Folder::new();
    // How a message is to be worked on are its first four bytes.
    let text = "cpus = \"CPU\"\n[[service]]\nname = \"work\"\nkind = \"work\"\nengine = \"epoll\"\nworkers = 2\n\
                listen = [\"tcp:127.0.0.1:0\"]\n[[service.class]]\nbytes = \"00000001\"\ncap = 1\n";
    let path = folder.write("classes.toml", text.replace("CPU", &first_cpu()));
    let server = Server::start(&["serve", path.to_str().unwrap()], 1);
    let address = server.address(" tcp ");
    let message = |how: u32| [8_u32, how, 10_000_000].map(u32::to_be_bytes).concat();
    let connect = || ksf_test::stream::connect(address);

    let (mut long, mut quick) = (connect(), connect());
    long.write_all(&[message(SLEEP), message(SLEEP), message(SLEEP)].concat()).unwrap();
    for _ in 0..20 {
        quick.write_all(&message(INLINE)).unwrap();
        quick.read_exact(&mut [0; 8]).unwrap();
    }
    // Had two of them been begun, nobody would have been left until the first was answered.
    long.set_nonblocking(true).unwrap();
    assert_eq!(long.read(&mut [0; 8]).unwrap_err().kind(), ErrorKind::WouldBlock);
}
