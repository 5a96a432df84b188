//! Registration with rpcbind: against a small stand-in that can misbehave, and,
//! as root, against Debian's rpcbind in a namespace of its own.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::os::unix::net::UnixListener;
use std::process::Command;
use std::sync::{Arc, Mutex};

use ksf_proto::oncrpc::rpcbind::{Binding, PROC_DUMP, PROC_SET, PROC_UNSET, PROGRAM};
use ksf_proto::oncrpc::{Accepted, Call, PROC_NULL, ReplyStatus, put_reply, put_success};
use ksf_proto::xdr::{XdrReader, XdrWrite};
use ksf_services::rpc::rpcbind::{Registration, RpcbindClient, RpcbindEndpoint, RpcbindEntry, RpcbindError, entries};
use ksf_services::rpc::{Program, ProgramTable};
use ksf_test::{Folder, Running, own_network, own_run_or_skip, program_or_skip, rpc, run, wait_until};

/// Program, version, netid, universal address.
type Row = (u32, u32, String, String);

/// A stand-in for rpcbind.
#[derive(Clone, Default)]
struct FakeRpcbind {
    rows: Arc<Mutex<Vec<Row>>>,
    /// SET always says no.
    refuses: bool,
    /// Answers this instead of SUCCESS.
    answers: Option<ReplyStatus>,
    /// Over UDP, the first reply to this procedure is lost.
    loses_reply_to: Option<u32>,
    /// Over UDP, every reply comes twice.
    repeats_replies: bool,
}

impl FakeRpcbind {
    fn rows(&self) -> Vec<Row> {
        self.rows.lock().unwrap().clone()
    }

    fn answer(&self, message: &[u8]) -> Vec<u8> {
        let call = Call::parse(message).unwrap();
        assert_eq!((call.program, call.version), (PROGRAM, 4));
        let mut out = Vec::new();
        if let Some(status) = self.answers {
            put_reply(&mut out, call.xid, status);
            return out;
        }
        put_success(&mut out, call.xid);
        let mut rows = self.rows.lock().unwrap();
        match call.procedure {
            PROC_NULL => {}
            PROC_SET => {
                let row = row(call.args);
                let free = !rows.iter().any(|r| (r.0, r.1, &r.2) == (row.0, row.1, &row.2));
                let done = free && !self.refuses;
                if done {
                    rows.push(row);
                }
                out.put_bool(done);
            }
            PROC_UNSET => {
                let row = row(call.args);
                let before = rows.len();
                rows.retain(|r| (r.0, r.1, &r.2) != (row.0, row.1, &row.2));
                out.put_bool(rows.len() < before);
            }
            PROC_DUMP => {
                for (program, version, netid, address) in rows.iter() {
                    out.put_bool(true);
                    let (program, version) = (*program, *version);
                    Binding { program, version, netid, address, owner: "superuser" }.put(&mut out);
                }
                out.put_bool(false);
            }
            other => panic!("procedure {other} is not expected"),
        }
        out
    }

    fn serve_stream(&self, mut stream: impl Read + Write) {
        let mut mark = [0; 4];
        while stream.read_exact(&mut mark).is_ok() {
            let mark = u32::from_be_bytes(mark);
            assert_eq!(mark >> 31, 1, "one fragment");
            let mut message = vec![0; (mark & 0x7fff_ffff) as usize];
            stream.read_exact(&mut message).unwrap();
            let reply = self.answer(&message);
            // In two fragments, as a server may.
            let (head, tail) = reply.split_at(5);
            let record = [rpc::fragment(false, head), rpc::fragment(true, tail)].concat();
            stream.write_all(&record).unwrap();
        }
    }

    fn on_unix(&self, dir: &Folder) -> RpcbindEndpoint {
        let path = dir.path("rpcbind.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let this = self.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                this.serve_stream(stream.unwrap());
            }
        });
        RpcbindEndpoint::Unix(path)
    }

    fn on_tcp(&self) -> RpcbindEndpoint {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let this = self.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                this.serve_stream(stream.unwrap());
            }
        });
        RpcbindEndpoint::Tcp(address)
    }

    fn on_udp(&self) -> RpcbindEndpoint {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let address = socket.local_addr().unwrap();
        let this = self.clone();
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            let mut to_lose = this.loses_reply_to;
            loop {
                let (len, peer) = socket.recv_from(&mut buffer).unwrap();
                let procedure = Call::parse(&buffer[..len]).unwrap().procedure;
                let reply = this.answer(&buffer[..len]);
                if to_lose.take_if(|lost| *lost == procedure).is_none() {
                    for _ in 0..=usize::from(this.repeats_replies) {
                        socket.send_to(&reply, peer).unwrap();
                    }
                }
            }
        });
        RpcbindEndpoint::Udp(address)
    }
}

fn row(args: &[u8]) -> Row {
    let mut r = XdrReader::new(args);
    let (program, version) = (r.u32().unwrap(), r.u32().unwrap());
    let mut text = || r.utf8(200).unwrap().to_owned();
    let (netid, address, owner) = (text(), text(), text());
    assert_eq!(owner, "");
    r.finish().unwrap();
    (program, version, netid, address)
}

/// NFSv3 and MOUNTv3 at 127.0.0.1:62049 over TCP.
fn two_entries() -> Vec<RpcbindEntry> {
    let mut table = ProgramTable::new();
    table.register(Program::NFS_V3).unwrap();
    table.register(Program::MOUNT_V3).unwrap();
    entries(&table, "127.0.0.1:62049".parse().unwrap(), true)
}

fn expected_row(program: u32) -> Row {
    (program, 3, "tcp".into(), "127.0.0.1.242.97".into())
}

/// An address for datagrams that nobody receives at: bound for a moment, then given up, in a network without other programs.
fn closed_port() -> SocketAddr {
    UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}

#[test]
fn registers_and_takes_back_over_each_transport() {
    let dir = Folder::new();
    let fake = FakeRpcbind::default();
    for endpoint in [fake.on_unix(&dir), fake.on_udp(), fake.on_tcp()] {
        let registration = Registration::new(std::slice::from_ref(&endpoint), two_entries()).unwrap();
        assert_eq!(registration.endpoint(), &endpoint);
        assert_eq!(fake.rows(), [expected_row(100_003), expected_row(100_005)], "{endpoint}");
        drop(registration);
        assert_eq!(fake.rows(), [], "{endpoint}");

        let registration = Registration::new(std::slice::from_ref(&endpoint), two_entries()).unwrap();
        registration.remove().unwrap();
        assert_eq!(fake.rows(), [], "{endpoint}");
    }
}

#[test]
fn tries_one_endpoint_after_the_other() {
    own_network();
    let dir = Folder::new();
    let fake = FakeRpcbind::default();
    let nobody = RpcbindEndpoint::Unix(dir.path("nobody.sock"));
    let closed_udp = RpcbindEndpoint::Udp(closed_port());
    let tcp = fake.on_tcp();
    let client = RpcbindClient::connect(&[nobody.clone(), closed_udp.clone(), tcp.clone()]).unwrap();
    assert_eq!(client.endpoint(), &tcp);

    let error = RpcbindClient::connect(&[nobody, closed_udp]).unwrap_err();
    assert!(matches!(error, RpcbindError::Unreachable { .. }), "{error}");
    let text = error.to_string();
    for part in ["nobody.sock: No such file", "udp 127.0.0.1:", "refused", "systemctl start rpcbind"] {
        assert!(text.contains(part), "{part:?} is not in {text:?}");
    }
}

#[test]
fn an_entry_left_behind_at_our_address_is_replaced() {
    let fake = FakeRpcbind::default();
    fake.rows.lock().unwrap().push(expected_row(100_005));
    let endpoint = fake.on_tcp();
    let registration = Registration::new(&[endpoint], two_entries()).unwrap();
    assert_eq!(fake.rows(), [expected_row(100_003), expected_row(100_005)]);
    drop(registration);
    assert_eq!(fake.rows(), []);
}

#[test]
fn an_entry_of_somebody_else_is_an_error_and_stays() {
    let fake = FakeRpcbind::default();
    let other: Row = (100_005, 3, "tcp".into(), "0.0.0.0.8.1".into());
    let others =
        [(100_003, 4, "tcp".into(), "0.0.0.0.8.1".into()), (100_003, 3, "udp".into(), "0.0.0.0.8.1".into()), other];
    fake.rows.lock().unwrap().extend(others.clone());
    let error = Registration::new(&[fake.on_tcp()], two_entries()).unwrap_err();
    let RpcbindError::Taken { entry, address } = &error else {
        panic!("{error}");
    };
    assert_eq!((entry.program, address.as_str()), (100_005, "0.0.0.0.8.1"));
    assert!(error.to_string().contains("rpcinfo -d 100005 3"), "{error}");
    assert_eq!(fake.rows(), others, "what was registered before the error is taken back");
}

#[test]
fn taking_back_leaves_an_entry_that_somebody_replaced() {
    let fake = FakeRpcbind::default();
    let registration = Registration::new(&[fake.on_tcp()], two_entries()).unwrap();
    let replaced: Row = (100_003, 3, "tcp".into(), "10.0.0.1.8.1".into());
    fake.rows.lock().unwrap()[0] = replaced.clone();
    registration.remove().unwrap();
    assert_eq!(fake.rows(), [replaced]);
}

#[test]
fn a_refusal_without_an_entry_is_for_lack_of_permission() {
    let fake = FakeRpcbind { refuses: true, ..FakeRpcbind::default() };
    let error = Registration::new(&[fake.on_tcp()], two_entries()).unwrap_err();
    assert!(matches!(error, RpcbindError::NotPermitted { .. }), "{error}");
    assert!(error.to_string().contains("root"), "{error}");
}

#[test]
fn a_lost_datagram_is_sent_again() {
    // A repeated SET says no because of the first one, a repeated UNSET too.
    for procedure in [PROC_NULL, PROC_SET, PROC_UNSET, PROC_DUMP] {
        let fake = FakeRpcbind { loses_reply_to: Some(procedure), ..FakeRpcbind::default() };
        let registration = Registration::new(&[fake.on_udp()], two_entries()).unwrap();
        assert_eq!(fake.rows().len(), 2, "procedure {procedure}");
        registration.remove().unwrap();
        assert_eq!(fake.rows(), [], "procedure {procedure}");
    }
}

#[test]
fn a_reply_to_an_earlier_call_is_passed_by() {
    let fake = FakeRpcbind { repeats_replies: true, ..FakeRpcbind::default() };
    let registration = Registration::new(&[fake.on_udp()], two_entries()).unwrap();
    assert_eq!(fake.rows(), [expected_row(100_003), expected_row(100_005)]);
    registration.remove().unwrap();
    assert_eq!(fake.rows(), []);
}

#[test]
fn replies_that_are_none_are_errors() {
    let status = ReplyStatus::Accepted(Accepted::ProgMismatch { low: 2, high: 2 });
    let fake = FakeRpcbind { answers: Some(status), ..FakeRpcbind::default() };
    let error = RpcbindClient::connect(&[fake.on_tcp()]).unwrap_err();
    assert!(matches!(error, RpcbindError::Refused { status: s, .. } if s == status), "{error}");

    // A server of another protocol on the port.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            // The client may be gone already when it has read what it does not like.
            let _ = stream.unwrap().write_all(b"220 mail.example ESMTP\r\n");
        }
    });
    let error = RpcbindClient::connect(&[RpcbindEndpoint::Tcp(address)]).unwrap_err();
    assert!(error.to_string().contains("a reply of"), "{error}");
}

/// rpcbind's port and socket are those of the machine: it gets a network and a /run of its own.
#[test]
fn debians_rpcbind_takes_and_forgets_the_entries() {
    let Some(()) = own_run_or_skip("a rpcbind of its own") else { return };
    let Some(rpcbind) = program_or_skip("rpcbind") else { return };
    // -f: in the foreground. Without -w nothing is read from disk.
    let _rpcbind = Running::start(Command::new(rpcbind).arg("-f"));
    wait_until("rpcbind answers", || RpcbindClient::connect(&RpcbindEndpoint::local_defaults()).is_ok());

    for endpoint in RpcbindEndpoint::local_defaults() {
        // Also over IPv6, and one entry that a killed server left behind.
        let mut all = two_entries();
        let mut table = ProgramTable::new();
        table.register(Program::NFS_V3).unwrap();
        all.extend(entries(&table, "[::1]:62049".parse().unwrap(), true));
        all.extend(entries(&table, "0.0.0.0:62049".parse().unwrap(), false));
        let mut client = RpcbindClient::connect(std::slice::from_ref(&endpoint)).unwrap();
        assert!(client.set(&all[1]).unwrap(), "{endpoint}");
        drop(client);

        let registration = Registration::new(std::slice::from_ref(&endpoint), all).unwrap();
        let listed = rpcinfo();
        for line in [
            "100003 3 tcp 127.0.0.1.242.97",
            "100005 3 tcp 127.0.0.1.242.97",
            "100003 3 tcp6 ::1.242.97",
            "100003 3 udp 0.0.0.0.242.97",
        ] {
            assert!(listed.iter().any(|l| l.starts_with(line)), "{endpoint}: {line} not in {listed:#?}");
        }
        registration.remove().unwrap();
        let listed = rpcinfo();
        assert!(!listed.iter().any(|l| l.contains("242.97")), "{endpoint}: {listed:#?}");
    }
}

/// What rpcinfo lists: program, version, netid, address, one space between them.
fn rpcinfo() -> Vec<String> {
    let text = run(&mut Command::new("/usr/sbin/rpcinfo"));
    text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect()
}
