//! What a peer may cost before it has told the password, in RESP and HTTP.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;

use crate::common::{Client, Redis, Serving, engines};
use ksf::limits::Limits;
use ksf_kv::Settings;
use ksf_test::{own_network, stream};

const PASSWORD: &str = "open sesame";

fn on_each_engine(test: impl Fn(&str, &Serving)) {
    own_network();
    for engine in engines() {
        let folder = tempfile::tempdir().unwrap();
        let settings = Settings { password: Some(PASSWORD.into()), ..Settings::default() };
        let serving = Serving::start_set(engine, folder.path(), Limits::default(), settings);
        test(&engine.to_string(), &serving);
        serving.stop();
    }
}

/// What the server sends until it ends the connection, whose peer does not end its direction.
fn until_end(mut stream: impl Read + Write, bytes: &[u8]) -> String {
    // It may have ended the connection by now.
    let _ = stream.write_all(bytes);
    let mut sent = Vec::new();
    // A reset ends it, too; that nothing comes for long is a failure.
    if let Err(error) = stream.read_to_end(&mut sent) {
        assert_eq!(
            error.kind(),
            std::io::ErrorKind::ConnectionReset,
            "{}",
            bytes[..bytes.len().min(60)].escape_ascii()
        );
    }
    String::from_utf8_lossy(&sent).into_owned()
}

/// Commands of which the rest never comes, with their errors.
fn too_much() -> Vec<(Vec<u8>, &'static str)> {
    const COUNT: &str = "-ERR Protocol error: unauthenticated multibulk length\r\n";
    const LENGTH: &str = "-ERR Protocol error: unauthenticated bulk length\r\n";
    vec![
        (b"*11\r\n".to_vec(), COUNT),
        (b"*2147483647\r\n".to_vec(), COUNT),
        (b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$8388608\r\n".to_vec(), "-ERR Protocol error: invalid bulk length\r\n"),
        (b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$1000000\r\n".to_vec(), LENGTH),
        (b"*2\r\n$4\r\nAUTH\r\n$16385\r\n".to_vec(), LENGTH),
        (b"*x\r\n".to_vec(), "-ERR Protocol error: invalid multibulk length\r\n"),
    ]
}

#[test]
fn commands_before_auth_have_the_limits_of_redis() {
    let redis = Redis::start_with(&["--requirepass", PASSWORD, "--proto-max-bulk-len", "1114112"]);
    on_each_engine(|engine, serving| {
        for (bytes, told) in too_much() {
            let what = bytes.escape_ascii().to_string();
            assert_eq!(until_end(stream::connect(serving.address()), &bytes), told, "{engine}: {what}");
            if let Some(redis) = &redis {
                let theirs = UnixStream::connect(redis.folder.path().join("redis")).unwrap();
                assert_eq!(until_end(theirs, &bytes), told, "Redis: {what}");
            }
        }
        // All arguments together have as much as one, and so does an inline command.
        let half = [b"*9\r\n$4\r\nAUTH\r\n$9000\r\n".to_vec(), vec![b'x'; 9000], b"\r\n$9000\r\n".to_vec()].concat();
        let told = until_end(stream::connect(serving.address()), &half);
        assert_eq!(told, "-ERR Protocol error: unauthenticated bulk length\r\n", "{engine}");
        for front in ["PING ", "x", "GET "] {
            let told = until_end(stream::connect(serving.address()), &[front.as_bytes(), &[b'x'; 16 << 10]].concat());
            assert_eq!(told, "-ERR Protocol error: too big inline request\r\n", "{engine}: {front}");
        }
    });
}

#[test]
fn limits_rise_with_the_password_and_fall_with_reset() {
    on_each_engine(|engine, serving| {
        let value = "v".repeat(1_000_000);
        let mut client = serving.connect();
        assert_eq!(client.ask("PING"), "-NOAUTH Authentication required.", "{engine}");
        assert_eq!(client.ask(&format!("AUTH {}", "x".repeat(16_000)))[..10], *"-WRONGPASS", "{engine}");
        // All at once: what is behind AUTH has the limits that AUTH brings.
        client.send(&["AUTH", PASSWORD]);
        client.send(&["SET", "k", &value]);
        client.send(&["DEL", "a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k"]);
        for reply in ["+OK", "+OK", ":1"] {
            assert_eq!(client.reply(), reply, "{engine}");
        }
        assert_eq!(client.ask("RESET"), "+RESET", "{engine}");
        let told = until_end(client.0.into_inner(), b"*11\r\n");
        assert_eq!(told, "-ERR Protocol error: unauthenticated multibulk length\r\n", "{engine}");

        // AUTH does not wait for the end of a pause, as what is behind it has its limits.
        let mut near = serving.connect();
        near.send(&["AUTH", PASSWORD]);
        assert_eq!(near.reply(), "+OK", "{engine}");
        assert_eq!(near.ask("CLIENT PAUSE 100 ALL"), "+OK", "{engine}");
        let mut client = serving.connect();
        client.send(&["AUTH", PASSWORD]);
        client.send(&["SET", "k", &value]);
        assert_eq!((client.reply(), client.reply()), ("+OK".into(), "+OK".into()), "{engine}");
    });
}

fn http(fields: &str) -> Vec<u8> {
    format!("PUT /key HTTP/1.1\r\nHost: x\r\n{fields}\r\n").into_bytes()
}

#[test]
fn requests_without_the_password_have_16_kib() {
    let password = format!("Authorization: Bearer {PASSWORD}\r\n");
    let long = format!("X: {}\r\n", "x".repeat(16 << 10));
    on_each_engine(|engine, serving| {
        let status = |bytes: &[u8]| {
            let told = until_end(stream::connect(serving.address()), bytes);
            let bodies = told.matches("HTTP/1.1 ").count();
            assert_eq!(bodies, 1, "{engine}: {told}");
            told[9..12].parse::<u16>().unwrap_or_else(|_| panic!("{engine}: {told}"))
        };
        // None of these is awaited to its end.
        assert_eq!(status(&http("Content-Length: 16384\r\n")), 401, "{engine}");
        assert_eq!(status(&http("Authorization: Bearer no\r\nContent-Length: 1000000\r\n")), 401, "{engine}");
        let chunks = [http("Transfer-Encoding: chunked\r\n"), b"5000\r\n".to_vec(), vec![b'x'; 0x5000]].concat();
        assert_eq!(status(&chunks), 401, "{engine}");
        assert_eq!(status(&http(&long)[..(16 << 10) + 10]), 431, "{engine}");
        assert_eq!(status(&[&b"GET /"[..], &[b'x'; 16 << 10]].concat()), 431, "{engine}");

        // With the password a request is as long as any, and so are those behind it.
        let mut peer = stream::connect(serving.address());
        let put = http(&format!("{password}Content-Length: 1000000\r\n"));
        let second = http(&format!("{password}{long}Content-Length: 1\r\nConnection: close\r\n"));
        peer.write_all(&[put, vec![b'x'; 1_000_000], second, b"y".to_vec()].concat()).unwrap();
        peer.shutdown(Shutdown::Write).unwrap();
        let mut told = String::new();
        peer.read_to_string(&mut told).unwrap();
        let statuses: Vec<&str> = told.match_indices("HTTP/1.1 ").map(|(at, _)| &told[at + 9..at + 12]).collect();
        assert_eq!(statuses, ["201", "204"], "{engine}");
    });
}

/// Peers that say much and send little take no memory from others.
#[test]
fn silent_strangers_hold_nobody_up() {
    on_each_engine(|engine, serving| {
        let part = [&b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$1000000\r\n"[..], &[b'x'; 10_000]].concat();
        let mut strangers: Vec<_> = (0..100).map(|_| stream::connect(serving.address())).collect();
        for stranger in &mut strangers {
            let _ = stranger.write_all(&part);
        }
        let mut client = Client::new(serving.address());
        client.send(&["AUTH", PASSWORD]);
        assert_eq!(client.reply(), "+OK", "{engine}");
        for stranger in strangers {
            let told = until_end(stranger, b"");
            assert!(told.is_empty() || told.starts_with("-ERR Protocol error: unauthenticated"), "{engine}: {told}");
        }
        assert_eq!(client.ask("PING"), "+PONG", "{engine}");
    });
}
