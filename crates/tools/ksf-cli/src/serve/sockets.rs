//! From wishes to sockets: addresses with their transports, and what the service manager passed.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::thread;
use std::time::Duration;

use ksf::Error;
use ksf::engine::EngineKind;
use ksf::listener::{self, ListenAddr};

use super::address::Listen;
use super::explain::explain;
use super::listen::ListenEntry;
use crate::busy;
use crate::manager::Passed;
use crate::output::{Failure, Status};

/// Where a service listens, each with the entry that asked for it.
#[derive(Debug, Default)]
pub(crate) struct Sockets {
    pub(crate) addresses: Vec<(ListenAddr, ListenEntry)>,
    pub(crate) passed: Vec<(Passed, ListenEntry)>,
}

/// Where a service is to listen.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wish<'a> {
    /// The addresses as given.
    pub(crate) listen: &'a [ListenEntry],
    /// The port on loopback where nothing is said; `None`: then there are none.
    pub(crate) port: Option<u16>,
    /// Whether datagrams are answered there, too.
    pub(crate) has_datagrams: bool,
}

/// Resolves addresses and takes the passed sockets that belong here: those called `name`, or all where there is
/// only one service. A wish for passed sockets that are not there is an error: the service would listen nowhere.
///
/// Where nothing is said it is loopback with `port`, and nothing without a port.
pub(crate) fn resolve(wish: Wish<'_>, name: Option<&str>, passed: &mut Vec<Passed>) -> Result<Sockets, Failure> {
    let mut sockets = Sockets::default();
    if wish.listen.is_empty() {
        take_passed(&mut sockets, passed, name, &Listen::Systemd(None).into());
        if let Some(port) = wish.port.filter(|_| sockets.passed.is_empty()) {
            for listen in Listen::default_for(port).into_iter().filter(is_on_this_machine) {
                sockets.add(listen.into(), wish.has_datagrams)?;
            }
        }
    }
    for entry in wish.listen {
        if let Listen::Systemd(wanted) = &entry.address {
            let before = sockets.passed.len();
            take_passed(&mut sockets, passed, wanted.as_deref().or(name), entry);
            if sockets.passed.len() == before {
                return Err(nothing_passed(wanted.as_deref().or(name)));
            }
        }
        sockets.add(entry.clone(), wish.has_datagrams)?;
    }
    for (socket, _) in &sockets.passed {
        check_passed(socket)?;
    }
    Ok(sockets)
}

/// Checks of an address that is busy and that no process holds. `listener::check` tries for 0.2 s itself, so they take eight seconds.
/// The kernel closes the ring of a killed server from a work queue, which takes longer on a busy machine.
const CHECKS_MAX: u32 = 20;
const CHECK_PAUSE: Duration = Duration::from_millis(200);

impl Sockets {
    /// Fails if an address is in use or cannot be bound: before a service that starts makes anything.
    pub(crate) fn check(&self) -> Result<(), Failure> {
        self.addresses.iter().try_for_each(|(address, _)| {
            let pause = || thread::sleep(CHECK_PAUSE);
            let checked = check_until_released(|| listener::check(address), || busy::is_held(address), pause);
            // The engine matters for errors of engines alone.
            checked.map_err(|error| explain(error, EngineKind::Epoll))
        })
    }

    /// Notes on [::] listeners without an IPv4 one at their port: sockets are IPv6 only, whatever net.ipv6.bindv6only says.
    pub(crate) fn notes(&self) -> Vec<String> {
        let wildcards = |of_ipv4: bool| {
            let address = move |(address, _): &(ListenAddr, ListenEntry)| match address {
                ListenAddr::Tcp(at) | ListenAddr::Udp(at) => (at.is_ipv4() == of_ipv4).then_some(*at),
                _ => None,
            };
            self.addresses.iter().filter_map(address).filter(|at| at.ip().is_unspecified())
        };
        let mut ports: Vec<u16> = wildcards(false).map(|at| at.port()).collect();
        ports.dedup();
        ports.retain(|port| wildcards(true).all(|at| at.port() != *port));
        let note = |port: u16| {
            let ipv4 = SocketAddr::from((Ipv4Addr::UNSPECIFIED, port));
            format!("[::]:{port} is for IPv6 only; to serve IPv4, listen on {ipv4}, too")
        };
        ports.into_iter().map(note).collect()
    }

    fn add(&mut self, entry: ListenEntry, has_datagrams: bool) -> Result<(), Failure> {
        let addresses = addresses(&entry.address, has_datagrams)?;
        self.addresses.extend(addresses.into_iter().map(|address| (address, entry.clone())));
        Ok(())
    }
}

/// Checks an address, again while it is busy and no process holds it.
fn check_until_released(
    mut check: impl FnMut() -> Result<(), Error>,
    is_held: impl Fn() -> bool,
    pause: impl Fn(),
) -> Result<(), Error> {
    for _ in 1..CHECKS_MAX {
        match check() {
            Err(Error::AddrInUse { .. }) if !is_held() => pause(),
            result => return result,
        }
    }
    check()
}

/// An address with a transport for each transport that is wished for.
fn addresses(listen: &Listen, has_datagrams: bool) -> Result<Vec<ListenAddr>, Failure> {
    Ok(match listen {
        Listen::Any(address) if has_datagrams => vec![ListenAddr::Tcp(*address), ListenAddr::Udp(*address)],
        Listen::Any(address) | Listen::Tcp(address) => vec![ListenAddr::Tcp(*address)],
        Listen::Udp(address) if has_datagrams => vec![ListenAddr::Udp(*address)],
        Listen::Udp(address) => {
            let what = format!("a service of streams does not answer on udp:{address}");
            return Err(Failure::new(Status::Data, what).remedy("it needs TCP or a Unix socket"));
        }
        Listen::Unix(path) => vec![ListenAddr::Unix(path.clone())],
        Listen::Systemd(_) => Vec::new(),
    })
}

/// Whether a default address can be had at all: [::1] does not exist where IPv6 is off, and nobody asked for it.
fn is_on_this_machine(listen: &Listen) -> bool {
    match listen {
        Listen::Any(SocketAddr::V6(_)) => TcpListener::bind((Ipv6Addr::LOCALHOST, 0)).is_ok(),
        _ => true,
    }
}

fn take_passed(sockets: &mut Sockets, passed: &mut Vec<Passed>, name: Option<&str>, entry: &ListenEntry) {
    let wanted = |socket: &mut Passed| name.is_none_or(|name| socket.name == name);
    sockets.passed.extend(passed.extract_if(.., wanted).map(|socket| (socket, entry.clone())));
}

fn nothing_passed(name: Option<&str>) -> Failure {
    let what = match name {
        Some(name) => format!("the service manager passed no socket named \"{name}\""),
        None => "the service manager passed no socket".to_owned(),
    };
    Failure::new(Status::Unavailable, what)
        .remedy("start the server by its socket unit (FileDescriptorName= gives the name), or remove the wish")
}

/// Refuses a passed socket that is left: somebody expects answers there.
pub(crate) fn all_taken(passed: &[Passed]) -> Result<(), Failure> {
    let Some(socket) = passed.first() else { return Ok(()) };
    let what = format!("the service manager passed a socket named \"{}\" that no service takes", socket.name);
    Err(Failure::new(Status::Config, what)
        .remedy("add --listen systemd, or give the socket the name of a service by FileDescriptorName="))
}

fn check_passed(passed: &Passed) -> Result<(), Failure> {
    let socket = socket2::SockRef::from(&passed.socket);
    let fit = match socket.r#type() {
        Ok(socket2::Type::STREAM) => socket.is_listener().unwrap_or(false),
        Ok(socket2::Type::DGRAM) => socket.domain().is_ok_and(|domain| domain != socket2::Domain::UNIX),
        _ => false,
    };
    if !fit {
        let what = format!("the passed socket \"{}\" is neither a listening stream nor a UDP socket", passed.name);
        return Err(Failure::new(Status::Config, what).remedy("use ListenStream= or ListenDatagram= and Accept=no"));
    }
    // The engines expect a call on a listener to return when there is nothing.
    socket.set_nonblocking(true).map_err(|error| Failure::os("cannot use the passed socket", &error))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ksf_services::echo::Echo;
    use ksf_test::{Folder, Helper, is_helper, own_network, run};
    use std::cell::Cell;
    use std::os::fd::OwnedFd;
    use std::os::unix::fs::chown;
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::os::unix::process::CommandExt as _;
    use std::sync::Arc;

    #[test]
    fn address_of_a_killed_server_is_awaited_and_one_in_use_is_not() {
        own_network();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = ListenAddr::Tcp(listener.local_addr().unwrap());
        awaits_release(&address, listener.into());

        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = ListenAddr::Tcp(listener.local_addr().unwrap());
        let waits = || panic!("it waits for a server that runs");
        let checked = check_until_released(|| listener::check(&address), || busy::is_held(&address), waits);
        assert!(matches!(checked, Err(Error::AddrInUse { .. })), "{checked:?}");
    }

    /// Checks an address whose listener the kernel alone has, and releases at the first pause.
    fn awaits_release(address: &ListenAddr, listener: OwnedFd) {
        let streams = Cell::new(Some(busy::tests::leave_behind(listener)));
        let release = || drop(streams.take());
        check_until_released(|| listener::check(address), || busy::is_held(address), release).unwrap();
        assert!(streams.take().is_none(), "it was not busy");
    }

    /// Only root sees the processes of others. A user knows a socket by the owner of its path.
    #[test]
    fn path_of_a_killed_server_is_awaited_and_replaced_by_any_user() {
        let folder = Folder::new();
        // Only the owner may look where this program lies.
        let copy = folder.path("program");
        std::fs::copy(std::env::current_exe().unwrap(), &copy).unwrap();
        let mut command = Helper::command_of(&copy, "serve::sockets::tests::helper_replaces_a_path");
        command.env("TMPDIR", folder.path("")).current_dir("/");
        if rustix::process::geteuid().is_root() {
            chown(folder.path(""), Some(65_534), Some(65_534)).unwrap();
            command.uid(65_534).gid(65_534);
        }
        assert!(run(&mut command).contains("1 passed"));
    }

    #[test]
    #[ignore = "a part of the test above"]
    fn helper_replaces_a_path() {
        if !is_helper() {
            return;
        }
        let folder = Folder::new();
        let path = folder.path("socket");
        let address = ListenAddr::Unix(path.clone());
        let listener = UnixListener::bind(&path).unwrap();
        let waits = || panic!("it waits for a server that runs");
        let checked = check_until_released(|| listener::check(&address), || busy::is_held(&address), waits);
        assert!(matches!(checked, Err(Error::AddrInUse { .. })), "{checked:?}");
        awaits_release(&address, listener.into());
        assert!(path.exists(), "the dead server's");
        let builder = ksf::Server::builder().engine(EngineKind::Epoll).listen(address, Arc::new(Echo), None);
        let server = builder.start().unwrap();
        UnixStream::connect(&path).unwrap();
        drop(server);
    }

    #[test]
    fn busy_address_without_a_holder_is_checked_a_bounded_number_of_times() {
        let checks = Cell::new(0);
        let check = || {
            checks.set(checks.get() + 1);
            Err(Error::AddrInUse { addr: "127.0.0.1:7".parse().unwrap() })
        };
        let checked = check_until_released(check, || false, || ());
        assert!(matches!(checked, Err(Error::AddrInUse { .. })), "{checked:?}");
        assert_eq!(checks.get(), CHECKS_MAX);
    }

    fn on(listen: &[ListenEntry]) -> Wish<'_> {
        Wish { listen, port: Some(1), has_datagrams: true }
    }

    fn passed(name: &str) -> Passed {
        let socket = OwnedFd::from(TcpListener::bind("127.0.0.1:0").unwrap());
        Passed { name: name.into(), socket }
    }

    #[test]
    fn an_address_without_transport_means_both() {
        let listen = ["127.0.0.1:5".parse().unwrap(), "udp:127.0.0.1:6".parse().unwrap()];
        let sockets = resolve(on(&listen), None, &mut Vec::new()).unwrap();
        let text: Vec<String> = sockets.addresses.iter().map(|(address, _)| address.to_string()).collect();
        assert_eq!(text, ["tcp 127.0.0.1:5", "udp 127.0.0.1:5", "udp 127.0.0.1:6"]);
    }

    #[test]
    fn wildcard_of_ipv6_without_one_of_ipv4_is_noted() {
        for (listen, notes) in
            [(&["[::]:5", "127.0.0.1:5", "0.0.0.0:6"][..], 1), (&["tcp:[::]:5", "0.0.0.0:5"], 0), (&["[::1]:5"], 0)]
        {
            let listen: Vec<ListenEntry> = listen.iter().map(|text| text.parse().unwrap()).collect();
            let found = resolve(on(&listen), None, &mut Vec::new()).unwrap().notes();
            assert_eq!(found.len(), notes, "{found:?}");
            assert!(found.iter().all(|note| note.contains("listen on 0.0.0.0:5")), "{found:?}");
        }
    }

    #[test]
    fn passed_sockets_replace_the_default_but_not_a_wish() {
        let mut all = vec![passed("a"), passed("b")];
        let taken = resolve(on(&[]), Some("b"), &mut all).unwrap();
        assert_eq!((taken.addresses.len(), taken.passed.len(), all.len()), (0, 1, 1));
        let taken = resolve(on(&["127.0.0.1:5".parse().unwrap()]), None, &mut all).unwrap();
        assert_eq!((taken.addresses.len(), taken.passed.len()), (2, 0));
        let none = resolve(Wish { port: None, ..on(&[]) }, Some("c"), &mut all).unwrap();
        assert!(none.addresses.is_empty() && none.passed.is_empty());
        assert_eq!(all_taken(&all).unwrap_err().status, Status::Config);
    }

    #[test]
    fn a_wish_for_sockets_that_were_not_passed_is_an_error() {
        for wish in ["systemd", "systemd:x"] {
            let failure = resolve(on(&[wish.parse().unwrap()]), None, &mut Vec::new()).unwrap_err();
            assert_eq!(failure.status, Status::Unavailable);
        }
    }

    #[test]
    fn a_connected_socket_is_not_taken() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let passed = Passed { name: "x".into(), socket: stream.into() };
        assert_eq!(check_passed(&passed).unwrap_err().status, Status::Config);
    }

    #[test]
    fn a_service_of_streams_takes_no_datagrams() {
        let of_streams =
            |listen: &[ListenEntry]| resolve(Wish { has_datagrams: false, ..on(listen) }, None, &mut Vec::new());
        let sockets = of_streams(&["127.0.0.1:1".parse().unwrap(), "unix:/x".parse().unwrap()]).unwrap();
        let text: Vec<String> = sockets.addresses.iter().map(|(address, _)| address.to_string()).collect();
        assert_eq!(text, ["tcp 127.0.0.1:1", "unix /x"]);
        let failure = of_streams(&["udp:127.0.0.1:1".parse().unwrap()]).unwrap_err();
        assert_eq!(failure.status, Status::Data);
    }
}
