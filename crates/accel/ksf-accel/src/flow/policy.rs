//! Policies: who decides to which CPU a packet goes.

use std::fmt;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use ksf_bpf::to_io;
use libbpf_rs::{MapHandle, Object, ProgramType};

use super::{FlowError, abi};
use crate::bpf::{self, Loading};

/// A policy. Several stand behind one another: each may leave a packet to the next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Policy {
    /// Replies to active connections go to the CPU that opened them, told by the chunk their port lies in. Leaves all
    /// others to the next policy. This is receive flow deliver (RFD) of Fastsocket.
    Ports,
    /// Every TCP connection and UDP flow to one CPU, by a hash of addresses and ports.
    Hash,
    /// TCP connections that others open, in turn; UDP and older connections are left to the next policy.
    RoundRobin,
    /// Everything stays where it is.
    Pass,
    /// A policy of the user's, compiled against `ksf-policy.h`.
    File(PathBuf),
}

/// Names of the built-in ones, and their programs.
const BUILTIN: [(&str, Policy, &str); 4] = [
    ("ports", Policy::Ports, "ksf_ports"),
    ("hash", Policy::Hash, "ksf_by_hash"),
    ("round-robin", Policy::RoundRobin, "ksf_round_robin"),
    ("pass", Policy::Pass, "ksf_stay"),
];

/// The maps of `ksf-policy.h`: one set for all programs of an interface.
pub(crate) const SHARED_MAPS: [&str; 7] =
    ["ksf_settings", "ksf_cpu_list", "ksf_cpus", "ksf_policies", "ksf_packets", "ksf_flow_counts", "ksf_flow_targets"];

/// `BPF_F_XDP_HAS_FRAGS` of linux/bpf.h, kernel 5.18.
const XDP_HAS_FRAGS: u32 = 1 << 5;

/// The table of programs.
pub(crate) const CHAIN: &str = "ksf_policies";

impl Policy {
    /// Names of the built-in policies.
    pub fn names() -> impl Iterator<Item = &'static str> {
        BUILTIN.iter().map(|(name, ..)| *name)
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => write!(f, "{}", path.display()),
            builtin => f.write_str(BUILTIN.iter().find(|(_, it, _)| it == builtin).map_or("", |(name, ..)| *name)),
        }
    }
}

impl FromStr for Policy {
    type Err = String;

    /// A name, or the path of an object: something with a `/` or a `.` in it.
    fn from_str(text: &str) -> Result<Self, String> {
        if let Some((_, policy, _)) = BUILTIN.iter().find(|(name, ..)| *name == text) {
            return Ok(policy.clone());
        }
        if text.contains(['/', '.']) {
            return Ok(Self::File(text.into()));
        }
        let names: Vec<_> = Self::names().collect();
        Err(format!("no policy {text:?}: there are {}, or give the path of an object (./{text})", names.join(", ")))
    }
}

/// Puts the policies into the chain, in order. `builtin`: the object of ours; `shared`: its maps, as [`SHARED_MAPS`].
pub(crate) fn chain(policies: &[Policy], builtin: &Object, shared: &[MapHandle], frags: bool) -> Result<(), FlowError> {
    if policies.len() > abi::POLICIES_MAX {
        return Err(FlowError::TooManyPolicies { count: policies.len(), max: abi::POLICIES_MAX });
    }
    let table = &shared[place_of(CHAIN)];
    for (slot, policy) in policies.iter().enumerate() {
        let program = match policy {
            Policy::File(path) => load(path, shared, frags)?,
            _ => {
                let (.., program) = BUILTIN.iter().find(|(_, it, _)| it == policy).expect("the table has them all");
                bpf::program(builtin, program).map_err(|error| FlowError::system("keeping a program", error))?
            }
        };
        bpf::put(table, &(slot as u32).to_ne_bytes(), &program.as_raw_fd().to_ne_bytes())
            .map_err(|error| FlowError::System { action: "putting a policy into the chain", error })?;
    }
    Ok(())
}

/// Whether the XDP programs take frames of several buffers. All programs of a chain must agree.
pub(crate) fn set_frags(loading: &mut Loading, frags: bool) {
    if frags {
        loading.object.progs_mut().for_each(|mut program| program.set_flags(XDP_HAS_FRAGS));
    }
}

/// Where a map stands in [`SHARED_MAPS`].
pub(crate) fn place_of(map: &str) -> usize {
    SHARED_MAPS.iter().position(|name| *name == map).expect("one of the shared maps")
}

/// Loads a user's policy onto our maps; maps of its own live as long as the program.
fn load(path: &Path, shared: &[MapHandle], frags: bool) -> Result<OwnedFd, FlowError> {
    let bytes = std::fs::read(path).map_err(|error| FlowError::Unreadable { path: path.to_owned(), error })?;
    let name = path.display().to_string();
    let bad = |problem: String| FlowError::BadPolicy { object: name.clone(), problem };
    let mut loading = Loading::open(&bytes).map_err(|error| bad(format!("is not a BPF object ({})", error.text())))?;
    // libbpf puts the object's name in front of the section's.
    let abi = loading.object.maps().find_map(|map| {
        let ours = map.name().to_str().is_some_and(|name| name.ends_with(".rodata.ksf"));
        ours.then(|| map.initial_value().and_then(|value| value.first_chunk().copied()).map(u32::from_ne_bytes))
    });
    match abi {
        Some(Some(abi::ABI)) => {}
        Some(Some(other)) => {
            return Err(bad(format!(
                "was compiled against policy SDK {other}, this ksf speaks {}: compile it again with the headers of this version",
                abi::ABI
            )));
        }
        _ => return Err(bad("is not a policy: include \"ksf-policy.h\" and write KSF_POLICY(name) {...}".into())),
    }
    let kinds: Vec<ProgramType> = loading.object.progs().map(|program| program.prog_type()).collect();
    if kinds != [ProgramType::Xdp] {
        return Err(bad(format!(
            "has {} programs; a policy is an object with one KSF_POLICY(name) {{...}}",
            kinds.len()
        )));
    }
    for mut map in loading.object.maps_mut() {
        let Some(at) = SHARED_MAPS.iter().position(|name| map.name() == *name) else { continue };
        map.reuse_fd(shared[at].as_fd())
            .map_err(|error| FlowError::System { action: "sharing a map with a policy", error: to_io(&error) })?;
    }
    set_frags(&mut loading, frags);
    let object = loading.load().map_err(|error| FlowError::loading(&name, &error))?;
    let program = object.progs().next().expect("counted above");
    program.as_fd().try_clone_to_owned().map_err(|error| FlowError::system("keeping a policy", error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_are_names_or_files() {
        for name in Policy::names() {
            assert_eq!(name.parse::<Policy>().unwrap().to_string(), name);
        }
        assert_eq!("./hash".parse(), Ok(Policy::File("./hash".into())));
        assert_eq!("mine.bpf.o".parse(), Ok(Policy::File("mine.bpf.o".into())));
        let error = "has".parse::<Policy>().unwrap_err();
        assert!(error.contains("round-robin") && error.contains("./has"), "{error}");
    }
}
