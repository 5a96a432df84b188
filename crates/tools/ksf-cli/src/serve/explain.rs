//! Why a server did not start, in one line with the remedy.

use ksf::Error;
use ksf::engine::EngineKind;
use ksf::listener::ListenAddr;

use crate::output::{Failure, Status};

/// Finds the status and the remedy for an error of the framework. `base`: the engine that was to run.
pub(super) fn explain(error: Error, base: EngineKind) -> Failure {
    match error {
        Error::AddrInUse { addr } => {
            let holder = match &addr {
                ListenAddr::Tcp(at) => crate::busy::describe_inet(*at, false),
                ListenAddr::Udp(at) => crate::busy::describe_inet(*at, true),
                ListenAddr::Unix(path) => crate::busy::describe_unix(path),
                _ => "held by another program".to_owned(),
            };
            Failure::new(Status::Unavailable, format!("cannot listen on {addr}: the address is busy, {holder}"))
                .remedy("stop that program, or choose another address with --listen")
        }
        Error::Listen { addr, step, source } => {
            let what = format!("cannot listen on {addr}: {step}: {source}");
            match source.raw_os_error() {
                Some(libc::EACCES | libc::EPERM) if is_privileged(&addr) => Failure::new(Status::NoPermission, what)
                    .remedy("ports below 1024 need CAP_NET_BIND_SERVICE: run as root, setcap cap_net_bind_service+ep on the binary, or choose a port from 1024 on"),
                Some(libc::EACCES | libc::EPERM) => Failure::new(Status::NoPermission, what)
                    .remedy("choose a path in a folder you may write to"),
                Some(libc::EADDRNOTAVAIL) => Failure::new(Status::Unavailable, what)
                    .remedy("no interface has that address (see ip address); choose another with --listen"),
                Some(libc::EAFNOSUPPORT) => Failure::new(Status::Unavailable, what)
                    .remedy("IPv6 is off on this machine; listen on an IPv4 address"),
                Some(libc::ENOENT) => Failure::new(Status::NoInput, what).remedy("make the folder of the socket first"),
                Some(libc::EMFILE | libc::ENFILE) => Failure::new(Status::Os, what)
                    .remedy("raise the limit of open files: ulimit -n, or LimitNOFILE= in the unit"),
                _ => Failure::new(Status::Os, what).remedy("choose another address with --listen"),
            }
        }
        Error::Engine { .. } => Failure::new(Status::Unavailable, error.to_string()).remedy(match base {
            EngineKind::Uring => "use --engine=epoll; ksf doctor says what is missing",
            EngineKind::Epoll => "ksf doctor says what is missing",
        }),
        Error::NoCpu { asked, allowed } => {
            Failure::new(Status::Data, format!("none of the CPUs {asked} may be used by this process")).remedy(format!(
                "choose --cpus among {allowed}, or widen the mask of the process (taskset, AllowedCPUs=)"
            ))
        }
        Error::Framing(_) => Failure::new(Status::Internal, error.to_string()),
        Error::Pool { .. } => Failure::new(Status::Os, error.to_string())
            .remedy("raise the memory limit, or use fewer slots (--slots) or shards (--cpus)"),
        Error::RefusedByService { service, addr } => Failure::new(
            Status::Unavailable,
            format!("cannot listen on {addr}: the service {service} does not take datagrams there"),
        )
        .remedy("listen on another transport: --listen tcp:ADDR:PORT"),
        Error::Thread(_) => Failure::new(Status::Os, error.to_string())
            .remedy("raise the limit of threads: ulimit -u, or TasksMax= in the unit"),
        _ => Failure::new(Status::Internal, error.to_string()),
    }
}

fn is_privileged(addr: &ListenAddr) -> bool {
    match addr {
        ListenAddr::Tcp(at) | ListenAddr::Udp(at) => at.port() < 1024,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;

    fn listen_error(addr: &str, errno: i32) -> Failure {
        let source = io::Error::from_raw_os_error(errno);
        explain(Error::Listen { addr: addr.parse().unwrap(), step: "bind", source }, EngineKind::Epoll)
    }

    #[test]
    fn each_error_has_its_status_and_remedy() {
        for (failure, status, part) in [
            (listen_error("127.0.0.1:80", libc::EACCES), Status::NoPermission, "cap_net_bind_service"),
            (listen_error("unix:/x", libc::EACCES), Status::NoPermission, "folder"),
            (listen_error("192.0.2.1:80", libc::EADDRNOTAVAIL), Status::Unavailable, "ip address"),
            (listen_error("127.0.0.1:80", libc::EMFILE), Status::Os, "ulimit -n"),
        ] {
            assert_eq!(failure.status, status);
            assert!(failure.to_string().contains(part), "{failure}");
        }
        let refused = Error::RefusedByService { service: "mine".into(), addr: "udp:127.0.0.1:7".parse().unwrap() };
        let failure = explain(refused, EngineKind::Epoll);
        assert_eq!(failure.status, Status::Unavailable);
        assert!(failure.to_string().contains("mine") && failure.to_string().contains("tcp:ADDR:PORT"), "{failure}");
        let failure = explain(
            Error::NoCpu { asked: [8, 9].into_iter().collect(), allowed: [0, 1].into_iter().collect() },
            EngineKind::Epoll,
        );
        assert!(failure.to_string().contains("8-9") && failure.to_string().contains("0-1"));
    }
}
