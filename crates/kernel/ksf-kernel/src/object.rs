//! From an object file to loaded programs: which object, is it one of ours, its sizes, and why the verifier said no.

use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;

use ksf_bpf::{Capture, is_denial, to_io};
use libbpf_rs::{MapCore, MapHandle, MapType, ObjectBuilder, OpenObject, ProgramType};

use crate::abi::{self, Config};
use crate::options::KernelOptions;
use crate::sys::{self, Map};
use crate::{Builtin, KernelError};

/// Where the programs come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ObjectSource {
    /// One that is part of this crate.
    Builtin(Builtin),
    /// One that a service author compiled against the SDK.
    File(PathBuf),
}

impl ObjectSource {
    fn name(&self) -> String {
        match self {
            Self::Builtin(builtin) => format!("built-in service {}", builtin.name()),
            Self::File(path) => path.display().to_string(),
        }
    }

    fn read(&self) -> Result<Vec<u8>, KernelError> {
        match self {
            Self::Builtin(builtin) => Ok(builtin.object().to_vec()),
            Self::File(path) => {
                std::fs::read(path).map_err(|error| KernelError::Unreadable { path: path.clone(), error })
            }
        }
    }
}

/// Programs and maps of a loaded object, each with its own descriptor. The object itself is gone.
#[derive(Debug)]
pub(crate) struct Loaded {
    pub(crate) config: Config,
    pub(crate) stream: OwnedFd,
    pub(crate) hop: OwnedFd,
    pub(crate) hop_failed: OwnedFd,
    pub(crate) xdp: OwnedFd,
    pub(crate) call: OwnedFd,
    pub(crate) maps: Maps,
    /// Name and verified instructions of each program.
    pub(crate) cost: Vec<(String, u32)>,
}

#[derive(Debug)]
pub(crate) struct Maps {
    pub(crate) socks: Map,
    pub(crate) index: Map,
    pub(crate) conns: Map,
    pub(crate) hop_near: Map,
    pub(crate) hop_far: Map,
    pub(crate) hop_slot: Map,
    pub(crate) counters: Map,
    pub(crate) wakes: Map,
    pub(crate) ports: Map,
    pub(crate) xdp_next: Map,
    pub(crate) calls: Map,
    pub(crate) rpc_programs: Option<Map>,
}

/// Sizes the programs are loaded with.
pub(crate) struct Sizes {
    pub(crate) cpus: u32,
    pub(crate) hops: u32,
    pub(crate) shards: u32,
    pub(crate) ring_bytes: u32,
}

pub(crate) fn load(source: &ObjectSource, options: &KernelOptions, sizes: &Sizes) -> Result<Loaded, KernelError> {
    let name = source.name();
    let bytes = source.read()?;
    let capture = Capture::start();
    let mut object = ObjectBuilder::default()
        .open_memory(&bytes)
        .map_err(|error| bad(&name, format!("not a BPF object ({error}): {}", capture.text().trim_end())))?;
    let config = configure(&name, &mut object, options, sizes)?;
    let ring = wake_ring(sizes.ring_bytes)?;
    for mut map in object.maps_mut() {
        let entries = match map.name().to_str().unwrap_or_default() {
            "ksf_socks" | "ksf_index" | "ksf_conns" => options.connections_max,
            "ksf_slots" => sizes.cpus * abi::SLOTS_PER_CPU,
            // A map has at least one entry.
            "ksf_hop_in" | "ksf_hop_out" => sizes.hops.max(1),
            "ksf_hop_slot" => (2 * sizes.hops).max(1),
            "ksf_calls" => options.callers_max,
            "ksf_wakes" => {
                map.set_inner_map_fd(ring.as_fd())
                    .map_err(|error| KernelError::system("giving the map of rings its type", to_io(error)))?;
                sizes.shards
            }
            _ => continue,
        };
        map.set_max_entries(entries).map_err(|error| KernelError::system("sizing a map", to_io(error)))?;
    }
    let object = match object.load() {
        Ok(object) => object,
        Err(error) => return Err(explain_load_failure(&name, &to_io(error), &capture.text())),
    };
    drop(capture);

    let find = |wanted: &'static str| -> Result<Map, KernelError> {
        let map = object.maps().find(|map| map.name() == OsStr::new(wanted)).ok_or_else(|| {
            bad(&name, format!("has no map {wanted}: include \"ksf.bpf.h\" and end with KSF_SERVICE(...)"))
        })?;
        Map::of(&map).map_err(|error| KernelError::system("keeping a map", error))
    };
    let maps = Maps {
        socks: find("ksf_socks")?,
        index: find("ksf_index")?,
        conns: find("ksf_conns")?,
        hop_near: find("ksf_hop_in")?,
        hop_far: find("ksf_hop_out")?,
        hop_slot: find("ksf_hop_slot")?,
        counters: find("ksf_counters")?,
        wakes: find("ksf_wakes")?,
        ports: find("ksf_ports")?,
        xdp_next: find("ksf_xdp_next")?,
        calls: find("ksf_calls")?,
        rpc_programs: find("ksf_rpc_programs").ok(),
    };
    let mut cost = Vec::new();
    let mut program = |wanted: &'static str, kind: ProgramType| -> Result<OwnedFd, KernelError> {
        let program = object
            .progs()
            .find(|program| program.name() == OsStr::new(wanted) && program.prog_type() == kind)
            .ok_or_else(|| bad(&name, format!("has no program {wanted}: include \"ksf.bpf.h\"")))?;
        let fd =
            program.as_fd().try_clone_to_owned().map_err(|error| KernelError::system("keeping a program", error))?;
        cost.push((wanted.to_owned(), sys::verified_instructions(fd.as_fd())));
        Ok(fd)
    };
    Ok(Loaded {
        config,
        stream: program("ksf_stream", ProgramType::SkSkb)?,
        hop: program("ksf_hop", ProgramType::SkSkb)?,
        hop_failed: program("ksf_hop_failed", ProgramType::Syscall)?,
        xdp: program("ksf_xdp", ProgramType::Xdp)?,
        call: program("ksf_call", ProgramType::Syscall)?,
        maps,
        cost,
    })
}

/// Checks that the object is one of ours and writes the loader's half of its configuration.
fn configure(
    name: &str,
    object: &mut OpenObject,
    options: &KernelOptions,
    sizes: &Sizes,
) -> Result<Config, KernelError> {
    // libbpf names the map after the section, with the object's name in front when that is short enough.
    let mut map = object
        .maps_mut()
        .find(|map| map.name().to_str().is_some_and(|name| name.ends_with(".rodata.ksf")))
        .ok_or_else(|| bad(name, "is not made with the ksf SDK: it has no KSF_SERVICE(...)".into()))?;
    let image = map.initial_value_mut().ok_or_else(|| bad(name, "has an empty configuration".into()))?;
    let mut config =
        Config::from_bytes(image).ok_or_else(|| bad(name, "has a configuration of another size".into()))?;
    if config.abi != abi::ABI || config.bytes as usize != size_of::<Config>() {
        let problem = format!(
            "was compiled against SDK {}, this ksf speaks {}: compile it again with the headers of this version",
            config.abi,
            abi::ABI
        );
        return Err(bad(name, problem));
    }
    config.window_bytes = options.window_bytes;
    config.lag_bytes_max = options.lag_bytes_max;
    config.cpus = sizes.cpus;
    config.hops = sizes.hops;
    image[..size_of::<Config>()].copy_from_slice(config.as_bytes());
    Ok(config)
}

/// A ring of the size all of the object's rings have.
pub(crate) fn wake_ring(bytes: u32) -> Result<MapHandle, KernelError> {
    let opts = libbpf_sys::bpf_map_create_opts {
        sz: size_of::<libbpf_sys::bpf_map_create_opts>() as libbpf_sys::size_t,
        ..Default::default()
    };
    MapHandle::create(MapType::RingBuf, Some("ksf_wake"), 0, 0, bytes, &opts)
        .map_err(|error| KernelError::system("creating a BPF ring buffer", to_io(error)))
}

fn bad(object: &str, problem: String) -> KernelError {
    KernelError::BadObject { object: object.to_owned(), problem }
}

fn explain_load_failure(object: &str, error: &io::Error, output: &str) -> KernelError {
    const BEGIN: &str = "-- BEGIN PROG LOAD LOG --";
    // Nothing is wrong with the object, whatever the verifier had said by then.
    if let Some(errno @ (libc::EMFILE | libc::ENFILE | libc::ENOMEM)) = error.raw_os_error() {
        return KernelError::system("loading BPF programs", io::Error::from_raw_os_error(errno));
    }
    if let Some((before, log)) = output.split_once(BEGIN)
        && !log.trim().is_empty()
    {
        let log = log.split("-- END PROG LOAD LOG --").next().unwrap_or(log);
        let program = before.rsplit("prog '").next().and_then(|text| text.split('\'').next()).unwrap_or("?");
        return KernelError::Verifier {
            program: program.to_owned(),
            summary: verifier_summary(log),
            log: log.to_owned(),
        };
    }
    if is_denial(error) {
        return KernelError::not_permitted("load BPF programs");
    }
    let said = output.trim_end();
    if said.contains("BTF") && !std::path::Path::new("/sys/kernel/btf/vmlinux").exists() {
        return KernelError::Unsupported {
            feature: "BTF",
            detail: "/sys/kernel/btf/vmlinux is missing; a kernel with CONFIG_DEBUG_INFO_BTF has it".into(),
        };
    }
    bad(object, format!("could not be loaded: {error}\n{said}"))
}

/// The last lines that say something, without the statistics at the end.
fn verifier_summary(log: &str) -> String {
    const LINES: usize = 12;
    let is_statistics = |line: &&str| {
        !(line.starts_with("processed ")
            || line.starts_with("verification time")
            || line.starts_with("stack depth")
            || line.trim().is_empty())
    };
    let lines: Vec<&str> = log.lines().filter(is_statistics).collect();
    lines[lines.len().saturating_sub(LINES)..].join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_summary_leaves_the_statistics_out() {
        let log =
            "0: R1=ctx()\n1: (79) r2 = *(u64 *)(r1 +0)\ninvalid access to packet\nprocessed 12 insns (limit 1000000)\n";
        let summary = verifier_summary(log);
        assert!(summary.ends_with("invalid access to packet"), "{summary}");
    }

    #[test]
    fn a_verifier_log_names_its_program() {
        let output = "libbpf: prog 'ksf_stream': BPF program load failed\nlibbpf: prog 'ksf_stream': -- BEGIN PROG LOAD LOG --\nR0 invalid mem access\n-- END PROG LOAD LOG --\n";
        let error = explain_load_failure("x.o", &io::Error::from_raw_os_error(libc::EACCES), output);
        assert!(matches!(error, KernelError::Verifier { program, summary, .. }
            if program == "ksf_stream" && summary.contains("R0 invalid mem access")));
    }
}
