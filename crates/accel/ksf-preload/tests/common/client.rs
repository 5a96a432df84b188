//! Clients: each connection is told from the others, and every one must be answered.

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::thread::JoinHandle;

use ksf_test::PATIENCE;

/// A connection to an actor, which is named by its first byte.
pub(crate) struct Client(pub(crate) TcpStream);

impl Client {
    pub(crate) fn connect(port: u16, name: char) -> Client {
        Client::connect_to(SocketAddr::new(Ipv4Addr::LOCALHOST.into(), port), name)
    }

    pub(crate) fn connect6(port: u16, name: char) -> Client {
        Client::connect_to(SocketAddr::new(Ipv6Addr::LOCALHOST.into(), port), name)
    }

    pub(crate) fn connect_to(address: SocketAddr, name: char) -> Client {
        let mut stream = TcpStream::connect_timeout(&address, PATIENCE).expect("connected");
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.write_all(&[name as u8]).unwrap();
        Client(stream)
    }

    pub(crate) fn port(&self) -> u16 {
        self.0.local_addr().unwrap().port()
    }

    /// True if the server has closed it after it was accepted and read; false: it was reset.
    pub(crate) fn was_served(mut self) -> bool {
        matches!(self.0.read(&mut [0]), Ok(0))
    }

    /// True if it was reset.
    pub(crate) fn was_reset(mut self) -> bool {
        self.0.read(&mut [0]).is_err_and(|error| error.kind() == std::io::ErrorKind::ConnectionReset)
    }
}

/// True if nobody listens there.
pub(crate) fn refused(port: u16) -> bool {
    let address = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), port);
    TcpStream::connect_timeout(&address, PATIENCE).is_err_and(|error| error.raw_os_error() == Some(libc::ECONNREFUSED))
}

/// One connection: says `question`, and what is answered until the server closes.
pub(crate) fn ask(address: SocketAddr, question: &[u8]) -> Result<String, String> {
    let mut stream = TcpStream::connect_timeout(&address, PATIENCE).map_err(|error| format!("connect: {error}"))?;
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.write_all(question).map_err(|error| format!("write: {error}"))?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).map_err(|error| format!("read: {error}"))?;
    match answer.is_empty() {
        true => Err("closed without an answer".into()),
        false => Ok(String::from_utf8_lossy(&answer).into_owned()),
    }
}

/// Asks so often, one after the other; every connection must be answered.
pub(crate) fn ask_each(ip: impl Into<IpAddr>, port: u16, question: &str, count: usize) -> Vec<String> {
    let address = SocketAddr::new(ip.into(), port);
    (0..count)
        .map(|number| {
            ask(address, question.as_bytes()).unwrap_or_else(|why| panic!("connection {number} of {count}: {why}"))
        })
        .collect()
}

/// Clients that ask without pause until they are told to stop.
pub(crate) struct Load {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<(usize, Vec<String>)>>,
}

impl Load {
    /// In the network namespace of the calling thread.
    pub(crate) fn start(port: u16, question: &str, clients: usize) -> Load {
        let stop = Arc::new(AtomicBool::new(false));
        let address = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), port);
        let threads = (0..clients)
            .map(|_| {
                let (stop, question) = (Arc::clone(&stop), question.to_owned());
                std::thread::spawn(move || {
                    let (mut answered, mut lost) = (0, Vec::new());
                    while !stop.load(Acquire) {
                        match ask(address, question.as_bytes()) {
                            Ok(_) => answered += 1,
                            Err(why) => lost.push(why),
                        }
                    }
                    (answered, lost)
                })
            })
            .collect();
        Load { stop, threads }
    }

    /// How many were answered, and what happened to those that were not.
    pub(crate) fn end(self) -> (usize, Vec<String>) {
        self.stop.store(true, Release);
        self.threads.into_iter().fold((0, Vec::new()), |(answered, mut lost), thread| {
            let (more, more_lost) = thread.join().expect("the clients do not panic");
            lost.extend(more_lost);
            (answered + more, lost)
        })
    }
}
