//! What does not serve: help, mistakes, manual, completions, doctor.

use crate::support;
use std::os::unix::fs::symlink;
use std::process::{Command, Stdio};

use crate::support::{Folder, ksf, ksf_for_all, run, stderr, stdout};

/// Runs `ksf ARGS`, which must fail with `status` and say one line that contains all `parts`.
fn fails(args: &[&str], status: i32, parts: &[&str]) {
    let output = run(args);
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(status), "{args:?}: {text}");
    assert_eq!(text.lines().count(), 1, "{args:?}: {text}");
    assert!(text.starts_with("ksf: "), "{args:?}: {text}");
    for part in parts {
        assert!(text.contains(part), "{args:?}: no \"{part}\" in: {text}");
    }
}

#[test]
fn wrong_use_is_one_line_with_the_remedy() {
    fails(&[], 64, &["no command", "ksf --help"]);
    fails(&["nonsense"], 64, &["nonsense", "ksf --help"]);
    fails(&["kecho", "--nonsense"], 64, &["--nonsense", "ksf kecho --help"]);
    fails(&["kecho", "surplus"], 64, &["surplus"]);
    fails(&["kecho", "--engine", "fast"], 64, &["fast", "auto, kernel, uring, epoll"]);
    fails(&["run", "x.bpf.o"], 64, &["--listen ADDR:PORT"]);
    fails(&["serve"], 64, &["CONFIG"]);
    fails(&["completions", "tcsh"], 64, &["tcsh", "bash"]);
    fails(&["man", "nonsense"], 64, &["nonsense"]);
}

#[test]
fn wrong_values_are_one_line_with_the_remedy() {
    // Another ksf may have the default ports.
    ksf_test::own_network();
    fails(&["kecho", "--listen", "localhost:60007"], 65, &["localhost:60007", "in numbers"]);
    fails(&["kecho", "--listen", "::1:60007"], 65, &["brackets"]);
    fails(&["kecho", "--listen", "127.0.0.1:99999"], 65, &["65535"]);
    fails(&["kecho", "--cpus", "x"], 65, &["0-3,8"]);
    fails(&["kecho", "--cpus", "1023"], 65, &["1023", "--cpus among"]);
    fails(&["kecho", "--connections-max", "many"], 65, &["many", "not a number"]);
    fails(&["kecho", "--message-bytes-max", "128m"], 65, &["assembly_bytes_max", "message_bytes_max"]);
    fails(&["kecho", "--slots", "15"], 65, &["--slots", "15", "16"]);
    fails(&["kecho", "--task-threads-max", "2k"], 65, &["--task-threads-max", "1024"]);
    fails(&["krpc2", "--program", "7"], 65, &["100003:3-4"]);
    fails(&["krpc2", "--program", "100003:3-4"], 65, &["100003"]);
}

#[test]
fn slots_that_cannot_be_had_are_one_line_with_the_remedy() {
    // 4.3 GiB of addresses where 3 GB are allowed (in KiB).
    let script = "ulimit -v 3000000; exec \"$0\" kecho --engine epoll --listen tcp:127.0.0.1:0 --slots 65536";
    let output = Command::new("sh").args(["-c", script]).arg(ksf().get_program()).output().unwrap();
    let text = stderr(&output);
    assert_eq!((output.status.code(), text.lines().count()), (Some(71), 1), "{text}");
    assert!(text.contains("receive slots") && text.contains("--slots"), "{text}");
}

#[test]
fn wrong_files_are_one_line_with_the_place() {
    let folder = Folder::new();
    let config = |text: &str| folder.write("config.toml", text).display().to_string();
    fails(&["serve", "/no/such/file"], 66, &["/no/such/file"]);
    fails(&["kecho", "--config-limits", "/no/such/file"], 66, &["/no/such/file"]);
    fails(&["run", "/no/such.bpf.o", "--listen", "127.0.0.1:0"], 66, &["/no/such.bpf.o"]);
    fails(&["serve", &config("x = 1")], 78, &["config.toml:1:1", "unknown field `x`"]);
    let service = "[[service]]\nname = \"a\"\nkind = \"echo\"\n";
    fails(&["serve", &config(&format!("{service}prot = 1\n"))], 78, &["config.toml:4:1", "prot", "correct that line"]);
    fails(&["serve", &config(&format!("{service}engine = \"fast\"\n"))], 78, &["config.toml:4:10", "fast"]);
    fails(&["serve", &config(&format!("{service}[limits]\nfragments_max = 0\n"))], 78, &["config.toml:5:17"]);
    fails(&["serve", &config(&format!("{service}[resources]\nslots = 1\n"))], 78, &["config.toml:5:9"]);
    fails(&["serve", &config("")], 78, &["no [[service]]"]);
    fails(&["serve", "--check", &config("[[service]]\nname = \"a\"\n")], 78, &["kind"]);
    let limits = folder.write("limits.toml", "fragmets_max = 7");
    fails(&["kecho", "--config-limits", limits.to_str().unwrap()], 78, &["limits.toml:1:1", "fragmets_max"]);
}

#[test]
fn the_example_configuration_is_correct() {
    let example = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../packaging/ksf.toml");
    let output = run(&["serve", "--check", example]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(stderr(&output).contains("echo, rpc"), "{}", stderr(&output));
    // Its commented lines are correct, too, except those that name other files.
    let text = std::fs::read_to_string(example).unwrap();
    let (services, _) = text.split_once("# A service of your own").unwrap();
    let is_key = |line: &str| line.starts_with('#') && !line.starts_with("# ") && line.len() > 1;
    let all: Vec<&str> = services.lines().map(|line| if is_key(line) { &line[1..] } else { line }).collect();
    let folder = Folder::new();
    let path = folder.write("all.toml", all.join("\n"));
    let output = run(&["serve", "--check", path.to_str().unwrap()]);
    assert!(output.status.success(), "{}", stderr(&output));
}

#[test]
fn the_example_shows_the_defaults() {
    let example = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../../packaging/ksf.toml")).unwrap();
    let folder = Folder::new();
    let (_, limits) = example.split_once("\n[limits]\n").unwrap();
    let (limits, _) = limits.split_once("# Where counters").unwrap();
    // None counts as it comes: a service may have other defaults of its own.
    let is_key = |line: &&str| line.contains(" = ") && !line.starts_with("# ");
    let (of_limits, _) = limits.split_once("[resources]").unwrap();
    assert!(of_limits.lines().filter(is_key).all(|line| line.starts_with('#')), "{of_limits}");
    let limits = format!("\n[limits]\n{}", limits.replace("\n#", "\n").strip_prefix('#').unwrap());
    let limits = limits.lines().filter(|line| !line.starts_with(' ')).collect::<Vec<_>>().join("\n");
    let service = "[[service]]\nname = \"a\"\nkind = \"echo\"\nlisten = [\"tcp:127.0.0.1:0\"]\nengine = \"epoll\"\n";
    let limits_of = |name: &str, text: &str| {
        let path = folder.write(name, text);
        let server = support::Server::start(&["serve", path.to_str().unwrap()], 1);
        server.stat()["services"][0]["limits"].clone()
    };
    let in_force = limits_of("bare.toml", service);
    assert_eq!(limits_of("shown.toml", &format!("{limits}\n{service}")), in_force);
    for limit in in_force.as_array().unwrap() {
        let key = format!("\n{} = ", limit["name"].as_str().unwrap());
        assert!(limits.contains(&key), "{limit} is not shown");
    }
}

#[test]
fn help_and_version_go_to_stdout() {
    for args in [&["--help"][..], &["kecho", "--help"], &["doctor", "-h"], &["--version"], &["kecho", "--version"]] {
        let output = run(args);
        assert_eq!(output.status.code(), Some(0), "{args:?}");
        assert!(stderr(&output).is_empty(), "{args:?}");
        assert!(!stdout(&output).is_empty(), "{args:?}");
    }
    let help = stdout(&run(&["--help"]));
    let commands = [
        "kecho",
        "krpc2",
        "serve",
        "run",
        "echotest",
        "rpctest",
        "worktest",
        "load",
        "doctor",
        "stat",
        "completions",
        "man",
        "accel",
    ];
    for command in commands {
        assert!(help.contains(&format!("  {command} ")), "{command} is not in:\n{help}");
    }
    let help = stdout(&run(&["kecho", "--help"]));
    for flag in ["--listen", "--engine", "--cpus", "--xdp", "--stats-socket", "--prometheus", "--connections-max"] {
        assert!(help.contains(flag), "{flag} is not in:\n{help}");
    }
}

#[test]
fn links_with_bare_names_are_commands() {
    let folder = Folder::new();
    for name in ["kecho", "krpc2", "echotest", "rpctest"] {
        let link = folder.path(name);
        symlink(env!("CARGO_BIN_EXE_ksf"), &link).unwrap();
        let output = Command::new(&link).arg("--help").output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{name}: {}", stderr(&output));
        assert!(stdout(&output).contains(&format!("Usage: {name} ")), "{name}: {}", stdout(&output));
        let output = Command::new(&link).arg("--nonsense").output().unwrap();
        assert_eq!(output.status.code(), Some(64), "{name}");
        assert!(stderr(&output).contains(&format!("{name} --help")), "{name}: {}", stderr(&output));
    }
}

#[test]
fn manual_pages_exist_for_every_command_and_bare_name() {
    let folder = Folder::new();
    let target = folder.path("man1");
    let output = run(&["man", "--dir", target.to_str().unwrap()]);
    assert!(output.status.success(), "{}", stderr(&output));
    for page in [
        "ksf",
        "ksf-kecho",
        "ksf-serve",
        "ksf-nfs",
        "ksf-nfs-status",
        "ksf-9p",
        "ksf-9p-status",
        "ksf-doctor",
        "ksf-stat",
        "ksf-rpctest",
        "ksf-worktest",
        "ksf-load",
        "ksf-load-http",
        "ksf-load-kv",
        "ksf-load-nfs",
        "ksf-load-9p",
        "ksf-accel",
        "ksf-accel-nic-apply",
    ] {
        let text = std::fs::read_to_string(target.join(format!("{page}.1"))).unwrap();
        assert!(text.contains("EXIT STATUS"), "{page}");
    }
    for page in ["ksf-nfs", "ksf-9p"] {
        let text = std::fs::read_to_string(target.join(format!("{page}.1"))).unwrap();
        for option in ["squash=", "manage\\-gids", "names="] {
            assert!(text.contains(option), "{page} lacks {option}");
        }
    }
    for page in ["kecho", "krpc2", "echotest", "rpctest"] {
        let text = std::fs::read_to_string(target.join(format!("{page}.1"))).unwrap();
        assert_eq!(text, format!(".so man1/ksf-{page}.1\n"));
    }
    assert!(stdout(&run(&["man", "kecho"])).contains("\\-\\-listen"));
}

#[test]
fn completions_know_the_flags() {
    for shell in ["bash", "zsh", "fish"] {
        let output = run(&["completions", shell]);
        assert!(output.status.success());
        assert!(stdout(&output).contains("config-limits"), "{shell}");
    }
}

#[test]
fn a_web_server_is_loaded_and_every_request_accounted_for() {
    use std::io::{Read, Write};
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                let mut byte = [0];
                stream.read_exact(&mut byte).unwrap();
                head.push(byte[0]);
            }
            stream.write_all(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok").unwrap();
        }
    });
    let output = run(&["load", "http", &url, "-c", "50", "-n", "4", "--expect-bytes", "2", "--json"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let document: serde_json::Value = serde_json::from_str(&stdout(&output)).unwrap();
    assert_eq!(document["run"]["requests"]["answered"], 50);
    let output = run(&["load", "http", &url, "-c", "5", "-n", "1", "--expect-bytes", "3"]);
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    assert!(stderr(&output).contains("5 wrong_body"), "{}", stderr(&output));
    fails(&["load", "http"], 64, &["ksf load http --help"]);
    fails(&["load", "http", "https://127.0.0.1/"], 64, &["TLS"]);
}

#[test]
fn a_reader_that_has_seen_enough_is_no_error() {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let output = ksf().arg("doctor").stdout(writer).stderr(Stdio::piped()).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
}

/// Checks a document of `ksf doctor --json` against docs/formats/doctor-json.md: every field that is named there is
/// here and the other way round.
fn check_doctor(text: &str) -> serde_json::Value {
    let report: serde_json::Value = serde_json::from_str(text).expect("doctor prints JSON");
    assert_eq!(report["schema"], "ksf-doctor/1");
    let documented =
        std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../../docs/formats/doctor-json.md")).unwrap();
    let keys = |value: &serde_json::Value| -> Vec<String> { value.as_object().unwrap().keys().cloned().collect() };
    let mut all = keys(&report);
    for part in ["engines", "probes"] {
        all.extend(keys(&report[part][0]));
    }
    for key in all {
        assert!(documented.contains(&format!("`{key}`")), "the field {key} is not documented");
    }
    for probe in report["probes"].as_array().unwrap() {
        let name = probe["name"].as_str().unwrap();
        assert!(documented.contains(&format!("`{name}`")), "the probe {name} is not documented");
        let outcome = probe["outcome"].as_str().unwrap();
        assert!(["works", "fails", "unknown"].contains(&outcome), "{name}: {outcome}");
        assert!(!probe["detail"].as_str().unwrap().is_empty(), "{name}");
        assert_eq!(probe["remedy"].is_string(), outcome == "fails", "{name}");
        assert_eq!(probe["fallback"].is_string(), outcome != "works", "{name}");
    }
    let documented_probes = documented.lines().filter(|line| line.starts_with("| `")).count();
    let probes = report["probes"].as_array().unwrap().len();
    assert!(documented_probes >= probes, "{documented_probes} rows for {probes} probes");
    report
}

#[test]
fn doctor_speaks_json_as_documented() {
    let output = run(&["doctor", "--json"]);
    assert!(output.status.success(), "{}", stderr(&output));
    let report = check_doctor(&stdout(&output));
    let engines: Vec<&str> =
        report["engines"].as_array().unwrap().iter().map(|engine| engine["name"].as_str().unwrap()).collect();
    assert_eq!(engines, ["kernel", "uring", "epoll", "xdp"]);
    assert_eq!(report["engines"][2]["usable"], true, "epoll needs nothing");
}

#[test]
fn doctor_works_without_root_and_names_the_missing_capability() {
    use std::os::unix::process::CommandExt;
    let folder = Folder::new();
    let mut command = Command::new(ksf_for_all(&folder));
    if rustix::process::geteuid().is_root() {
        // Changing the user drops every capability.
        command.uid(65534).gid(65534);
    }
    let output = command.args(["doctor", "--json"]).current_dir("/").output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let report = check_doctor(&stdout(&output));
    let probe = |name: &str| -> serde_json::Value {
        report["probes"].as_array().unwrap().iter().find(|probe| probe["name"] == name).unwrap().clone()
    };
    assert_eq!(probe("cap_bpf")["outcome"], "fails");
    assert_eq!(probe("bpf_sk_skb")["outcome"], "fails");
    assert!(probe("bpf_sk_skb")["detail"].as_str().unwrap().contains("CAP_BPF"));
    assert_eq!(report["engines"][0]["usable"], false);
    assert!(report["engines"][0]["remedy"].as_str().unwrap().contains("setcap"));
}

#[test]
fn doctor_leaves_nothing_on_lo() {
    // Another ksf may have XDP on the machine's.
    let Some(()) = ksf_test::own_network_or_skip("XDP") else { return };
    assert!(run(&["doctor"]).status.success());
    let links = Command::new("ip").args(["-d", "link", "show", "dev", "lo"]).output().unwrap();
    assert!(links.status.success());
    assert!(!stdout(&links).contains("xdp"), "{}", stdout(&links));
}

#[test]
fn the_kernel_engine_without_rights_is_refused_by_name() {
    use std::os::unix::process::CommandExt;
    let folder = Folder::new();
    let mut command = Command::new(ksf_for_all(&folder));
    if rustix::process::geteuid().is_root() {
        command.uid(65534).gid(65534);
    }
    let args = ["kecho", "--engine", "kernel", "--listen", "127.0.0.1:0"];
    let output = command.args(args).current_dir("/").output().unwrap();
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(77), "{text}");
    assert_eq!(text.lines().count(), 1, "{text}");
    assert!(text.contains("CAP_BPF") && text.contains("setcap") && text.contains("--engine=auto"), "{text}");
}

#[test]
fn stat_without_a_server_says_so() {
    let folder = Folder::new();
    let path = folder.path("none.sock").display().to_string();
    fails(&["stat", &path], 69, &[&path]);
    fails(&["stat", "4194305"], 69, &["4194305"]);
    let output = run(&["stat", "--help-counters"]);
    assert!(output.status.success());
    assert!(stdout(&output).contains("closed_oversized_message"));
}
