//! Memory and threads for clients of file servers that have mounted and do nothing.

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

/// Names of the program's threads. Those that the kernel starts for io_uring end by themselves.
fn threads(server: &Server) -> Vec<String> {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", server.pid())).unwrap();
    let name = |task: std::io::Result<std::fs::DirEntry>| std::fs::read_to_string(task.unwrap().path().join("comm"));
    let mut names: Vec<String> = tasks.filter_map(|task| name(task).ok()).collect();
    names.retain(|name| !name.starts_with("iou-"));
    names.sort();
    names
}

/// The sum of docs/nfs.md and docs/9p.md for the default of `--lanes` and one export.
fn assert_threads_of_files(server: &Server, looking_up: usize) {
    let names = threads(server);
    let of_files = names.iter().filter(|name| name.starts_with("ksf-fs-")).count();
    let (lanes, syncs, keepers, clock, closing, unlocking) = (16, 16, 2, 1, 1, 1);
    assert_eq!(of_files, lanes + syncs + keepers + clock + closing + unlocking + looking_up, "{names:?}");
}

/// What the server takes for one more client that sends `requests` one after the other, `answered` says how each is answered, and stays.
/// It takes no thread for it.
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
    let (before, threads_before) = (resident_bytes(server), threads(server));
    let clients: Vec<TcpStream> = (0..CLIENTS).map(join).collect();
    let bytes = resident_bytes(server).saturating_sub(before);
    assert_eq!(threads(server), threads_before, "threads for {CLIENTS} clients");
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
        assert_threads_of_files(&server, 0);
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
        assert_threads_of_files(&server, 1);
        assert!(bytes <= 16 << 10, "{engine}: {bytes} bytes");
        server.stop();
    }
}
