//! kv against the server that most people know: Debian's Redis.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::common::*;

/// A server with its files, on a Unix-domain socket. It is killed when dropped.
struct Redis {
    /// Held for its end.
    _running: Running,
    socket: PathBuf,
}

impl Redis {
    /// `None`: the test is skipped.
    fn start(folder: &Path, more: &[&str]) -> Option<Redis> {
        let program = program_or_skip("redis-server")?;
        let socket = folder.join("redis.sock");
        let _ = std::fs::remove_file(&socket);
        let mut command = Command::new(program);
        command.args(["--port", "0", "--save", "", "--dir"]).arg(folder).arg("--unixsocket").arg(&socket).args(more);
        let running = Running::start(command.stdout(Stdio::null()));
        let redis = Redis { _running: running, socket };
        // It listens before it has read its files, and says so until then.
        wait_until("Redis answers", || redis.try_ask("PING").is_ok_and(|reply| !reply.starts_with("-LOADING")));
        Some(redis)
    }

    fn target(&self) -> String {
        format!("unix:{}", self.socket.display())
    }

    /// Asks by an inline command; the reply is a short line.
    fn try_ask(&self, command: &str) -> std::io::Result<String> {
        let mut stream = UnixStream::connect(&self.socket)?;
        stream.write_all(format!("{command}\r\n").as_bytes())?;
        let mut reply = Vec::new();
        let mut byte = [0];
        while !reply.ends_with(b"\r\n") {
            stream.read_exact(&mut byte)?;
            reply.push(byte[0]);
        }
        Ok(String::from_utf8_lossy(&reply).trim_end().to_owned())
    }
}

#[test]
fn redis_is_right_and_an_audit_finds_what_is_taken_from_it() {
    let folder = Folder::new();
    let Some(redis) = Redis::start(&folder.path(""), &["--requirepass", "secret"]) else { return };
    let journal = folder.path("journal");
    let target = format!("{} --password secret", redis.target());
    for options in ["-c 20 -P 16 --sizes 64,1400 --zipf 0.99", "-c 1", "-c 3 --rate 20K --mix 1:1"] {
        let ran = run_kv(&format!("{target} {options} -n 5000 --keys 1000 --journal {}", journal.display()));
        ran.assert_clean(5000);
    }
    let audit = || run_kv(&format!("{target} --audit {}", journal.display()));
    audit().assert_clean(1000);
    let ask = |command: &str| redis.try_ask(command).unwrap();
    // Each on a connection of its own, which has not logged in.
    assert!(ask("DEL key:000000000007").starts_with("-NOAUTH"));
    let mut stream = UnixStream::connect(&redis.socket).unwrap();
    stream.write_all(b"AUTH secret\r\nDEL key:000000000007\r\nSET key:000000000008 x\r\n").unwrap();
    stream::expect(&mut stream, b"+OK\r\n:1\r\n+OK\r\n");
    let ran = audit();
    assert_eq!((ran.code, ran.faults()), (1, vec![("foreign", 1), ("missing", 1)]), "{}", ran.stderr);
    assert_eq!(ran.report().audit.as_ref().unwrap().lost, 1);
}
