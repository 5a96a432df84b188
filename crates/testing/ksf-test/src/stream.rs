//! Peers that never wait for ever, and servers for what connects.

use std::fmt::Debug;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::thread;
use std::time::Duration;

use rustix::net::sockopt;

use crate::PATIENCE;

/// Connects by TCP. Each send leaves at once; a read or a write that takes longer than [`PATIENCE`] fails.
#[track_caller]
pub fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap_or_else(|error| panic!("{address}: {error}"));
    be_patient(&stream);
    stream
}

/// What [`connect`] does with a new connection.
pub fn be_patient(stream: &TcpStream) {
    stream.set_nodelay(true).expect("a TCP socket");
    stream.set_read_timeout(Some(PATIENCE)).expect("a time limit");
    stream.set_write_timeout(Some(PATIENCE)).expect("a time limit");
}

/// Both ends of a TCP connection through a listener: that of the client first.
#[track_caller]
pub fn pair(listener: &TcpListener) -> (TcpStream, TcpStream) {
    let client = connect(listener.local_addr().expect("a bound socket"));
    let (server, _) = listener.accept().expect("its other end");
    server.set_nodelay(true).expect("a TCP socket");
    (client, server)
}

/// A UDP socket that talks to this address only, and does not wait for ever.
#[track_caller]
pub fn datagrams(to: SocketAddr) -> UdpSocket {
    let any: SocketAddr = if to.is_ipv4() { (Ipv4Addr::LOCALHOST, 0).into() } else { (Ipv6Addr::LOCALHOST, 0).into() };
    let socket = UdpSocket::bind(any).expect("a free port");
    socket.connect(to).expect("an address of this machine");
    socket.set_read_timeout(Some(PATIENCE)).expect("a time limit");
    socket
}

/// Reads so many bytes.
#[track_caller]
pub fn read_exactly(stream: &mut impl Read, count: usize) -> Vec<u8> {
    let mut bytes = vec![0; count];
    stream.read_exact(&mut bytes).unwrap_or_else(|error| panic!("{count} bytes do not come: {error}"));
    bytes
}

/// Asserts that these bytes come next.
#[track_caller]
pub fn expect(stream: &mut impl Read, wanted: &[u8]) {
    let got = read_exactly(stream, wanted.len());
    assert!(got == wanted, "{:?} instead of {:?}", String::from_utf8_lossy(&got), String::from_utf8_lossy(wanted));
}

/// Asserts that `request` is answered by `reply`.
#[track_caller]
pub fn ask(stream: &mut (impl Read + Write), request: &[u8], reply: &[u8]) {
    stream.write_all(request).expect("the other end takes it");
    expect(stream, reply);
}

/// Asserts that the other end closes, now and without a reset.
#[track_caller]
pub fn expect_end(stream: &mut impl Read) {
    let mut rest = Vec::new();
    match stream.read_to_end(&mut rest) {
        Ok(0) => {}
        other => panic!("{other:?} ({rest:?}) instead of the end of the stream"),
    }
}

/// Asserts that the other end resets the connection.
#[track_caller]
pub fn expect_reset(stream: &mut impl Read) {
    let error = stream.read_to_end(&mut Vec::new()).expect_err("a reset, and no orderly end");
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
}

/// Everything until the connection ends, however it ends.
#[track_caller]
pub fn read_rest(mut stream: impl Read) -> Vec<u8> {
    let mut bytes = Vec::new();
    if let Err(error) = stream.read_to_end(&mut bytes) {
        assert_ne!(error.kind(), ErrorKind::WouldBlock, "the connection does not end");
    }
    bytes
}

/// Closes with a reset instead of an end of stream.
pub fn reset(stream: TcpStream) {
    sockopt::set_socket_linger(&stream, Some(Duration::ZERO)).expect("a TCP socket");
}

/// Sends back what comes, as it comes, until the end of the stream.
pub fn echo(mut stream: impl Read + Write) -> io::Result<()> {
    let mut buffer = vec![0; 1 << 16];
    loop {
        match stream.read(&mut buffer)? {
            0 => return Ok(()),
            count => stream.write_all(&buffer[..count])?,
        }
    }
}

/// Gives every connection of a listener to `serve`, in a thread of its own. The threads end with their connections, the
/// listener with the test process. Errors end a connection, which is all a server of a test has to do about them.
pub fn serve<E: Debug>(
    listener: TcpListener,
    serve: impl Fn(TcpStream) -> Result<(), E> + Send + Clone + 'static,
) -> SocketAddr {
    let address = listener.local_addr().expect("a bound socket");
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let serve = serve.clone();
            stream.set_nodelay(true).expect("a TCP socket");
            thread::spawn(move || drop(serve(stream)));
        }
    });
    address
}
