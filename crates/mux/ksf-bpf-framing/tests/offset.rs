//! The stream parser of the kernel, which AF_KCM and sockmaps share, and the offset it hides from framing programs.
//!
//! AF_KCM itself is rarely there; a sockmap with a stream parser calls a framing program in the same way. Messages that
//! arrive in one segment must be cut apart, which a program that reads at 0 gets wrong without any error.

use std::ffi::OsStr;
use std::io::{self, Write as _};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd};
use std::thread;
use std::time::{Duration, Instant};

use crate::common::compile;
use libbpf_rs::{MapCore, MapFlags, MapHandle, ObjectBuilder, ProgramAttachType, ProgramType};

/// A byte that counts the whole message, itself included, and a verdict that adds up what it is shown.
const SOURCE: &str = r#"
#include "ksf_framing_program.h"

KSF_FRAMING_PROGRAM(parser)
{
	__u8 length;

	return ksf_load_u8(stream, 0, &length) ? length : 0;
}

struct {
	int (*type)[15];
	int (*max_entries)[1];
	__u32 *key;
	__u32 *value;
} sockets __attribute__((section(".maps"), used));

struct {
	int (*type)[2];
	int (*max_entries)[64];
	__u32 *key;
	__u32 *value;
} lengths __attribute__((section(".maps"), used));

struct strp_msg___full {
	int full_len;
} __attribute__((preserve_access_index));
struct _strp_msg___full {
	struct strp_msg___full strp;
} __attribute__((preserve_access_index));
struct sk_skb_cb___full {
	struct _strp_msg___full strp;
} __attribute__((preserve_access_index));
struct sk_buff___full {
	char cb[48];
} __attribute__((preserve_access_index));

static long (*const update)(void *, const void *, const void *, __u64) = (void *)2;
static __u32 next;

__attribute__((section("sk_skb/stream_verdict"), used)) int verdict(struct __sk_buff *skb)
{
	struct sk_buff___full *buffer = (void *)skb;
	struct sk_skb_cb___full *cb = (void *)&buffer->cb;
	__u32 at = __sync_fetch_and_add(&next, 1), length = 0;

	bpf_probe_read_kernel(&length, sizeof(length), &cb->strp.strp.full_len);
	update(&lengths, &at, &length, 0);
	return 0;
}

KSF_LICENSE("Dual MIT/GPL");
"#;

/// Lengths of the messages into which the kernel cuts `stream`, sent in one piece: as many as `count`.
fn cut(name: &str, flags: &[&str], stream: &[u8], count: usize) -> io::Result<Vec<u32>> {
    let object = compile(name, SOURCE, flags);
    let to_io = |error: libbpf_rs::Error| match error.kind() {
        libbpf_rs::ErrorKind::PermissionDenied => io::ErrorKind::PermissionDenied.into(),
        _ => io::Error::other(error),
    };
    let mut object = ObjectBuilder::default().open_memory(&object).map_err(to_io)?;
    for mut program in object.progs_mut() {
        if program.name() == OsStr::new("parser") {
            program.set_prog_type(ProgramType::SkSkb);
            program.set_attach_type(ProgramAttachType::SkSkbStreamParser);
        }
    }
    let object = object.load().map_err(to_io)?;
    let map = |name| MapHandle::try_from(&object.maps().find(|map| map.name() == OsStr::new(name)).unwrap());
    let (sockets, lengths) = (map("sockets").map_err(to_io)?, map("lengths").map_err(to_io)?);
    for program in object.progs_mut() {
        program.attach_sockmap(sockets.as_fd().as_raw_fd()).map_err(to_io)?;
    }

    let listener = TcpListener::bind("127.0.0.1:0")?;
    let mut client = TcpStream::connect(listener.local_addr()?)?;
    let (server, _) = listener.accept()?;
    let socket = (server.as_raw_fd() as u32).to_ne_bytes();
    sockets.update(&0_u32.to_ne_bytes(), &socket, MapFlags::ANY).map_err(to_io)?;
    client.write_all(stream)?;

    // The kernel cuts when the segment arrives; the limit only ends a test that has failed.
    let limit = Instant::now() + Duration::from_secs(10);
    loop {
        let seen: Vec<u32> = (0..64_u32)
            .map(|at| lengths.lookup(&at.to_ne_bytes(), MapFlags::ANY).map_err(to_io))
            .map(|value| Ok(value?.and_then(|value| value.try_into().ok()).map_or(0, u32::from_ne_bytes)))
            .take_while(|length| !matches!(length, Ok(0)))
            .collect::<io::Result<_>>()?;
        if seen.len() >= count || Instant::now() > limit {
            return Ok(seen);
        }
        thread::yield_now();
    }
}

#[test]
fn messages_of_one_segment_are_cut_apart() {
    let mut stream = Vec::new();
    let wanted: [u32; 6] = [10, 15, 20, 25, 30, 35];
    for length in wanted {
        stream.push(length as u8);
        stream.resize(stream.len() + length as usize - 1, 0xaa);
    }
    let with_offset = match cut("offset_with", &["-DKSF_AF_KCM"], &stream, wanted.len()) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            return ksf_test::skip("needs root (attaches to a sockmap)");
        }
        other => other.expect("the kernel cuts the stream"),
    };
    assert_eq!(with_offset, wanted);
    // Without the offset every message has the length of the first: 13 of 10 bytes, and 5 bytes are stuck. Should a
    // kernel give the right cut here some day, the macro is no longer needed there.
    let without = cut("offset_without", &[], &stream, 13).expect("the kernel cuts the stream");
    assert_eq!(without, [10; 13]);
}
