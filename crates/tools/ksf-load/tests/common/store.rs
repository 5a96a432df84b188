//! A key-value server of RESP in this process, which lies on demand.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use ksf_proto::resp::{Arguments, Progress, RespLimits, Scan, scan};

use super::tcp_server;

const LIMITS: RespLimits = RespLimits { arguments_max: 8, argument_bytes_max: 1 << 20, command_bytes_max: 2 << 20 };

/// What the server has: the value of each key, and the first one that it ever had.
pub type Map = Arc<Mutex<HashMap<Vec<u8>, [Vec<u8>; 2]>>>;

/// What a lie is made of.
pub struct Asked<'a> {
    /// How many reads came before, on all connections; `None` for other commands.
    pub read: Option<u64>,
    pub words: &'a [&'a [u8]],
    /// What would be right.
    pub reply: Vec<u8>,
    /// The first value that the key had, and that of another key.
    pub first: Vec<u8>,
    pub other: Vec<u8>,
}

/// A string as a reply.
pub fn bulk(value: &[u8]) -> Vec<u8> {
    [format!("${}\r\n", value.len()).as_bytes(), value, b"\r\n"].concat()
}

/// A server that sends what `lie` makes of each command; an empty reply ends the connection if the lie is `None`.
pub fn kv_server(lie: impl Fn(Asked<'_>) -> Option<Vec<u8>> + Send + Clone + 'static) -> (SocketAddr, Map) {
    let (map, reads) = (Map::default(), Arc::new(AtomicU64::new(0)));
    let shared = map.clone();
    let server = tcp_server(move |stream| serve(stream, &shared, &reads, &lie));
    (server, map)
}

/// A server that is right.
pub fn good_kv_server() -> (SocketAddr, Map) {
    kv_server(|asked| Some(asked.reply))
}

/// Serves one connection.
pub fn serve(
    mut stream: impl Read + Write,
    map: &Map,
    reads: &AtomicU64,
    lie: &impl Fn(Asked<'_>) -> Option<Vec<u8>>,
) -> io::Result<()> {
    let (mut buffer, mut chunk) = (Vec::new(), vec![0; 1 << 16]);
    loop {
        let got = stream.read(&mut chunk)?;
        if got == 0 {
            return Ok(());
        }
        buffer.extend_from_slice(&chunk[..got]);
        let (mut used, mut replies) = (0, Vec::new());
        while let Ok(Scan::Command(length)) = scan(&buffer[used..], &LIMITS, &mut Progress::default()) {
            let words: Vec<&[u8]> = Arguments::of(&buffer[used..used + length]).expect("an array").collect();
            let Some(reply) = lie(answer(map, reads, &words)) else { return stream.write_all(&replies) };
            replies.extend(reply);
            used += length;
        }
        buffer.drain(..used);
        stream.write_all(&replies)?;
    }
}

fn answer<'a>(map: &Map, reads: &AtomicU64, words: &'a [&'a [u8]]) -> Asked<'a> {
    let mut map = map.lock().unwrap();
    let mut asked = Asked { read: None, words, reply: b"+OK\r\n".to_vec(), first: Vec::new(), other: Vec::new() };
    match words {
        [b"GET", key] => {
            asked.read = Some(reads.fetch_add(1, Ordering::Relaxed));
            asked.reply = map.get(*key).map_or(b"$-1\r\n".to_vec(), |[value, _]| bulk(value));
            asked.first = map.get(*key).map_or(Vec::new(), |[_, first]| first.clone());
            let other = map.iter().find(|(name, _)| name.as_slice() != *key);
            asked.other = other.map_or(Vec::new(), |(_, [value, _])| value.clone());
        }
        [b"SET", key, value] => {
            let entry = map.entry(key.to_vec()).or_insert_with(|| [Vec::new(), value.to_vec()]);
            entry[0] = value.to_vec();
        }
        _ => {}
    }
    asked
}
