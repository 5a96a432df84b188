//! The kernel half of a service: programs on its TCP sockets, and on an interface for UDP.

use std::net::SocketAddr;
use std::sync::Arc;

use ksf::assist::Assist;
use ksf::limits::Limits;
use ksf::listener::ListenAddr;
use ksf_kernel::{Builtin, KernelError, KernelService, ObjectSource, Options, XdpLink};
use ksf_services::rpc::ProgramTable;

use super::plan::{Plan, What, Xdp};
use crate::doctor::{Obstacle, SETCAP};
use crate::output::{Failure, Status, one_line};

/// A loaded kernel half. Dropping it takes everything out of the kernel.
#[derive(Debug)]
pub(crate) struct Half {
    pub(crate) service: KernelService,
    links: Vec<XdpLink>,
}

impl Half {
    /// Loads the programs for `plan`, if there are any; nothing is attached yet.
    pub(crate) fn load(plan: &Plan, limits: &Limits, shards: usize) -> Result<Option<Self>, KernelError> {
        // Shared memory and map entries are sized by it, so it follows the limit only up to here; connections beyond
        // are served by user space alone.
        const CONNECTIONS_MAX: usize = 65_536;
        let mut options = Options::default();
        options.connections_max = limits.connections_max.clamp(1, CONNECTIONS_MAX) as u32;
        options.shards = shards as u32;
        options.callers_max = (shards + plan.workers) as u32;
        if let Some(bytes) = plan.window_bytes {
            options.window_bytes = bytes as u32;
        }
        let source = match &plan.what {
            What::Echo => ObjectSource::Builtin(Builtin::Echo),
            What::Rpc { table, .. } => {
                options.rpc_programs = programs(table);
                ObjectSource::Builtin(Builtin::RpcNull)
            }
            What::Object(path) => ObjectSource::File(path.clone()),
            What::Work | What::Demo(_) => return Ok(None),
        };
        Ok(Some(Half { service: KernelService::load(&source, &options)?, links: Vec::new() }))
    }

    /// The seam for the engine.
    pub(crate) fn assist(&self) -> Arc<dyn Assist> {
        Arc::new(self.service.assist())
    }

    /// Has XDP answer the UDP listeners among `listeners`, as `wish` says. The notes say which are left to user space.
    pub(crate) fn attach_udp(&mut self, wish: &Xdp, listeners: &[ListenAddr]) -> Result<Vec<String>, KernelError> {
        let udp: Vec<SocketAddr> = listeners
            .iter()
            .filter_map(|listener| match listener {
                ListenAddr::Udp(address) => Some(*address),
                _ => None,
            })
            .collect();
        if udp.is_empty() {
            return Ok(Vec::new());
        }
        match wish {
            Xdp::Off => Ok(Vec::new()),
            Xdp::On(interfaces) => {
                for interface in interfaces {
                    self.links.push(self.service.attach_udp(interface, &udp)?);
                }
                Ok(Vec::new())
            }
            Xdp::Loopback => {
                let is_local = |address: &SocketAddr| address.ip().is_loopback() || address.ip().is_unspecified();
                let local: Vec<SocketAddr> = udp.iter().copied().filter(is_local).collect();
                if !local.is_empty() {
                    self.links.push(self.service.attach_udp("lo", &local)?);
                }
                let from_outside = udp.iter().filter(|address| !address.ip().is_loopback());
                Ok(from_outside
                    .map(|address| {
                        format!(
                            "udp {address}: datagrams of other machines are answered in user space; \
                             to have XDP answer them: --xdp IFACE"
                        )
                    })
                    .collect())
            }
        }
    }

    /// Takes XDP off its interfaces.
    pub(crate) fn detach_udp(&mut self) {
        self.links.clear();
    }

    /// Interfaces with their modes, for the line of a ready UDP listener: `lo:generic`. Empty without XDP.
    pub(crate) fn xdp(&self) -> String {
        let links: Vec<String> =
            self.links.iter().map(|link| format!("{}:{}", link.interface(), link.mode())).collect();
        links.join(",")
    }
}

/// What the kernel answers NULL for: the first range of each program, because its table has one entry per program. The
/// other ranges are answered in user space.
fn programs(table: &ProgramTable) -> Vec<(u32, u32, u32)> {
    let mut programs: Vec<(u32, u32, u32)> = Vec::new();
    for (program, versions) in table.programs() {
        if !programs.iter().any(|(known, ..)| *known == program) {
            programs.push((program, *versions.start(), *versions.end()));
        }
    }
    programs
}

/// Why the kernel half does not run, and what to do about it.
pub(crate) fn obstacle(error: &KernelError) -> Obstacle {
    let (cause, remedy) = match error {
        KernelError::NotPermitted { action, cause, .. } => {
            return Obstacle {
                cause: format!("not permitted to {action}: {cause}"),
                remedy: SETCAP.to_owned(),
                rights: true,
            };
        }
        KernelError::Unsupported { feature, detail } => (
            format!("this kernel lacks {feature} ({detail})"),
            "boot Linux 6.1 or later; ksf doctor says what is missing",
        ),
        KernelError::XdpBusy { interface, program } => (
            format!("interface {interface} already runs the XDP program {program}"),
            "stop the server it belongs to, or leave UDP to user space with --no-xdp",
        ),
        KernelError::NoInterface { interface } => {
            (format!("there is no interface {interface}"), "see ip link for the names")
        }
        KernelError::SelfTest { test, problem } => {
            (format!("the self-test failed: {test}: {problem}"), "boot another kernel, and please report this")
        }
        other => (other.to_string(), "ksf doctor says what is missing"),
    };
    Obstacle { cause: one_line(&cause), remedy: remedy.to_owned(), rights: false }
}

/// An object of the user's own that cannot be loaded: there is nothing to fall back to.
pub(crate) fn object_failure(error: &KernelError) -> Failure {
    let what = error.to_string();
    match error {
        KernelError::Unreadable { error, .. } => {
            let status = match error.kind() {
                std::io::ErrorKind::PermissionDenied => Status::NoPermission,
                _ => Status::NoInput,
            };
            Failure::new(status, what).remedy("check the path")
        }
        KernelError::BadObject { .. } => {
            Failure::new(Status::Data, what).remedy("compile it against this version of ksf.bpf.h (man ksf-run)")
        }
        KernelError::Verifier { .. } => {
            Failure::new(Status::Data, what).remedy("-v shows the whole log; correct the program")
        }
        KernelError::BadOption { .. } => Failure::new(Status::Data, what),
        other => {
            let obstacle = obstacle(other);
            let status = if obstacle.rights { Status::NoPermission } else { Status::Unavailable };
            Failure::new(status, format!("the program cannot be loaded: {}", obstacle.cause)).remedy(obstacle.remedy)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ksf_services::rpc::NullProgram;

    #[test]
    fn the_kernel_knows_each_program_once() {
        let mut table = ProgramTable::new();
        for (low, high) in [(3, 3), (5, 6)] {
            table.register(NullProgram::new("x", 7, low..=high)).unwrap();
        }
        table.register(NullProgram::new("y", 8, 1..=2)).unwrap();
        assert_eq!(programs(&table), [(7, 3, 3), (8, 1, 2)]);
    }

    #[test]
    fn errors_become_one_line_with_a_status() {
        let verifier = KernelError::Verifier { program: "p".into(), summary: "a\nb".into(), log: "long".into() };
        let failure = object_failure(&verifier);
        assert_eq!(failure.status, Status::Data);
        assert!(failure.to_string().contains("a b"), "{failure}");
        let rights =
            KernelError::NotPermitted { action: "load", cause: "the process lacks CAP_BPF".into(), remedy: "x".into() };
        assert!(obstacle(&rights).rights);
        assert_eq!(object_failure(&rights).status, Status::NoPermission);
        let busy = KernelError::XdpBusy { interface: "lo".into(), program: "x".into() };
        assert!(obstacle(&busy).remedy.contains("--no-xdp"));
    }
}
