//! Memory of clients of file servers that have mounted and do nothing.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};

use ksf_proto::p9::{NO_FID, NO_TAG, NO_UID, Request, VERSION};
use ksf_test::rpc;
use ksf_test::stream::connect;

use crate::support::export::{Calls, Place, opaque};
use crate::support::{Server, engines};

const CLIENTS: usize = 1000;

fn resident_bytes(server: &Server) -> usize {
    let pages = std::fs::read_to_string(format!("/proc/{}/statm", server.pid())).unwrap();
    pages.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * rustix::param::page_size()
}

/// What the server takes for one more client that sends `requests` one after the other, `answered` says how each is answered, and stays.
fn bytes_of_a_client(server: &Server, requests: &[Vec<u8>], answered: fn(&mut TcpStream, &[u8])) -> usize {
    let address: SocketAddr = server.address(" tcp ");
    let join = |_| {
        let mut client = connect(address);
        for request in requests {
            client.write_all(request).unwrap();
            answered(&mut client, request);
        }
        client
    };
    // What the first ones make the server take, it has.
    let first: Vec<TcpStream> = (0..CLIENTS / 4).map(join).collect();
    let before = resident_bytes(server);
    let clients: Vec<TcpStream> = (0..CLIENTS).map(join).collect();
    let bytes = resident_bytes(server).saturating_sub(before);
    drop((first, clients));
    bytes / CLIENTS
}

#[test]
fn idle_mounts_of_nfs_take_at_most_64_kib() {
    for engine in engines() {
        let place = Place::new();
        let server = place.start(engine, "", &[]);
        let folder = Calls(server.address(" tcp ")).mount(place.export().to_str().unwrap());
        // FSINFO and GETATTR, as a client sends them when it mounts.
        let requests = [19, 1].map(|procedure| {
            let mut call = rpc::call(1, 100_003, 3, procedure);
            call.extend(opaque(&folder));
            rpc::record(&call)
        });
        let bytes = bytes_of_a_client(&server, &requests, |client, _| {
            let mut mark = [0; 4];
            client.read_exact(&mut mark).unwrap();
            let mut reply = vec![0; u32::from_be_bytes(mark) as usize & 0x7fff_ffff];
            client.read_exact(&mut reply).unwrap();
            // Behind xid, REPLY, accepted, verifier and success: NFS3_OK.
            assert_eq!(reply[24..28], [0; 4]);
        });
        assert!(bytes <= 64 << 10, "{engine}: {bytes} bytes");
        server.stop();
    }
}

#[test]
fn idle_clients_of_9p_take_at_most_16_kib() {
    for engine in engines() {
        let place = Place::new();
        let server = place.start_kind("9p", 0, engine, "", &[]);
        let requests = [
            (NO_TAG, Request::Version { msize: 1 << 20, version: VERSION }),
            (1, Request::Attach { fid: 0, afid: NO_FID, uname: b"", aname: b"", n_uname: NO_UID }),
        ];
        let requests = requests.map(|(tag, request)| {
            let mut message = Vec::new();
            request.put(tag, &mut message).unwrap();
            message
        });
        let bytes = bytes_of_a_client(&server, &requests, |client, request| {
            let mut size = [0; 4];
            client.read_exact(&mut size).unwrap();
            let mut reply = vec![0; u32::from_le_bytes(size) as usize - 4];
            client.read_exact(&mut reply).unwrap();
            assert_eq!(reply[0], request[4] + 1, "it is refused");
        });
        assert!(bytes <= 16 << 10, "{engine}: {bytes} bytes");
        server.stop();
    }
}
