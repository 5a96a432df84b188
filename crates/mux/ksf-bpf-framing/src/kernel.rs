//! The same object in the kernel: what the verifier says of it, and a descriptor for AF_KCM.

use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use ksf_bpf::{Capture, last_lines, to_io};
use libbpf_rs::{Object, ObjectBuilder, ProgramInput, ProgramType};

use crate::program::FramingProgram;

/// Why the kernel does not have the program.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VerifyError {
    /// The program was not made from an object file.
    #[error("the program was made from single instructions: the kernel loads object files")]
    NoObject,
    /// The process may not load programs.
    #[error(
        "not permitted to load a socket filter ({error}): run as root, or with CAP_BPF, and CAP_PERFMON if it was compiled with -DKSF_AF_KCM"
    )]
    NotPermitted {
        /// What the kernel answered.
        error: io::Error,
    },
    /// The verifier refused it.
    #[error("the kernel's verifier refused the program:\n{summary}")]
    Refused {
        /// The last lines that say something.
        summary: String,
        /// Everything the verifier said.
        log: String,
    },
    /// libbpf could not prepare it, or the kernel lacks something.
    #[error("the program could not be loaded into the kernel ({error}): {said}")]
    Failed {
        /// The error.
        error: io::Error,
        /// What libbpf said.
        said: String,
    },
}

/// A framing program that the kernel has verified and loaded, as `BPF_PROG_TYPE_SOCKET_FILTER`. It is unloaded when
/// this is dropped and nothing else refers to it.
#[derive(Debug)]
pub struct KernelProgram {
    object: Object,
    name: String,
    fd: OwnedFd,
}

impl FramingProgram {
    /// Loads the program into the kernel.
    ///
    /// What libbpf prints meanwhile is captured with its one printer per process: a thread that changes the printer
    /// at the same time can take the verifier's words away, not the verdict.
    pub fn verify_with_kernel(&self) -> Result<KernelProgram, VerifyError> {
        let object = self.object().ok_or(VerifyError::NoObject)?;
        let capture = Capture::start();
        let explain = |error: libbpf_rs::Error| refusal(to_io(error), &capture.text());
        let mut open = ObjectBuilder::default().open_memory(object).map_err(explain)?;
        for mut program in open.progs_mut() {
            let wanted = program.name() == OsStr::new(self.name());
            program.set_autoload(wanted);
            if wanted {
                // libbpf knows "socket", but not "socket/name".
                program.set_prog_type(ProgramType::SocketFilter);
            }
        }
        let object = open.load().map_err(explain)?;
        let failed = |error: io::Error| VerifyError::Failed { error, said: "keeping its descriptor".into() };
        let name = OsStr::new(self.name());
        let fd = match object.progs().find(|program| program.name() == name) {
            Some(program) => program.as_fd().try_clone_to_owned().map_err(failed)?,
            None => return Err(failed(io::ErrorKind::NotFound.into())),
        };
        Ok(KernelProgram { object, name: self.name().to_owned(), fd })
    }
}

impl KernelProgram {
    /// Runs it once on `stream`, with `BPF_PROG_TEST_RUN`, and gives what it returned.
    ///
    /// The kernel refuses an empty `stream`, and one that does not fit a page.
    pub fn test_run(&mut self, stream: &[u8]) -> io::Result<i32> {
        // The kernel takes the first 14 bytes for an Ethernet header (net/bpf/test_run.c, bpf_prog_test_run_skb).
        let mut frame = vec![0; 14];
        frame.extend_from_slice(stream);
        let input = ProgramInput { data_in: Some(&frame), ..Default::default() };
        let name = OsStr::new(&self.name);
        let program = self.object.progs_mut().find(|program| program.name() == name).ok_or(io::ErrorKind::NotFound)?;
        let output = program.test_run(input).map_err(to_io)?;
        Ok(output.return_value as i32)
    }
}

/// The program's descriptor, for `SIOCKCMATTACH`.
impl AsFd for KernelProgram {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn refusal(error: io::Error, said: &str) -> VerifyError {
    const BEGIN: &str = "-- BEGIN PROG LOAD LOG --";
    if let Some((_, log)) = said.split_once(BEGIN)
        && !log.trim().is_empty()
    {
        let log = log.split("-- END PROG LOAD LOG --").next().unwrap_or(log);
        return VerifyError::Refused { summary: summary(log), log: log.to_owned() };
    }
    match error.kind() {
        io::ErrorKind::PermissionDenied => VerifyError::NotPermitted { error },
        _ => VerifyError::Failed { error, said: said.trim_end().to_owned() },
    }
}

/// The last lines of a verifier's log without the statistics at its end.
fn summary(log: &str) -> String {
    last_lines(log, 8).join("\n")
}
