//! Workers on the kernel's own message sockets: in a machine that has them, and what is said where they are missing.

mod support;

use ksf_lab::{Lab, turn};
use support::{Folder, run, stderr, stdout};

/// Serves work and RPC on a multiplexor, has them answer the load generators, and shows the counters.
const SERVE: &str = r#"
ksf serve --stats-socket /tmp/stats.sock /etc/ksf.toml &
server=$!
until case "$(ksf stat --json /tmp/stats.sock 2>&1)" in *'"rpc"'*) true;; *) false;; esac; do kill -0 $server; done
ksf worktest --no-pin -c 800 -k discard -n 8 127.0.0.1:7000
ksf worktest --no-pin -c 300 -k sleep -n 4 -a 32 --spread 127.0.0.1:7000
ksf worktest --no-pin -c 5000 -n 4 -a 256 127.0.0.1:7000
ksf rpctest -i 1 -c 500 -f 127.0.0.1:7001
ksf rpctest -i 1 -c 500 -j 3 -a 64 127.0.0.1:7001
ksf stat --json /tmp/stats.sock
kill $server
wait $server
"#;

fn lab(script: &str, mux: &str) -> Lab {
    let service = |kind: &str, port: u16| {
        let shape = format!("engine = \"epoll\"\nworkers = 3\nmux = \"{mux}\"\nlisten = [\"tcp:127.0.0.1:{port}\"]\n");
        format!("[[service]]\nname = \"{kind}\"\nkind = \"{kind}\"\n{shape}")
    };
    let config = [service("work", 7000), service("rpc", 7001)].concat();
    Lab::script(script).file(env!("CARGO_BIN_EXE_ksf"), "/bin/ksf").text("/etc/ksf.toml", config).cpus(2)
}

#[test]
fn services_answer_on_af_kcm_and_on_ksf() {
    let Some(_turn) = turn() else { return };
    for mux in ["kcm", "ksf"] {
        let output = lab(SERVE, mux).module("kcm").run().unwrap().checked().unwrap();
        assert_eq!(output.contains("workers=3 mux=kcm ready"), mux == "kcm", "{output}");
        let start = output.find("\n{").expect("ksf stat --json prints a document");
        let mut documents = serde_json::Deserializer::from_str(&output[start..]).into_iter::<serde_json::Value>();
        let stat = documents.next().unwrap().unwrap();
        let services = stat["services"].as_array().unwrap();
        for (name, messages) in [("work", 6100), ("rpc", 2000)] {
            let service = services.iter().find(|service| service["name"] == name).unwrap();
            let counters = service["counters"].as_array().unwrap();
            let counter = |name| counters.iter().find(|counter| counter["name"] == name).unwrap()["value"].as_u64();
            assert_eq!(counter("messages"), Some(messages), "{mux}: {service}");
            assert_eq!(counter("replies"), Some(messages), "{mux}: {service}");
        }
    }
}

/// The same kernel with the module, and with the module on its disk alone.
#[test]
fn doctor_tells_whether_af_kcm_works_and_what_it_lacks() {
    let Some(_turn) = turn() else { return };
    let modules = ksf_lab::Kernel::from_environment().unwrap();
    let list = modules.modules_dir().join("modules.dep");
    let guest = format!("/lib/modules/{}/modules.dep", modules.version());
    let script = "ksf doctor --json; ksf serve /etc/ksf.toml 2>&1 || echo status $?";
    let lab = lab(script, "kcm").file(list, guest);

    let report = |output: &str| -> serde_json::Value {
        let mut documents = serde_json::Deserializer::from_str(output).into_iter::<serde_json::Value>();
        let report = documents.next().unwrap().unwrap();
        report["probes"].as_array().unwrap().iter().find(|probe| probe["name"] == "kcm").unwrap().clone()
    };
    let output = lab.run().unwrap().checked().unwrap();
    let probe = report(&output);
    assert_eq!(probe["outcome"], "fails");
    assert_eq!(probe["errno"], 97, "EAFNOSUPPORT");
    assert!(probe["detail"].as_str().unwrap().ends_with("is not loaded"), "{probe}");
    assert_eq!(probe["remedy"], "load it: modprobe kcm");
    assert!(output.contains("is not loaded; load it: modprobe kcm; or use --mux=ksf\nstatus 69\n"), "{output}");

    // There it would serve, and not end.
    let output = self::lab("ksf doctor --json", "kcm").module("kcm").run().unwrap().checked().unwrap();
    assert_eq!(report(&output)["outcome"], "works", "{output}");
}

/// Wherever this runs: it serves, or says in one line why not.
#[test]
fn where_it_cannot_be_had_the_server_says_what_gives_it() {
    let probe = {
        let report: serde_json::Value = serde_json::from_str(&stdout(&run(&["doctor", "--json"]))).unwrap();
        report["probes"].as_array().unwrap().iter().find(|probe| probe["name"] == "kcm").unwrap().clone()
    };
    if probe["outcome"] == "works" {
        return;
    }
    let args = ["krpc2", "--listen", "tcp:127.0.0.1:0", "--workers", "2", "--mux", "kcm"];
    let output = run(&args);
    let missing_right = matches!(probe["errno"].as_i64(), Some(1 | 13));
    assert_eq!(output.status.code(), Some(if missing_right { 77 } else { 69 }), "{}", stderr(&output));
    let line = stderr(&output);
    assert_eq!(line.lines().count(), 1, "{line}");
    for part in [probe["detail"].as_str().unwrap(), probe["remedy"].as_str().unwrap(), "--mux=ksf"] {
        assert!(line.contains(part), "{line}");
    }
}

#[test]
fn mux_without_workers_is_a_mistake() {
    let output = run(&["krpc2", "--mux", "kcm"]);
    assert_eq!(output.status.code(), Some(64));
    assert!(stderr(&output).contains("--workers"), "{}", stderr(&output));
    let folder = Folder::new();
    let path = folder.write("x.toml", "[[service]]\nname = \"x\"\nkind = \"rpc\"\nmux = \"kcm\"\n");
    let output = run(&["serve", "--check", path.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(78));
    assert!(stderr(&output).contains("add workers = N"), "{}", stderr(&output));
}
