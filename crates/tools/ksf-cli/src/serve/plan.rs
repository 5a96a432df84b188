//! From flags or a configuration file to what is to be started.

use std::net::{Ipv6Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};

use ksf::limits::Limits;
use ksf::listener::ListenAddr;
use ksf_services::rpc::{NullProgram, ProgramTable, mount_null, nfs_null};

use crate::args::{ECHO_PORT, EchoArgs, EngineWish, ProgramRange, RPC_PORT, RpcArgs, RunArgs, ServeArgs, ServerArgs};
use crate::manager::Passed;
use crate::output::{Failure, Status};
use crate::serve::address::Listen;
use crate::serve::config::{ClassTable, Config, Kind, ServiceTable};
use crate::serve::limits::{self, LimitFlags};
use crate::serve::resources::Resources;

/// One service to start.
#[derive(Debug)]
pub(crate) struct Plan {
    /// Name in messages and counters.
    pub(crate) name: String,
    pub(crate) what: What,
    pub(crate) sockets: Sockets,
    pub(crate) engine: EngineWish,
    pub(crate) cpus: Option<Vec<usize>>,
    pub(crate) xdp: Xdp,
    pub(crate) window_bytes: Option<u64>,
    /// Workers that share the connections; 0: none.
    pub(crate) workers: usize,
    /// Long messages, and how many of each kind workers may be at.
    pub(crate) classes: Vec<ClassTable>,
    pub(crate) limits: LimitSource,
    pub(crate) resources: Resources,
}

/// What the service does.
#[derive(Debug)]
pub(crate) enum What {
    Echo,
    Rpc { table: ProgramTable, rpcbind: bool },
    Object(PathBuf),
    Work,
    Demo(Demo),
}

/// What the demo server does.
#[derive(Debug)]
pub(crate) struct Demo {
    /// Whom to ask; it answers itself if there is nobody.
    pub(crate) backends: Vec<SocketAddr>,
    pub(crate) keep_alive: bool,
    pub(crate) body_bytes: usize,
}

/// Where the service listens.
#[derive(Debug, Default)]
pub(crate) struct Sockets {
    pub(crate) addresses: Vec<ListenAddr>,
    pub(crate) passed: Vec<Passed>,
}

/// Where UDP is answered by XDP.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Xdp {
    /// Nowhere.
    Off,
    /// On lo, for listeners on loopback: a program on another interface sees all of its packets, so it is put there
    /// only when somebody says so.
    Loopback,
    /// On these interfaces; failing to attach there is an error.
    On(Vec<String>),
}

/// Where a service's limits come from, at the start and on SIGHUP.
#[derive(Debug, Clone)]
pub(crate) enum LimitSource {
    /// `--config-limits` and flags.
    Flags { file: Option<PathBuf>, flags: LimitFlags },
    /// The configuration file of `ksf serve`, and flags.
    Config { path: PathBuf, service: String, flags: LimitFlags },
}

impl LimitSource {
    /// Reads the limits.
    pub(crate) fn read(&self) -> Result<Limits, Failure> {
        match self {
            LimitSource::Flags { file, flags } => limits::resolve(file.as_deref(), flags),
            LimitSource::Config { path, service, flags } => {
                let config = Config::read(path)?;
                match config.services.iter().find(|table| table.name == *service) {
                    Some(table) => config.limits_of(table, flags),
                    None => {
                        let what = format!("{}: the running service \"{service}\" is gone", path.display());
                        Err(Failure::new(Status::Config, what)
                            .remedy("services are added and removed by a restart, not by SIGHUP"))
                    }
                }
            }
        }
    }

    /// The file that is read again on SIGHUP, if there is one.
    pub(crate) fn file(&self) -> Option<&PathBuf> {
        match self {
            LimitSource::Flags { file, .. } => file.as_ref(),
            LimitSource::Config { path, .. } => Some(path),
        }
    }
}

/// The plan of `ksf kecho`.
pub(crate) fn kecho(args: EchoArgs, passed: Vec<Passed>) -> Result<Plan, Failure> {
    single("kecho", What::Echo, args.server, ECHO_PORT, passed)
}

/// The plan of `ksf krpc2`.
pub(crate) fn krpc2(args: RpcArgs, passed: Vec<Passed>) -> Result<Plan, Failure> {
    let table = programs(&args.programs).map_err(|what| Failure::new(Status::Data, what).remedy("see --program"))?;
    let what = What::Rpc { table, rpcbind: args.rpcbind };
    single("krpc2", what, args.server, RPC_PORT, passed)
}

/// The plan of `ksf run`.
pub(crate) fn object(args: RunArgs, passed: Vec<Passed>) -> Result<Plan, Failure> {
    if args.server.listen.is_empty() && passed.is_empty() {
        return Err(Failure::new(Status::Usage, "a program of your own has no usual port")
            .remedy("say where it listens: --listen ADDR:PORT"));
    }
    let name = args.object.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
    let name = name.split('.').next().unwrap_or(&name).to_owned();
    single(&name, What::Object(args.object), args.server, 0, passed)
}

fn single(name: &str, what: What, args: ServerArgs, port: u16, mut passed: Vec<Passed>) -> Result<Plan, Failure> {
    let sockets = sockets(&args.listen, port, None, &mut passed)?;
    all_taken(&passed)?;
    let xdp = match (args.no_xdp, args.xdp.is_empty()) {
        (true, _) => Xdp::Off,
        (false, true) => Xdp::Loopback,
        (false, false) => Xdp::On(args.xdp),
    };
    Ok(Plan {
        name: name.to_owned(),
        what,
        sockets,
        engine: args.engine,
        cpus: args.cpus.map(|list| list.0),
        xdp,
        window_bytes: args.window_bytes,
        workers: args.workers.unwrap_or(0) as usize,
        classes: Vec::new(),
        limits: LimitSource::Flags { file: args.config_limits, flags: args.limits },
        resources: Resources::resolve(&[], &args.resources),
    })
}

/// The plans of `ksf serve`.
pub(crate) fn config(
    config: &Config,
    path: &Path,
    args: &ServeArgs,
    mut passed: Vec<Passed>,
) -> Result<Vec<Plan>, Failure> {
    let services = config.services.iter();
    let plans: Result<Vec<Plan>, Failure> =
        services.map(|table| service(config, table, path, args, &mut passed)).collect();
    all_taken(&passed)?;
    plans
}

fn service(
    config: &Config,
    entry: &ServiceTable,
    path: &Path,
    args: &ServeArgs,
    passed: &mut Vec<Passed>,
) -> Result<Plan, Failure> {
    let (port, what) = match entry.kind {
        Kind::Echo => (ECHO_PORT, What::Echo),
        Kind::Rpc => {
            let table = programs(&entry.programs).map_err(|what| {
                Failure::new(Status::Config, format!("service \"{}\": {what}", entry.name)).remedy("correct programs")
            })?;
            (RPC_PORT, What::Rpc { table, rpcbind: entry.rpcbind })
        }
        // Config::read has checked that there is an object.
        Kind::Bpf => (0, What::Object(entry.object.clone().unwrap_or_default())),
        Kind::Work => (0, What::Work),
    };
    Ok(Plan {
        name: entry.name.clone(),
        what,
        sockets: sockets(&entry.listen, port, Some(&entry.name), passed)?,
        engine: entry.engine.unwrap_or(config.engine),
        cpus: config.cpus.clone().map(|list| list.0),
        xdp: match entry.xdp.as_deref() {
            None => Xdp::Loopback,
            Some("none") => Xdp::Off,
            Some(interface) => Xdp::On(vec![interface.to_owned()]),
        },
        window_bytes: entry.window_bytes.map(|number| number.0),
        workers: entry.workers.map_or(0, |number| number.0 as usize),
        classes: entry.classes.clone(),
        limits: LimitSource::Config { path: path.to_owned(), service: entry.name.clone(), flags: args.limits.clone() },
        resources: config.resources_of(entry, &args.resources),
    })
}

/// NFSv3 and MOUNTv3, and what the user adds.
fn programs(more: &[ProgramRange]) -> Result<ProgramTable, String> {
    let mut table = ProgramTable::new();
    let mut register = |program| table.register(program).map_err(|error| error.to_string());
    register(nfs_null())?;
    register(mount_null())?;
    for range in more {
        register(NullProgram::new(format!("program {range}"), range.program, range.low..=range.high))?;
    }
    Ok(table)
}

/// Resolves addresses and takes the passed sockets that belong here: those called `name`, or all where there is
/// only one service. A wish for passed sockets that are not there is an error: the service would listen nowhere.
pub(super) fn sockets(
    listen: &[Listen],
    port: u16,
    name: Option<&str>,
    passed: &mut Vec<Passed>,
) -> Result<Sockets, Failure> {
    let mut sockets = Sockets::default();
    if listen.is_empty() {
        take_passed(&mut sockets, passed, name);
        if sockets.passed.is_empty() {
            let both = Listen::default_for(port).into_iter().filter(is_on_this_machine);
            both.for_each(|listen| sockets.addresses.extend(addresses(&listen)));
        }
    }
    for wish in listen {
        if let Listen::Systemd(wanted) = wish {
            let before = sockets.passed.len();
            take_passed(&mut sockets, passed, wanted.as_deref().or(name));
            if sockets.passed.len() == before {
                return Err(nothing_passed(wanted.as_deref().or(name)));
            }
        }
        sockets.addresses.extend(addresses(wish));
    }
    for socket in &sockets.passed {
        check_passed(socket)?;
    }
    Ok(sockets)
}

/// An address with a transport for each transport that is wished for.
fn addresses(listen: &Listen) -> Vec<ListenAddr> {
    match listen {
        Listen::Any(address) => vec![ListenAddr::Tcp(*address), ListenAddr::Udp(*address)],
        Listen::Tcp(address) => vec![ListenAddr::Tcp(*address)],
        Listen::Udp(address) => vec![ListenAddr::Udp(*address)],
        Listen::Unix(path) => vec![ListenAddr::Unix(path.clone())],
        Listen::Systemd(_) => Vec::new(),
    }
}

/// Whether a default address can be had at all: [::1] does not exist where IPv6 is off, and nobody asked for it.
pub(super) fn is_on_this_machine(listen: &Listen) -> bool {
    match listen {
        Listen::Any(SocketAddr::V6(_)) | Listen::Tcp(SocketAddr::V6(_)) => {
            TcpListener::bind((Ipv6Addr::LOCALHOST, 0)).is_ok()
        }
        _ => true,
    }
}

fn take_passed(sockets: &mut Sockets, passed: &mut Vec<Passed>, name: Option<&str>) {
    let wanted = |socket: &mut Passed| name.is_none_or(|name| socket.name == name);
    sockets.passed.extend(passed.extract_if(.., wanted));
}

fn nothing_passed(name: Option<&str>) -> Failure {
    let what = match name {
        Some(name) => format!("the service manager passed no socket named \"{name}\""),
        None => "the service manager passed no socket".to_owned(),
    };
    Failure::new(Status::Unavailable, what)
        .remedy("start the server by its socket unit (FileDescriptorName= gives the name), or remove the wish")
}

pub(super) fn all_taken(passed: &[Passed]) -> Result<(), Failure> {
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
    use std::os::fd::OwnedFd;

    fn passed(name: &str) -> Passed {
        let socket = OwnedFd::from(TcpListener::bind("127.0.0.1:0").unwrap());
        Passed { name: name.into(), socket }
    }

    #[test]
    fn an_address_without_transport_means_both() {
        let listen = ["127.0.0.1:5".parse().unwrap(), "udp:127.0.0.1:6".parse().unwrap()];
        let sockets = sockets(&listen, 1, None, &mut Vec::new()).unwrap();
        let text: Vec<String> = sockets.addresses.iter().map(ToString::to_string).collect();
        assert_eq!(text, ["tcp 127.0.0.1:5", "udp 127.0.0.1:5", "udp 127.0.0.1:6"]);
    }

    #[test]
    fn passed_sockets_replace_the_default_but_not_a_wish() {
        let mut all = vec![passed("a"), passed("b")];
        let taken = sockets(&[], 1, Some("b"), &mut all).unwrap();
        assert_eq!((taken.addresses.len(), taken.passed.len(), all.len()), (0, 1, 1));
        let taken = sockets(&["127.0.0.1:5".parse().unwrap()], 1, None, &mut all).unwrap();
        assert_eq!((taken.addresses.len(), taken.passed.len()), (2, 0));
        assert_eq!(all_taken(&all).unwrap_err().status, Status::Config);
    }

    #[test]
    fn a_wish_for_sockets_that_were_not_passed_is_an_error() {
        for wish in ["systemd", "systemd:x"] {
            let failure = sockets(&[wish.parse().unwrap()], 1, None, &mut Vec::new()).unwrap_err();
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
    fn programs_are_added_to_nfs_and_mount() {
        let more = ["200000:1-3".parse().unwrap()];
        assert_eq!(programs(&more).unwrap().programs().count(), 3);
        assert!(programs(&["100003:2-4".parse().unwrap()]).is_err());
    }
}
