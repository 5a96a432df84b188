//! Ignored tests. There are two kinds, and the reason says which:
//!
//! * `soak: REASON`: a test that is too slow or too demanding for every run. `make soak` runs it.
//! * anything else: a helper, an ignored test of the same file that another test runs in a process of its own. Run by
//!   hand it returns at once, so `make soak` may run all ignored tests.
//!
//! ```text
//!   #[test] #[ignore = "a part of the test above"]
//!   fn helper_does_it() {
//!       if !is_helper() { return; }          // run by hand
//!       say("ready");                        // Helper::hear
//!       while let Some(line) = listen() {}   // Helper::tell
//!   }
//! ```

use std::fmt::Display;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::Running;

const HELPER: &str = "KSF_TEST_HELPER";

/// What the helper says begins with this: its test runner talks on the same stream.
const SAYS: &str = "helper: ";

/// A helper that runs. It is killed when this is dropped.
#[derive(Debug)]
pub struct Helper(Running);

impl Helper {
    /// A command that runs the test with this name, with its module: `common::helper_joins`.
    pub fn command(test: &str) -> Command {
        Self::command_of(&std::env::current_exe().expect("/proc is mounted"), test)
    }

    /// The same of a copy of this program.
    pub fn command_of(copy: &Path, test: &str) -> Command {
        let mut command = Command::new(copy);
        // With one thread, the number for one CPU, the harness would print the name of the test in front of the helper's first line.
        let arguments = ["--exact", test, "--ignored", "--nocapture", "--test-threads", "2"];
        command.args(arguments).env(HELPER, "1");
        command
    }

    /// Starts it, to be talked to.
    #[track_caller]
    pub fn start(test: &str, env: &[(&str, String)]) -> Self {
        let mut command = Self::command(test);
        command.envs(env.iter().map(|(name, value)| (name, value)));
        Self(Running::start(command.stdin(Stdio::piped()).stdout(Stdio::piped())))
    }

    /// The number of its process.
    pub fn pid(&self) -> u32 {
        self.0.pid()
    }

    /// What it says next.
    #[track_caller]
    pub fn hear(&mut self) -> String {
        let line = self.0.out.with(SAYS);
        line.split_once(SAYS).expect("the line has it").1.trim().to_owned()
    }

    /// Tells it a line.
    #[track_caller]
    pub fn tell(&mut self, line: &str) {
        self.0.tell(line);
    }

    /// Tells it a line; what it says then.
    #[track_caller]
    pub fn ask(&mut self, line: &str) -> String {
        self.tell(line);
        self.hear()
    }
}

/// False when an ignored test is run by hand: it is only a part of another one.
pub fn is_helper() -> bool {
    std::env::var_os(HELPER).is_some()
}

/// Says a line to the process that started this one.
pub fn say(line: impl Display) {
    println!("{SAYS}{line}");
    std::io::stdout().flush().expect("stdout is open");
}

/// What that process tells; `None` when it is gone.
pub fn listen() -> Option<String> {
    let mut line = String::new();
    let read = std::io::stdin().read_line(&mut line).expect("stdin is open");
    (read > 0).then(|| line.trim().to_owned())
}
