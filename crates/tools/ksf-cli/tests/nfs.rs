//! `ksf nfs` as its users run it: Debian's libnfs tools read and write, what was acknowledged survives `kill -9`, and mistakes
//! are told in one line.

use std::fs;
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::support::export::{Calls, Place, call, on_each_listener, opaque};
use crate::support::{Server, engines, run, stderr, stdout, value};
use ksf_proto::oncrpc::{NFS_PROGRAM, Reply};
use ksf_proto::xdr::{XdrReader, XdrWrite as _};
use ksf_test::rpc::{self, read_record, record, words};
use ksf_test::{is_root, own_network_or_skip, program_or_skip, skip, stream, wait_until};
use rustix::process::{Pid, Resource, Rlimit, Signal, prlimit};

/// One of libnfs' tools, with its words, which name a file of the server by `@NAME`. `None`: it is not here.
fn libnfs(server: &Server, export: &Path, words: &[&str]) -> Option<Result<String, String>> {
    let program = program_or_skip(words[0])?;
    let port = server.address(" tcp ").port();
    let url =
        |name: &str| format!("nfs://127.0.0.1{}/{name}?version=3&nfsport={port}&mountport={port}", export.display());
    let words = words[1..].iter().map(|word| word.strip_prefix('@').map_or_else(|| (*word).to_owned(), url));
    let output = Command::new(program).args(words).output().unwrap();
    // They end with 0 after some errors, too, and say those.
    let fine = output.status.success() && output.stderr.is_empty();
    Some(if fine { Ok(stdout(&output)) } else { Err(stderr(&output)) })
}

#[test]
fn tools_of_libnfs_list_read_and_write() {
    for engine in engines() {
        let place = Place::new();
        fs::write(place.export().join("greeting"), "hello\n").unwrap();
        fs::create_dir(place.export().join("folder")).unwrap();
        let server = place.start(engine, ",squash=none", &[]);
        let ask = |words: &[&str]| libnfs(&server, &place.export(), words);
        let Some(listed) = ask(&["nfs-ls", "@"]) else { return };
        let listed = listed.unwrap();
        assert!(listed.contains("greeting") && listed.contains("folder"), "{listed}");
        assert_eq!(ask(&["nfs-cat", "@greeting"]).unwrap().unwrap(), "hello\n");
        let source = place.0.path("source");
        let data: Vec<u8> = (0..5_000_003_u32).map(|at| (at / 7) as u8).collect();
        fs::write(&source, &data).unwrap();
        ask(&["nfs-cp", source.to_str().unwrap(), "@folder/copy"]).unwrap().unwrap();
        assert!(fs::read(place.export().join("folder/copy")).unwrap() == data, "{engine}: the copy is another one");
        let back = place.0.path("back");
        ask(&["nfs-cp", "@folder/copy", back.to_str().unwrap()]).unwrap().unwrap();
        assert!(fs::read(&back).unwrap() == data, "{engine}: what came back is another one");
        assert!(ask(&["nfs-cat", "@nothing"]).unwrap().is_err());
        let own = &server.stat()["services"][0]["own"];
        assert!(value(own, "read_calls") > 0 && value(own, "write_calls") > 0);
        let status = run(&["nfs", "status", server.stats.to_str().unwrap()]);
        assert!(status.status.success(), "{}", stderr(&status));
        let status = stdout(&status);
        for word in ["nfs: up", "procedure", "mean us", "fsinfo", "write"] {
            assert!(status.contains(word), "no {word} in {status}");
        }
        let row = status.lines().find(|line| line.trim_start().starts_with("127.0.0.1")).expect("a row for the client");
        let read: u64 = row.split_whitespace().nth(4).and_then(|bytes| bytes.parse().ok()).expect("bytes that it read");
        assert!(read >= data.len() as u64, "{row}");
        let document = stdout(&run(&["nfs", "status", "--json", server.stats.to_str().unwrap()]));
        let document: serde_json::Value = serde_json::from_str(&document).unwrap();
        let client = &document[0]["clients"][0];
        assert_eq!(client["address"].as_str(), Some("127.0.0.1"));
        assert!(client["written_bytes"].as_u64() >= Some(data.len() as u64), "{client}");
        assert!(document[0]["now"]["descriptors"].is_u64(), "{document}");
        server.stop();
    }
}

#[test]
fn what_was_acknowledged_survives_kill_9_and_handles_with_it() {
    if !is_root() {
        return skip("handles that outlive the server need root");
    }
    const WRITERS: usize = 8;
    for engine in engines() {
        let place = Place::new();
        let mut server = place.start(engine, ",squash=all,anon=0:0", &[]);
        let calls = Calls(server.address(" tcp "));
        let root = calls.mount(place.export().to_str().unwrap());
        let idle = calls.create(&root, "idle");
        calls.write(&idle, 0, 2, b"12345");
        calls.write(&idle, 5, 0, b"12345");
        calls.commit(&idle);
        let files: Vec<_> = (0..WRITERS).map(|number| calls.create(&root, &number.to_string())).collect();
        let acknowledged: Vec<AtomicUsize> = (0..WRITERS).map(|_| AtomicUsize::new(0)).collect();
        let work = |number: usize| {
            let mut stream = stream::connect(server.address(" tcp "));
            for turn in 1_u32.. {
                // FILE_SYNC of a block that has the number of its turn.
                let mut args = opaque(&files[number]);
                args.put(&words(&[0, 1000 * (turn - 1), 1000, 2]));
                args.put_opaque(&[turn as u8; 1000]);
                let sent = stream.write_all(&record(&[rpc::call(turn, NFS_PROGRAM, 3, 7), args].concat()));
                let Ok(Some(reply)) = sent.and_then(|()| read_record(&mut stream)) else { return };
                assert_eq!(Reply::parse(&reply).unwrap().results[..4], [0; 4], "a WRITE is refused");
                acknowledged[number].store(turn as usize, Ordering::SeqCst);
            }
        };
        std::thread::scope(|scope| {
            let work = &work;
            (0..WRITERS).for_each(|number| drop(scope.spawn(move || work(number))));
            let is_busy = || acknowledged.iter().all(|turns| turns.load(Ordering::SeqCst) > 5);
            wait_until("each writer has replies", is_busy);
            server.signal(Signal::KILL);
            // All of them end: nobody waits for a reply that never comes.
        });
        server.wait();
        let server = place.start(engine, ",squash=all,anon=0:0", &[]);
        let calls = Calls(server.address(" tcp "));
        assert_eq!(calls.read(&idle), b"1234512345", "{engine}");
        for (number, turns) in acknowledged.iter().enumerate() {
            let turns = turns.load(Ordering::SeqCst);
            let content = fs::read(place.export().join(number.to_string())).unwrap();
            assert!(content.len() >= 1000 * turns, "{engine}: {} bytes of {turns} blocks", content.len());
            let is_right = |(at, block): (usize, &[u8])| block.iter().all(|byte| *byte == (at + 1) as u8);
            assert!(content.chunks(1000).take(turns).enumerate().all(is_right), "{engine}: another content");
            // By the handle of the server that was killed.
            assert!(calls.read(&files[number]).starts_with(&[1; 1000]), "{engine}");
        }
        server.stop();
    }
}

#[test]
fn the_start_says_what_is_exported_and_how_it_is_mounted() {
    let place = Place::new();
    let server = place.start("epoll", ",ro,clients=127.0.0.0/8", &[]);
    let port = server.address(" tcp ").port();
    let line = server.seen().iter().find(|line| line.contains("export ")).expect("a line for the export");
    let path = place.export().canonicalize().unwrap();
    for part in [
        format!("ksf: nfs: export {} ro,squash=root,anon=65534:65534,clients=127.0.0.0/8", path.display()),
        format!(
            "mount -t nfs -o vers=3,tcp,nolock,port={port},mountport={port},mountproto=tcp 127.0.0.1:{} /mnt",
            path.display()
        ),
    ] {
        assert!(line.contains(&part), "no {part} in {line}");
    }
    server.stop();
}

/// A fake mount (mount(8), `-f`): mount.nfs reads the options and resolves the host, and leaves out the system call.
#[test]
fn mount_of_linux_takes_the_line_that_is_printed() {
    let Some(()) = own_network_or_skip("mount.nfs mounts for no other user") else { return };
    let Some(mount) = program_or_skip("mount.nfs") else { return };
    if TcpListener::bind("[::1]:0").is_err() {
        return skip("needs IPv6");
    }
    for (listen, host) in [("127.0.0.1", ""), ("0.0.0.0", "127.0.0.1"), ("[::1]", ""), ("[::]", "[::1]")] {
        let place = Place::new();
        let (export, state, listen) = (place.export(), place.0.path("state"), format!("tcp:{listen}:0"));
        let args = ["nfs", "--listen", &listen, "--state", state.to_str().unwrap(), "--export"];
        let server = Server::start(&[&args[..], &[export.to_str().unwrap()]].concat(), 1);
        let line = server.seen().iter().find_map(|line| line.split_once("to mount it: mount -t nfs -o ")).unwrap().1;
        let words: Vec<&str> = line.split_whitespace().collect();
        let [options, device, "/mnt"] = words[..] else { panic!("{line}") };
        let device = device.replace("SERVER", host);
        let fake = Command::new(&mount).args(["-fn", &device]).arg(&export).args(["-o", options]).output().unwrap();
        assert!(fake.status.success(), "{listen}: {line}: {}", stderr(&fake));
        server.stop();
    }
}

#[test]
fn exports_that_cannot_be_had_are_named_in_one_line() {
    let place = Place::new();
    let file = place.0.path("file");
    fs::write(&file, "").unwrap();
    let state = place.0.path("state");
    let path = |path: &Path| path.to_str().unwrap().to_owned();
    let inside = place.export().join("inside");
    fs::create_dir(&inside).unwrap();
    for (exports, status, part) in [
        (vec![path(&file)], 66, "not a folder"),
        (vec![path(&place.0.path("none"))], 66, "no such folder"),
        (vec![path(&place.export()), path(&inside)], 66, "export one of both"),
        (vec![format!("{},readonly", path(&place.export()))], 65, "\"readonly\" is no option"),
    ] {
        let mut args = vec!["nfs", "--listen", "tcp:127.0.0.1:0", "--state", state.to_str().unwrap()];
        exports.iter().for_each(|export| args.extend(["--export", export.as_str()]));
        let output = run(&args);
        let text = stderr(&output);
        assert_eq!(output.status.code(), Some(status), "{text}");
        assert!(text.lines().count() == 1 && text.contains(part), "{text}");
    }
    let output = run(&["nfs"]);
    assert_eq!(output.status.code(), Some(64), "{}", stderr(&output));
}

#[test]
fn a_file_of_services_may_have_an_nfs_server() {
    let place = Place::new();
    let text = "engine = \"epoll\"\n[[service]]\nname = \"files\"\nkind = \"nfs\"\nexports = [\"export,squash=none\"]\n\
                state = \"state\"\nlanes = 2\nlisten = [\"tcp:127.0.0.1:0\"]\n";
    let path = place.0.write("ksf.toml", text);
    let server = Server::start(&["serve", path.to_str().unwrap()], 1);
    let known = place.export().canonicalize().unwrap();
    Calls(server.address(" tcp ")).mount(known.to_str().unwrap());
    assert!(place.0.path("state").exists(), "the keys are not beside the file");
    server.stop();
    for (wrong, part) in [("exports = []", "exports has no folder"), ("exports = [\"a,b\"]", "\"b\" is no option")] {
        fs::write(&path, text.replace("exports = [\"export,squash=none\"]", wrong)).unwrap();
        let output = run(&["serve", "--check", path.to_str().unwrap()]);
        assert_eq!(output.status.code(), Some(78), "{}", stderr(&output));
        assert!(stderr(&output).contains(part), "{}", stderr(&output));
    }
}

/// `ksf load nfs` with these words, on the export, through this port.
fn load(port: u16, place: &Place, words: &[&str]) -> std::process::Output {
    let url = format!("nfs://127.0.0.1:{port}{}", place.export().display());
    let args: Vec<&str> = ["load", "nfs", "--files", "10"].into_iter().chain(words.iter().copied()).collect();
    run(&[&args[..], &[url.as_str()]].concat())
}

/// A limit of the process (RLIMIT_FSIZE) ends the request, not the server.
#[test]
fn a_file_beyond_the_limit_of_the_process_is_refused() {
    const FBIG: u32 = 27;
    let place = Place::new();
    let server = place.start("epoll", ",squash=all,anon=0:0", &[]);
    let pid = Pid::from_raw(server.pid() as i32);
    let limit = Rlimit { current: Some(1 << 20), maximum: Some(1 << 20) };
    prlimit(pid, Resource::Fsize, limit).unwrap();
    let calls = Calls(server.address(" tcp "));
    let root = calls.mount(place.export().to_str().unwrap());
    let file = calls.create(&root, "file");
    let status = |procedure, args: &[u8]| {
        let results = calls.call(NFS_PROGRAM, procedure, args);
        u32::from_be_bytes(results[..4].try_into().unwrap())
    };
    let size = [opaque(&file), words(&[0, 0, 0, 1, 0, 2 << 20, 0, 0, 0])].concat();
    assert_eq!(status(2, &size), FBIG);
    let data = [opaque(&file), words(&[0, 2 << 20, 4, 2]), opaque(b"data")].concat();
    assert_eq!(status(7, &data), FBIG);
    let data = [opaque(&file), words(&[0, 0, 4, 2]), opaque(b"data")].concat();
    assert_eq!(status(7, &data), 0);
    server.stop();
    assert_eq!(fs::read(place.export().join("file")).unwrap(), b"data");
}

/// The greatest WRITE of FSINFO.
fn write_bytes_max(connection: &mut TcpStream, root: &[u8]) -> usize {
    let info = call(connection, NFS_PROGRAM, 19, &opaque(root));
    let mut info = XdrReader::new(&info);
    assert_eq!((info.u32(), info.bool()), (Ok(0), Ok(true)));
    // Attributes; then greatest, best and unit of READ.
    info.opaque_fixed(84 + 3 * 4).unwrap();
    info.u32().unwrap() as usize
}

/// READ and WRITE of the size that FSINFO reports are done, whatever limits the listener has.
#[test]
fn reads_and_writes_of_the_reported_size_are_done_at_each_listener() {
    on_each_listener("nfs", |place, listeners, reload| {
        let calls = Calls(listeners[0].0);
        let root = calls.mount(place.export().to_str().unwrap());
        let made = calls.create(&root, "file");
        let reported = |message_bytes: usize| (message_bytes - (4 << 10)).min(1 << 20);
        let mut clients: Vec<_> =
            listeners.iter().map(|(address, bytes)| (stream::connect(*address), reported(*bytes))).collect();
        let mut transfer = || {
            for (connection, bytes) in &mut clients {
                assert_eq!(write_bytes_max(connection, &root), *bytes);
                let data = [opaque(&made), words(&[0, 0, *bytes as u32, 0]), opaque(&vec![7; *bytes])].concat();
                assert_eq!(call(connection, NFS_PROGRAM, 7, &data)[..4], [0; 4]);
                // More than that is cut.
                let read = call(connection, NFS_PROGRAM, 6, &[opaque(&made), words(&[0, 0, 1 << 20])].concat());
                assert!(read[..4] == [0; 4] && read.len() >= *bytes, "{} of {bytes} bytes", read.len());
            }
        };
        transfer();
        // Clients have mounted with it, and would send as much for ever.
        reload();
        transfer();
    });
}

#[test]
fn limits_without_room_for_a_write_are_refused() {
    let place = Place::new();
    let (export, state) = (place.export(), place.0.path("state"));
    let args = ["nfs", "--state", state.to_str().unwrap(), "--export", export.to_str().unwrap()];
    for more in [
        &["--listen", "tcp:127.0.0.1:0", "--connection-bytes-max", "4k"][..],
        &["--listen", "tcp:127.0.0.1:0,message_bytes_max=4k"],
    ] {
        let output = run(&[&args[..], more].concat());
        let text = stderr(&output);
        assert_eq!(output.status.code(), Some(65), "{text}");
        assert!(text.lines().count() == 1 && text.contains("let both be 8k at least"), "{text}");
    }
}

#[test]
fn the_generator_calls_every_procedure_and_leaves_nothing() {
    const ALL: &str = "null,getattr,setattr,lookup,access,readlink,read,write,create,remove,readdir,readdirplus,fsstat,fsinfo,\
                       pathconf,commit";
    for engine in engines() {
        let place = Place::new();
        let server = place.start(engine, ",squash=none", &[]);
        let port = server.address(" tcp ").port();
        for mix in [ALL, "sfs2008", "create=1,remove=1"] {
            let output = load(port, &place, &["--mix", mix, "-j", "2", "-a", "8", "-c", "400", "--json"]);
            assert!(output.status.success(), "{engine}: {}", stderr(&output));
            let left: Vec<_> = fs::read_dir(place.export()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
            assert!(left.is_empty(), "{engine}, {mix}: {left:?}: {}", stderr(&output));
            let document: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
            assert_eq!(
                (document["total"]["messages"].as_u64(), document["total"]["faults"].as_u64()),
                (Some(800), Some(0))
            );
        }
        let own = &server.stat()["services"][0]["own"];
        for procedure in ["readlink", "setattr", "readdirplus", "commit", "pathconf"] {
            assert!(value(own, &format!("{procedure}_calls")) > 0, "{engine}: no {procedure}");
        }
        let large =
            ["--mix", "read=1,write=1", "--io-bytes", "1m", "--file-bytes", "1m", "--stable", "file", "-c", "20"];
        let output = load(port, &place, &large);
        assert!(output.status.success(), "{engine}: {}", stderr(&output));
        server.stop();
    }
}

#[test]
fn the_generator_finds_a_byte_that_is_another_one() {
    let place = Place::new();
    let server = place.start("epoll", ",squash=none", &[]);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let address = server.address(" tcp ");
    // Between both: turns over a bit at the end of every long reply, which is data.
    std::thread::spawn(move || {
        for client in listener.incoming() {
            let (mut client, mut behind) = (client.unwrap(), stream::connect(address));
            std::thread::spawn(move || {
                while let Ok(Some(call)) = read_record(&mut client) {
                    behind.write_all(&record(&call)).unwrap();
                    let mut reply = read_record(&mut behind).unwrap().expect("a reply");
                    if reply.len() > 4096 {
                        *reply.last_mut().unwrap() ^= 1;
                    }
                    client.write_all(&record(&reply)).unwrap();
                }
            });
        }
    });
    let output = load(port, &place, &["--mix", "read=1,getattr=3", "-c", "40"]);
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    assert!(stderr(&output).contains("other bytes than the file has"), "{}", stderr(&output));
    server.stop();
}

#[test]
fn an_export_that_is_none_is_told_by_the_generator() {
    let place = Place::new();
    let server = place.start("epoll", ",ro,squash=none", &[]);
    let port = server.address(" tcp ").port();
    let refused = load(port, &place, &[]);
    assert_eq!(refused.status.code(), Some(71));
    assert!(
        stderr(&refused).contains("cannot make a folder") && stderr(&refused).contains("ROFS"),
        "{}",
        stderr(&refused)
    );
    let nothing = run(&["load", "nfs", &format!("nfs://127.0.0.1:{port}/none")]);
    assert!(stderr(&nothing).contains("cannot mount"), "{}", stderr(&nothing));
    assert_eq!(run(&["load", "nfs", "127.0.0.1:/none"]).status.code(), Some(64));
    server.stop();
}
