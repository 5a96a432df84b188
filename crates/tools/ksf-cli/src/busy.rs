//! Who holds a busy address: looked up in /proc, as ss(8) does.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use ksf::listener::ListenAddr;

/// A process that holds an address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Holder {
    pub(crate) pid: u32,
    pub(crate) name: String,
}

/// Says who holds a TCP or UDP address: `held by nginx (pid 12)`, or that it cannot be told.
pub(crate) fn describe_inet(address: SocketAddr, udp: bool) -> String {
    describe(&of_inet(address, udp))
}

/// Says who listens on a Unix-domain socket.
pub(crate) fn describe_unix(path: &Path) -> String {
    describe(&of_unix(path))
}

/// True if a process holds the address, or may hold it: only root sees the descriptors of other users. False for sockets that the
/// kernel has not released yet after the end of their process.
pub(crate) fn is_held(address: &ListenAddr) -> bool {
    let sockets = match address {
        ListenAddr::Tcp(at) => of_inet(*at, false),
        ListenAddr::Udp(at) => of_inet(*at, true),
        ListenAddr::Unix(path) => of_unix(path),
        _ => return true,
    };
    let own = rustix::process::geteuid();
    let is_hidden = |uid: u32| !own.is_root() && uid != own.as_raw();
    sockets.iter().any(|(inode, uid)| is_hidden(*uid) || holder_of(*inode).is_some())
}

/// Inode and owner of the sockets that hold an address.
fn of_inet(address: SocketAddr, udp: bool) -> Vec<(u64, u32)> {
    let tables = if udp { ["udp", "udp6"] } else { ["tcp", "tcp6"] };
    tables
        .iter()
        .filter_map(|table| fs::read_to_string(format!("/proc/thread-self/net/{table}")).ok())
        .flat_map(|text| inet_holders(&text, address, udp))
        .collect()
}

/// Inodes of the sockets with this path, and the owner of the path: the table does not have those of the sockets. `u32::MAX`: not
/// known.
fn of_unix(path: &Path) -> Vec<(u64, u32)> {
    let text = fs::read_to_string("/proc/thread-self/net/unix").unwrap_or_default();
    let owner = fs::symlink_metadata(path).map_or(u32::MAX, |metadata| metadata.uid());
    text.lines()
        .filter(|line| line.split_whitespace().nth(7).is_some_and(|at| Path::new(at) == path))
        .filter_map(|line| Some((line.split_whitespace().nth(6)?.parse().ok()?, owner)))
        .collect()
}

fn describe(inodes: &[(u64, u32)]) -> String {
    for (inode, _) in inodes {
        if let Some(holder) = holder_of(*inode) {
            return format!("held by {} (pid {})", holder.name, holder.pid);
        }
    }
    match inodes.first() {
        // /proc/PID/fd is readable for the owner and root only.
        Some((_, uid)) if *uid != u32::MAX => {
            format!("held by a process of uid {uid} (run as root to see which)")
        }
        Some(_) => "held by a process that cannot be looked up".to_owned(),
        None => "held by a process in another namespace, or gone by now".to_owned(),
    }
}

/// Inode and owner of every socket of a table of /proc/PID/net that stands in the way of `address`.
fn inet_holders(table: &str, address: SocketAddr, udp: bool) -> Vec<(u64, u32)> {
    const TCP_LISTEN: &str = "0A";
    table
        .lines()
        .skip(1)
        .filter_map(|line| {
            let mut fields = line.split_whitespace();
            let local = fields.nth(1)?;
            let state = fields.nth(1)?;
            let uid = fields.nth(3)?.parse().ok()?;
            let inode = fields.nth(1)?.parse().ok()?;
            let (ip, port) = local.split_once(':')?;
            let port = u16::from_str_radix(port, 16).ok()?;
            let same = port == address.port() && collides(parse_ip(ip)?, address.ip());
            (same && (udp || state == TCP_LISTEN)).then_some((inode, uid))
        })
        .collect()
}

/// Two addresses collide if they are equal or one is the wildcard. The wildcard of IPv6 holds
/// IPv4 too, unless its socket is limited to IPv6, which the table does not tell.
fn collides(held: IpAddr, wanted: IpAddr) -> bool {
    held.to_canonical() == wanted.to_canonical()
        || held.is_unspecified()
        || (wanted.is_unspecified() && held.is_ipv4() == wanted.is_ipv4())
}

/// The kernel prints each 32-bit word of an address as a number in the machine's byte order.
fn parse_ip(hex: &str) -> Option<IpAddr> {
    let word = |at: usize| -> Option<[u8; 4]> {
        u32::from_str_radix(hex.get(at * 8..at * 8 + 8)?, 16).ok().map(u32::to_ne_bytes)
    };
    match hex.len() {
        8 => Some(Ipv4Addr::from(word(0)?).into()),
        32 => {
            let mut bytes = [0; 16];
            for at in 0..4 {
                bytes[at * 4..at * 4 + 4].copy_from_slice(&word(at)?);
            }
            Some(Ipv6Addr::from(bytes).into())
        }
        _ => None,
    }
}

fn holder_of(inode: u64) -> Option<Holder> {
    let wanted = format!("socket:[{inode}]");
    fs::read_dir("/proc").ok()?.flatten().find_map(|entry| {
        let pid: u32 = entry.file_name().to_str()?.parse().ok()?;
        let holds = fs::read_dir(entry.path().join("fd"))
            .ok()?
            .flatten()
            .any(|fd| fs::read_link(fd.path()).is_ok_and(|link| link == Path::new(&wanted)));
        holds.then(|| Holder {
            pid,
            name: fs::read_to_string(entry.path().join("comm"))
                .map_or_else(|_| "?".to_owned(), |name| name.trim().to_owned()),
        })
    })
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use ksf_test::own_network;
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
    use std::io::IoSlice;
    use std::mem::MaybeUninit;
    use std::net::{TcpListener, UdpSocket};
    use std::os::fd::{AsFd, OwnedFd};
    use std::os::unix::net::UnixStream;

    #[test]
    fn this_process_is_found_on_its_own_ports() {
        own_network();
        let me = format!("(pid {})", std::process::id());
        let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
        assert!(describe_inet(tcp.local_addr().unwrap(), false).contains(&me));
        let udp = UdpSocket::bind("127.0.0.1:0").unwrap();
        assert!(describe_inet(udp.local_addr().unwrap(), true).contains(&me));
        let wildcard = TcpListener::bind("0.0.0.0:0").unwrap();
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, wildcard.local_addr().unwrap().port()));
        assert!(describe_inet(address, false).contains(&me));
    }

    /// Leaves a listener as a killed server may: the kernel alone has the socket, here on its way between two processes. Dropping the
    /// streams releases it.
    pub(crate) fn leave_behind(listener: OwnedFd) -> [UnixStream; 2] {
        let (to, from) = UnixStream::pair().unwrap();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fds = [listener.as_fd()];
        assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
        sendmsg(&to, &[IoSlice::new(b"x")], &mut control, SendFlags::empty()).unwrap();
        [to, from]
    }

    #[test]
    fn socket_that_no_process_has_is_not_held() {
        own_network();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = ListenAddr::Tcp(listener.local_addr().unwrap());
        assert!(is_held(&address));
        let streams = leave_behind(listener.into());
        assert!(!is_held(&address));
        drop(streams);
    }

    #[test]
    fn what_cannot_be_told_is_said() {
        assert!(describe(&[]).contains("another namespace"));
        assert!(describe(&[(u64::MAX, 1000)]).contains("uid 1000"));
    }

    #[test]
    fn addresses_collide_as_the_kernel_says() {
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        assert!(collides(ip("127.0.0.1"), ip("127.0.0.1")));
        assert!(collides(ip("0.0.0.0"), ip("127.0.0.1")));
        assert!(collides(ip("::"), ip("127.0.0.1")));
        assert!(collides(ip("127.0.0.1"), ip("0.0.0.0")));
        assert!(!collides(ip("127.0.0.2"), ip("127.0.0.1")));
        assert!(!collides(ip("::1"), ip("0.0.0.0")));
    }
}
