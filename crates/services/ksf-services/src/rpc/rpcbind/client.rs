//! A client of rpcbind, version 4: blocking, with a time limit on every call.

use std::fmt::Write as _;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, UdpSocket};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use ksf_proto::oncrpc::record::{MARK_BYTES, RecordMark, put_record};
use ksf_proto::oncrpc::rpcbind::{
    Binding, PROC_DUMP, PROC_SET, PROC_UNSET, PROGRAM, VERSION_RPCBIND_4, parse_bool, parse_list,
};
use ksf_proto::oncrpc::{Accepted, CallHeader, OpaqueAuth, PROC_NULL, Reply, ReplyStatus};
use socket2::{Domain, Protocol, Socket, Type};

use super::{RpcbindEndpoint, RpcbindEntry};

/// Time a call may take, all attempts together.
const CALL_TIMEOUT: Duration = Duration::from_secs(3);
/// Time after which a datagram is sent again.
const RESEND_AFTER: Duration = Duration::from_millis(800);
/// Longest reply that is read: a list of about a thousand entries.
const REPLY_BYTES_MAX: usize = 65_536;

/// Why rpcbind could not be told.
#[derive(Debug, thiserror::Error)]
pub enum RpcbindError {
    /// Nothing answers anywhere.
    #[error("no rpcbind answers: {tried}; start it (systemctl start rpcbind) or do not register")]
    Unreachable {
        /// Each endpoint, and what went wrong there.
        tried: String,
    },
    /// A call failed on its way.
    #[error("rpcbind at {endpoint} does not answer: {source}")]
    Io {
        /// Where.
        endpoint: RpcbindEndpoint,
        /// What the kernel said.
        source: io::Error,
    },
    /// What came back is no answer to the call.
    #[error("rpcbind at {endpoint} sent a reply that makes no sense: {reason}")]
    BadReply {
        /// Where.
        endpoint: RpcbindEndpoint,
        /// What is wrong with it.
        reason: String,
    },
    /// rpcbind refused the call as such.
    #[error("rpcbind at {endpoint} refused the call: {status:?}")]
    Refused {
        /// Where.
        endpoint: RpcbindEndpoint,
        /// Its answer.
        status: ReplyStatus,
    },
    /// Another server is registered.
    #[error(
        "program {} version {} on {} is registered already, at {address}; stop that server, or \
         remove its entry (rpcinfo -d {} {})",
        .entry.program, .entry.version, .entry.netid, .entry.program, .entry.version
    )]
    Taken {
        /// What was to be registered.
        entry: RpcbindEntry,
        /// Universal address of the other server.
        address: String,
    },
    /// Nobody is registered, but rpcbind does not take the entry.
    #[error(
        "rpcbind does not let this process register program {} version {} on {}; register as root",
        .entry.program, .entry.version, .entry.netid
    )]
    NotPermitted {
        /// What was to be registered.
        entry: RpcbindEntry,
    },
}

/// A connection to rpcbind.
#[derive(Debug)]
pub struct RpcbindClient {
    endpoint: RpcbindEndpoint,
    transport: Transport,
    xid: u32,
}

#[derive(Debug)]
enum Transport {
    Unix(UnixStream),
    Tcp(Socket),
    Udp(UdpSocket),
}

impl RpcbindClient {
    /// Connects to the first endpoint that answers a NULL call.
    pub fn connect(endpoints: &[RpcbindEndpoint]) -> Result<Self, RpcbindError> {
        let mut tried = String::new();
        for endpoint in endpoints {
            match Self::connect_one(endpoint) {
                Ok(client) => return Ok(client),
                Err(RpcbindError::Io { endpoint, source }) => {
                    let comma = if tried.is_empty() { "" } else { ", " };
                    // Writing to a String cannot fail.
                    let _ = write!(tried, "{comma}{endpoint}: {source}");
                }
                Err(error) => return Err(error),
            }
        }
        Err(RpcbindError::Unreachable { tried })
    }

    /// Where it is connected to.
    pub fn endpoint(&self) -> &RpcbindEndpoint {
        &self.endpoint
    }

    /// Registers; false if rpcbind does not want to.
    pub fn set(&mut self, entry: &RpcbindEntry) -> Result<bool, RpcbindError> {
        let address = &entry.address;
        let results = self.call(PROC_SET, |out| {
            binding(entry.program, entry.version, entry.netid, address).put(out);
        })?;
        parse_bool(&results).map_err(|e| self.bad_reply(e))
    }

    /// Takes a registration back; false if there is none, or it is not ours.
    pub fn unset(&mut self, entry: &RpcbindEntry) -> Result<bool, RpcbindError> {
        let results = self.call(PROC_UNSET, |out| {
            binding(entry.program, entry.version, entry.netid, "").put(out);
        })?;
        parse_bool(&results).map_err(|e| self.bad_reply(e))
    }

    /// Where exactly this version is registered, as the universal address that
    /// was given to SET.
    ///
    /// Asked by DUMP, because GETADDR may name the address of another version,
    /// and one that is made up for the caller.
    pub fn address_of(&mut self, program: u32, version: u32, netid: &str) -> Result<Option<String>, RpcbindError> {
        let results = self.call(PROC_DUMP, |_| {})?;
        let list = parse_list(&results).map_err(|e| self.bad_reply(e))?;
        let found = list.into_iter().find(|b| b.program == program && b.version == version && b.netid == netid);
        Ok(found.map(|b| b.address.to_owned()))
    }

    fn connect_one(endpoint: &RpcbindEndpoint) -> Result<Self, RpcbindError> {
        let transport =
            Transport::connect(endpoint).map_err(|source| RpcbindError::Io { endpoint: endpoint.clone(), source })?;
        let mut client = Self {
            endpoint: endpoint.clone(),
            transport,
            // Any start will do; one that differs between processes tells their
            // datagrams apart should a port be used again.
            xid: std::process::id() << 12,
        };
        client.call(PROC_NULL, |_| {})?;
        Ok(client)
    }

    /// Makes one call and returns its results.
    fn call(&mut self, procedure: u32, args: impl FnOnce(&mut Vec<u8>)) -> Result<Vec<u8>, RpcbindError> {
        self.xid = self.xid.wrapping_add(1);
        let mut message = Vec::new();
        let header = CallHeader {
            xid: self.xid,
            program: PROGRAM,
            version: VERSION_RPCBIND_4,
            procedure,
            credential: OpaqueAuth::NONE,
        };
        header.put(&mut message);
        args(&mut message);

        let exchanged = self.transport.exchange(self.xid, &message);
        let answer = exchanged.map_err(|source| RpcbindError::Io { endpoint: self.endpoint.clone(), source })?;
        let reply = Reply::parse(&answer).map_err(|e| self.bad_reply(e))?;
        if reply.xid != self.xid {
            let (got, want) = (reply.xid, self.xid);
            return Err(self.bad_reply(format_args!("its xid is {got:#x}, not {want:#x}")));
        }
        match reply.status {
            ReplyStatus::Accepted(Accepted::Success) => Ok(reply.results.to_vec()),
            status => Err(RpcbindError::Refused { endpoint: self.endpoint.clone(), status }),
        }
    }

    fn bad_reply(&self, reason: impl std::fmt::Display) -> RpcbindError {
        RpcbindError::BadReply { endpoint: self.endpoint.clone(), reason: reason.to_string() }
    }
}

/// The owner is left empty: rpcbind takes it from the socket.
fn binding<'a>(program: u32, version: u32, netid: &'a str, address: &'a str) -> Binding<'a> {
    Binding { program, version, netid, address, owner: "" }
}

impl Transport {
    fn connect(endpoint: &RpcbindEndpoint) -> io::Result<Self> {
        match endpoint {
            RpcbindEndpoint::Unix(path) => UnixStream::connect(path).map(Self::Unix),
            RpcbindEndpoint::Tcp(address) => {
                let socket = reserved_port(*address, Type::STREAM, Protocol::TCP)?;
                socket.connect_timeout(&(*address).into(), CALL_TIMEOUT)?;
                Ok(Self::Tcp(socket))
            }
            RpcbindEndpoint::Udp(address) => {
                let socket = reserved_port(*address, Type::DGRAM, Protocol::UDP)?;
                socket.connect(&(*address).into())?;
                Ok(Self::Udp(socket.into()))
            }
        }
    }

    fn exchange(&mut self, xid: u32, message: &[u8]) -> io::Result<Vec<u8>> {
        let deadline = Instant::now() + CALL_TIMEOUT;
        match self {
            Self::Unix(stream) => exchange_record(stream, message, deadline),
            Self::Tcp(socket) => exchange_record(socket, message, deadline),
            Self::Udp(socket) => exchange_datagram(socket, xid, message, deadline),
        }
    }
}

/// rpcbind believes a caller on loopback only if its port is below 1024. Without
/// the right to have one any port will do: rpcbind may run with `-i`, and asking
/// is free.
fn reserved_port(to: SocketAddr, kind: Type, protocol: Protocol) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(to), kind, Some(protocol))?;
    for port in (600..1024).rev() {
        match socket.bind(&SocketAddr::new(to.ip(), port).into()) {
            Ok(()) => break,
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
            // No right to the port, or no such address here: the kernel chooses.
            Err(_) => break,
        }
    }
    Ok(socket)
}

/// A byte stream whose next read or write can be limited in time.
trait TimedStream: Read + Write {
    fn limit(&self, time: Duration) -> io::Result<()>;
}

impl TimedStream for UnixStream {
    fn limit(&self, time: Duration) -> io::Result<()> {
        self.set_write_timeout(Some(time))?;
        self.set_read_timeout(Some(time))
    }
}

impl TimedStream for Socket {
    fn limit(&self, time: Duration) -> io::Result<()> {
        self.set_write_timeout(Some(time))?;
        self.set_read_timeout(Some(time))
    }
}

fn exchange_record(stream: &mut impl TimedStream, message: &[u8], deadline: Instant) -> io::Result<Vec<u8>> {
    let mut record = Vec::with_capacity(MARK_BYTES + message.len());
    put_record(&mut record, |out| out.extend_from_slice(message));
    stream.limit(time_left(deadline)?)?;
    // A call is shorter than any send buffer: one write takes all of it.
    stream.write_all(&record)?;

    let mut answer = Vec::new();
    loop {
        let mut mark = [0; MARK_BYTES];
        read_exact(stream, &mut mark, deadline)?;
        let mark = RecordMark::from_bytes(mark);
        let start = answer.len();
        let end = start + mark.len as usize;
        if end > REPLY_BYTES_MAX {
            let reason = format!("a reply of {end} bytes or more");
            return Err(io::Error::new(io::ErrorKind::InvalidData, reason));
        }
        answer.resize(end, 0);
        read_exact(stream, &mut answer[start..], deadline)?;
        if mark.last {
            return Ok(answer);
        }
    }
}

/// Fills `buffer`; the deadline holds for all of it, however slowly it arrives.
fn read_exact(stream: &mut impl TimedStream, mut buffer: &mut [u8], deadline: Instant) -> io::Result<()> {
    while !buffer.is_empty() {
        stream.limit(time_left(deadline)?)?;
        match stream.read(buffer) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(len) => buffer = &mut buffer[len..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if is_timeout(&error) => return Err(io::ErrorKind::TimedOut.into()),
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn exchange_datagram(socket: &UdpSocket, xid: u32, message: &[u8], deadline: Instant) -> io::Result<Vec<u8>> {
    let mut buffer = vec![0; REPLY_BYTES_MAX];
    loop {
        let left = time_left(deadline)?;
        socket.send(message)?;
        let resend_at = Instant::now() + RESEND_AFTER.min(left);
        while let Ok(wait) = time_left(resend_at) {
            socket.set_read_timeout(Some(wait))?;
            match socket.recv(&mut buffer) {
                // Late replies to earlier calls, and to copies of this one, pass by.
                Ok(len) if buffer[..len].starts_with(&xid.to_be_bytes()) => {
                    buffer.truncate(len);
                    return Ok(buffer);
                }
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if is_timeout(&error) => break,
                Err(error) => return Err(error),
            }
        }
    }
}

fn time_left(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
}

/// A read that ran into its time limit is EAGAIN on Linux.
fn is_timeout(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut)
}
