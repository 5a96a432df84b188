//! Clients that people use, on a server of each engine: curl, wrk, redis-cli and redis-benchmark.

use std::path::Path;
use std::process::Command;

use crate::common::{Serving, engines};
use ksf::engine::EngineKind;
use ksf_test::{own_network, program_or_skip};

fn on_each(test: impl Fn(EngineKind, &Serving, &Path)) {
    own_network();
    for engine in engines() {
        let folder = tempfile::tempdir().unwrap();
        let serving = Serving::start(engine, &folder.path().join("store"));
        test(engine, &serving, folder.path());
        serving.stop();
    }
}

/// What a program writes, which must end well.
fn run(command: &mut Command) -> Vec<u8> {
    let output = command.output().unwrap();
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {told} {}", String::from_utf8_lossy(&output.stdout));
    output.stdout
}

#[test]
fn curl_gets_what_it_put() {
    let Some(curl) = program_or_skip("curl") else { return };
    on_each(|engine, serving, folder| {
        let file = folder.join("photo.jpg");
        let photo: Vec<u8> = (0..900_000).map(|at: u32| ((at * 31) >> 3) as u8).collect();
        std::fs::write(&file, &photo).unwrap();
        let ask = |target: &str, args: &[&str]| {
            let url = format!("http://{}/{target}", serving.address());
            run(Command::new(&curl).args(["--silent", "--show-error", "--globoff"]).args(args).arg(url))
        };
        let code = |target: &str, args: &[&str]| {
            let told = ask(target, &[&["--output", "/dev/null", "--write-out", "%{http_code}"], args].concat());
            String::from_utf8(told).unwrap()
        };
        let data = format!("@{}", file.display());
        let put = ["-X", "PUT", "--header", "Expect: 100-continue", "--data-binary", &data];
        assert_eq!(code("photo", &put), "201", "{engine}");
        assert!(ask("photo", &[]) == photo, "{engine}");
        assert!(ask("photo", &["--range", "1000-1999"]) == photo[1000..2000], "{engine}");
        assert!(ask("photo", &["--range", "-10"]) == photo[photo.len() - 10..], "{engine}");
        assert_eq!(code("photo", &["--range", "900000-"]), "416", "{engine}");
        let head = String::from_utf8(ask("photo", &["--head"])).unwrap();
        assert!(head.starts_with("HTTP/1.1 200 OK\r\n") && head.contains("Content-Length: 900000\r\n"), "{head}");
        let tag = head.lines().find_map(|line| line.strip_prefix("ETag: ")).unwrap();
        // In chunks, if nobody wrote in between.
        let same = format!("If-Match: {tag}");
        let upload = ["--upload-file", file.to_str().unwrap(), "--header", "Transfer-Encoding: chunked"];
        let upload = [&upload[..], &["--header", &same]].concat();
        assert_eq!(code("photo", &upload), "204", "{engine}");
        assert_eq!(code("photo", &upload), "412", "{engine}: it is no longer the same");
        assert!(ask("photo", &[]) == photo, "{engine}");
        assert_eq!(code("photos/%C3%A4", &["-X", "PUT", "--data-binary", "small"]), "201", "{engine}");
        let list = ask("?prefix=photo", &[]);
        assert_eq!(String::from_utf8(list).unwrap(), "{\"keys\":[\"photo\",\"photos/%C3%A4\"],\"next\":null}\n");
        assert_eq!(code("photo", &["-X", "DELETE"]), "204", "{engine}");
        assert_eq!(code("photo", &[]), "404", "{engine}");
    });
}

/// PASTE's measurement: requests to write, over and over, on many connections.
#[test]
fn wrk_posts_keys_with_values() {
    let Some(wrk) = program_or_skip("wrk") else { return };
    on_each(|engine, serving, folder| {
        let script = folder.join("post.lua");
        let lines = "wrk.method = 'POST'\nwrk.body = 'key 0001' .. string.rep('v', 1272)\n\
                     done = function(summary) print('requests ' .. summary.requests)\n\
                     local e = summary.errors\n\
                     print('errors ' .. e.connect + e.read + e.write + e.status + e.timeout) end\n";
        std::fs::write(&script, lines).unwrap();
        let url = format!("http://{}/", serving.address());
        let script = ["-t", "1", "-c", "8", "-d", "1s", "-s", script.to_str().unwrap()];
        let told = String::from_utf8(run(Command::new(&wrk).args(script).arg(url))).unwrap();
        assert!(told.contains("\nerrors 0\n") && !told.contains("\nrequests 0\n"), "{engine}: {told}");
        let mut client = serving.connect();
        client.send(&["GET", "key 0001"]);
        assert_eq!(client.reply(), "v".repeat(1272), "{engine}");
    });
}

#[test]
fn redis_cli_is_answered() {
    let Some(cli) = program_or_skip("redis-cli") else { return };
    on_each(|engine, serving, _| {
        let port = serving.address().port().to_string();
        for version in ["-2", "-3"] {
            let ask = |words: &[&str]| {
                let told = run(Command::new(&cli).args(["-h", "127.0.0.1", "-p", &port, version]).args(words));
                String::from_utf8(told).unwrap().trim_end().to_owned()
            };
            assert_eq!(ask(&["set", "greeting", "hello"]), "OK", "{engine} {version}");
            assert_eq!(ask(&["get", "greeting"]), "hello", "{engine} {version}");
            assert_eq!(ask(&["hset", "hash", version, "1"]), "1", "{engine} {version}");
            assert_eq!(ask(&["hget", "hash", version]), "1", "{engine} {version}");
            assert_eq!(ask(&["--scan", "--pattern", "greet*"]), "greeting", "{engine} {version}");
            assert_eq!(ask(&["ksf.keys", "prefix", "hash"]), "\nhash", "{engine} {version}");
        }
    });
}

#[test]
fn redis_benchmark_is_answered() {
    let Some(benchmark) = program_or_skip("redis-benchmark") else { return };
    on_each(|engine, serving, _| {
        let port = serving.address().port().to_string();
        let what = ["-n", "2000", "-r", "100", "-d", "64", "-t", "set,get,incr,hset,lpush,mset", "--csv", "-e"];
        for pipeline in ["1", "16"] {
            let args = ["-h", "127.0.0.1", "-p", &port, "-c", "20", "-P", pipeline];
            let told = String::from_utf8(run(Command::new(&benchmark).args(args).args(what))).unwrap();
            for test in ["SET", "GET", "INCR", "HSET", "LPUSH", "MSET"] {
                assert!(told.contains(&format!("\"{test}")), "{engine} -P {pipeline}: no {test}: {told}");
            }
            assert!(!told.contains("rror"), "{engine} -P {pipeline}: {told}");
        }
        assert_eq!(serving.connect().ask("EXISTS counter:__rand_int__"), ":0", "{engine}: keys are random");
    });
}
