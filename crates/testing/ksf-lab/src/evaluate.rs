//! What a machine left behind, and what that means.

use std::fmt;
use std::time::Duration;

use crate::error::Error;

/// Lines of a log that an error shows.
const TAIL_LINES: usize = 40;

/// How the program ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RunStatus {
    /// It returned this exit status, 0 to 255.
    Exited(u8),
    /// This signal killed it.
    Signaled(u8),
}

impl fmt::Display for RunStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RunStatus::Exited(code) => write!(f, "returned {code}"),
            RunStatus::Signaled(signal) => write!(f, "was killed by signal {signal}"),
        }
    }
}

/// A program that ran to its end. That it failed is not an error of the laboratory.
#[derive(Debug, Clone)]
pub struct RunOutcome {
    /// How it ended.
    pub status: RunStatus,
    /// What it wrote to standard output and standard error, in the order it was written; bytes that are not UTF-8 are
    /// replaced.
    pub output: String,
    /// The kernel's log, from warnings up; with the kernel argument `loglevel=7` all of it.
    pub console: String,
}

impl RunOutcome {
    /// Whether the program returned 0.
    pub fn success(&self) -> bool {
        self.status == RunStatus::Exited(0)
    }

    /// The output of a program that returned 0; else [`Error::Failed`] with the end of the output.
    pub fn checked(self) -> Result<String, Error> {
        if self.success() {
            return Ok(self.output);
        }
        Err(Error::Failed { status: self.status, output: tail(&self.output) })
    }
}

/// How long a machine may take.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RunLimits {
    /// From QEMU's start to the program's.
    pub(crate) boot: Duration,
    /// From the program's start to the machine's end.
    pub(crate) program: Duration,
}

/// Everything that came out of QEMU.
#[derive(Debug, Default)]
pub(crate) struct Remains {
    pub(crate) console: Vec<u8>,
    pub(crate) output: Vec<u8>,
    pub(crate) report: Vec<u8>,
    /// QEMU's own messages.
    pub(crate) messages: Vec<u8>,
    /// Set once QEMU has ended.
    pub(crate) end: Option<End>,
}

/// How QEMU ended.
#[derive(Debug, Clone)]
pub(crate) struct End {
    pub(crate) timed_out: bool,
    /// Its exit status in words, if it was not success.
    pub(crate) failure: Option<String>,
}

impl Remains {
    /// Whether the machine said that it is about to start the program.
    pub(crate) fn started(&self) -> bool {
        self.reported(b"ready\n")
    }

    fn reported(&self, line: &[u8]) -> bool {
        self.report.split_inclusive(|byte| *byte == b'\n').any(|found| found == line)
    }

    /// What a machine that has ended came to.
    pub(crate) fn evaluate(&self, limits: RunLimits) -> Result<RunOutcome, Error> {
        let console = text(&self.console);
        // First, because a kernel may panic after the program ended, from what the program did.
        if let Some(what) = panic_in(&console) {
            return Err(Error::Panic { what, console: tail(&console) });
        }
        for line in text(&self.report).lines() {
            if let Some(what) = line.strip_prefix("error ") {
                return Err(Error::Setup { what: what.to_owned(), console: tail(&console) });
            }
            if let Some(status) = status_in(line) {
                return Ok(RunOutcome { status, output: text(&self.output), console });
            }
        }
        match &self.end {
            Some(End { timed_out: true, .. }) => Err(Error::TimedOut {
                limit: if self.started() { limits.program } else { limits.boot },
                started: self.started(),
                output: tail(&text(&self.output)),
                console: tail(&console),
            }),
            Some(End { failure: Some(status), .. }) => {
                Err(Error::Qemu { status: status.clone(), messages: text(&self.messages).trim().to_owned() })
            }
            _ => Err(Error::NoReport { console: tail(&console) }),
        }
    }
}

fn status_in(line: &str) -> Option<RunStatus> {
    let (word, number) = line.split_once(' ')?;
    let number = number.parse().ok()?;
    match word {
        "exit" => Some(RunStatus::Exited(number)),
        "signal" => Some(RunStatus::Signaled(number)),
        _ => None,
    }
}

fn panic_in(console: &str) -> Option<String> {
    let (_, rest) = console.split_once("Kernel panic - not syncing: ")?;
    Some(rest.lines().next().unwrap_or_default().trim().to_owned())
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).replace("\r\n", "\n")
}

fn tail(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(TAIL_LINES)..].join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: RunLimits = RunLimits { boot: Duration::from_secs(2), program: Duration::from_secs(3) };

    fn remains(report: &str, console: &str) -> Remains {
        let end = Some(End { timed_out: false, failure: None });
        Remains {
            report: report.into(),
            console: console.into(),
            output: b"out\r\n".to_vec(),
            end,
            ..Remains::default()
        }
    }

    #[test]
    fn a_report_gives_the_status() {
        let outcome = remains("ready\nexit 7\n", "").evaluate(LIMIT).unwrap();
        assert_eq!((outcome.status, outcome.output.as_str()), (RunStatus::Exited(7), "out\n"));
        let outcome = remains("ready\nsignal 11\n", "").evaluate(LIMIT).unwrap();
        assert_eq!(outcome.status, RunStatus::Signaled(11));
        let error = outcome.checked().unwrap_err();
        assert_eq!(error.to_string(), "the program was killed by signal 11; end of its output:\nout");
    }

    #[test]
    fn a_panic_counts_also_after_the_report() {
        let console = "[ 1.5] BUG: x\n[    1.550211] Kernel panic - not syncing: Fatal exception\r\n[ 1.6] CPU: 0\r\n";
        let error = remains("ready\nexit 0\n", console).evaluate(LIMIT).unwrap_err();
        assert!(matches!(error, Error::Panic { what, .. } if what == "Fatal exception"));
    }

    #[test]
    fn what_init_could_not_do_is_an_error() {
        let error = remains("error cannot load module /x.ko: Exec format error\n", "").evaluate(LIMIT).unwrap_err();
        assert!(matches!(error, Error::Setup { what, .. } if what == "cannot load module /x.ko: Exec format error"));
    }

    #[test]
    fn a_time_limit_says_how_far_the_machine_came() {
        for (report, expected) in [("", (false, 2)), ("rea", (false, 2)), ("ready\n", (true, 3))] {
            let mut remains = remains(report, "");
            remains.end = Some(End { timed_out: true, failure: Some("signal: 9".into()) });
            let error = remains.evaluate(LIMIT).unwrap_err();
            let Error::TimedOut { started, limit, .. } = error else { panic!("{error}") };
            assert_eq!((started, limit.as_secs()), expected, "{report}");
        }
    }

    #[test]
    fn the_status_counts_even_if_powering_off_hangs() {
        let mut remains = remains("ready\nexit 0\n", "");
        remains.end = Some(End { timed_out: true, failure: Some("signal: 9".into()) });
        assert!(remains.evaluate(LIMIT).unwrap().success());
    }

    #[test]
    fn an_end_without_a_report_is_told_from_a_qemu_that_refused() {
        assert!(matches!(remains("ready\n", "").evaluate(LIMIT), Err(Error::NoReport { .. })));
        let mut remains = remains("", "");
        remains.end = Some(End { timed_out: false, failure: Some("exit status: 1".into()) });
        remains.messages = b"qemu: no such device\n".to_vec();
        let error = remains.evaluate(LIMIT).unwrap_err();
        assert_eq!(error.to_string(), "QEMU ended with exit status: 1: qemu: no such device");
    }

    #[test]
    fn a_tail_is_the_end() {
        let long: String = (0..100).map(|line| format!("{line}\n")).collect();
        assert!(tail(&long).starts_with("60\n") && tail(&long).ends_with("\n99"));
        assert_eq!(tail("one\n"), "one");
    }
}
