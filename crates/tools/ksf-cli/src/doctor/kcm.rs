//! AF_KCM, the kernel's own message sockets.

use super::machine::Machine;
use super::verdict::{Lack, Probe, Verdict};
use crate::output::one_line;

/// The probes.
pub(crate) const PROBES: &[Probe] = &[Probe {
    name: "kcm",
    title: "AF_KCM: the kernel cuts messages of different lengths in one segment (needed by kcm-run --mux=kcm)",
    fallback: "--mux=ksf, which is the default: messages are cut in user space",
    run: kcm,
}];

fn kcm(_: &Machine) -> Verdict {
    match ksf_kcm::probe() {
        Ok(_) => Verdict::works("three messages came out as they went in"),
        Err(error) => Verdict::Fails(Lack {
            cause: one_line(&error.to_string()),
            errno: error.errno(),
            remedy: error.remedy().to_owned(),
        }),
    }
}
