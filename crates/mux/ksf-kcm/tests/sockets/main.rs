//! Message sockets on AF_KCM, in a machine that has it, and on ksf's own multiplexor, there and here: the same programs
//! through the same calls. Rows of the contract are `lab/kcm/ours.txt` everywhere, but for those on AF_KCM of which
//! `lab/kcm/ours_on_af_kcm.txt` says otherwise, as `docs/kcm.md` does.

mod calls;
#[path = "../../../ksf-mux/tests/common/mod.rs"]
mod common;
mod contract;
mod messages;
mod support;

use std::path::{Path, PathBuf};

use common::{PATIENCE, own_network};
use ksf_kcm::{AnyMux, Backend, KcmError};
use ksf_lab::{Lab, turn};
use support::options;

/// Set in a machine of the lab: whose multiplexor to test.
const INSIDE: &str = "KSF_TEST_MUX";

/// A framing program that reads at the front of the segment, as kcm.rst documents it; in the machine.
const NAIVE: &str = "/lab/naive.bpf.o";

#[test]
fn on_af_kcm() {
    match std::env::var(INSIDE).as_deref() {
        Ok("kcm") => {
            calls::cases();
            contract::rows(Backend::Kernel);
            contract::servers(Backend::Kernel, 500);
            messages::cases(Backend::Kernel);
            messages::on_af_kcm_alone(&std::fs::read(NAIVE).unwrap());
        }
        Ok(_) => {
            contract::rows(Backend::Ksf);
            contract::servers(Backend::Ksf, 500);
            messages::cases(Backend::Ksf);
        }
        Err(_) => {
            in_a_machine("kcm");
            in_a_machine("ksf");
        }
    }
}

#[test]
fn on_ksf_here() {
    own_network();
    contract::rows(Backend::Ksf);
    contract::servers(Backend::Ksf, 20_000);
    messages::cases(Backend::Ksf);
}

/// Wherever this runs: AF_KCM works, or it is said why not and what gives it; who left the choice gets what there is.
#[test]
fn what_is_missing_is_said() {
    let chosen = AnyMux::open(Backend::Auto, options()).unwrap().backend();
    match (ksf_kcm::probe(), AnyMux::open(Backend::Kernel, options())) {
        (Ok(_), opened) => {
            assert_eq!(opened.unwrap().backend(), Backend::Kernel);
            assert_eq!(chosen, Backend::Kernel);
        }
        (Err(error), opened) => {
            let refused = opened.expect_err("what cannot be probed cannot be opened");
            assert_eq!(refused.to_string(), error.to_string());
            assert!(!refused.remedy().is_empty());
            if let KcmError::Absent(_) = refused {
                assert_eq!(refused.errno(), Some(libc::EAFNOSUPPORT));
            }
            assert_eq!(chosen, Backend::Ksf);
        }
    }
}

/// Runs the test of AF_KCM in a machine, which this file's program is copied to.
fn in_a_machine(mux: &str) {
    let Some(_turn) = turn() else { return };
    let folder = tempfile::tempdir().unwrap();
    let lab = Lab::new(std::env::current_exe().unwrap()).module("kcm").cpus(2).memory_mib(1024);
    let lab = ["--exact", "on_af_kcm", "--nocapture"].iter().fold(lab, |lab, word| lab.arg(*word));
    let lab = lab.env(INSIDE, mux).file(naive(folder.path()), NAIVE).time_limit(PATIENCE * 2);
    let outcome = lab.run().unwrap();
    assert!(outcome.success(), "{}\n{}", outcome.output, outcome.console);
    // A filter that fits no test would be a success, too.
    assert!(outcome.output.contains("test result: ok. 1 passed"), "{}", outcome.output);
}

/// Compiled as AF_KCM's documentation has it: without the offset.
fn naive(folder: &Path) -> PathBuf {
    ksf_bpf::write_sdk(folder, &[ksf_bpf_framing::SDK]).unwrap();
    let (source, object) = (folder.join("naive.bpf.c"), folder.join("naive.bpf.o"));
    let text = "#include \"ksf_framing_program.h\"\n\
        KSF_FRAMING_PROGRAM(naive)\n{\n\t__u32 length;\n\n\
        \treturn ksf_load_be32(stream, 0, &length) ? (int)length : 0;\n}\nKSF_LICENSE(\"Dual MIT/GPL\");\n";
    std::fs::write(&source, text).unwrap();
    ksf_test::compile::bpf(&source, &object, folder, &[]);
    object
}
