//! What libbpf says while it loads.

use std::sync::{Mutex, MutexGuard, PoisonError};

use libbpf_rs::{PrintCallback, PrintLevel, set_print};

/// Collects what libbpf prints while it lives. libbpf has one printer per process, so loads take turns.
pub struct Capture {
    before: Option<(PrintLevel, PrintCallback)>,
    _turn: MutexGuard<'static, ()>,
}

static TURN: Mutex<()> = Mutex::new(());
static SAID: Mutex<String> = Mutex::new(String::new());

impl Capture {
    /// Waits for its turn and takes the printer.
    pub fn start() -> Self {
        fn collect(_: PrintLevel, text: String) {
            said().push_str(&text);
        }
        // A panic in another load leaves nothing half-done here.
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        said().clear();
        Self { before: set_print(Some((PrintLevel::Warn, collect))), _turn: turn }
    }

    /// What was said so far.
    pub fn text(&self) -> String {
        said().clone()
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        set_print(self.before.take());
    }
}

fn said() -> MutexGuard<'static, String> {
    SAID.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The last `most` lines of a log that say something, without the verifier's statistics and libbpf's frame around them.
pub fn last_lines(log: &str, most: usize) -> Vec<&str> {
    const NO_NEWS: [&str; 4] = ["processed ", "verification time", "stack depth", "libbpf: failed to load"];
    let is_news = |line: &&str| {
        let line = line.trim();
        !line.is_empty() && !NO_NEWS.iter().any(|start| line.starts_with(start)) && !line.contains("END PROG LOAD LOG")
    };
    let lines: Vec<&str> = log.lines().filter(is_news).collect();
    lines[lines.len().saturating_sub(most)..].to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statistics_are_no_news() {
        let log = "0: R1=ctx()\n\ninvalid access to packet\nprocessed 12 insns (limit 1000000)\nstack depth 8\n\
                   -- END PROG LOAD LOG --\nlibbpf: failed to load object 'x'\n";
        assert_eq!(last_lines(log, 5), ["0: R1=ctx()", "invalid access to packet"]);
        assert_eq!(last_lines(log, 1), ["invalid access to packet"]);
    }

    /// Who has the printer while nobody captures.
    fn owner() -> Option<usize> {
        Capture::start().before.map(|(_, callback)| callback as usize)
    }

    #[test]
    fn each_load_hears_its_own_and_leaves_the_printer_as_it_was() {
        let owner_before = owner();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..50 {
                        let capture = Capture::start();
                        assert_eq!(capture.text(), "");
                        assert!(libbpf_rs::ObjectBuilder::default().open_memory(b"no object").is_err());
                        assert_eq!(capture.text().matches("not a proper ELF object").count(), 1, "{}", capture.text());
                    }
                });
            }
        });
        assert_eq!(owner(), owner_before, "the printer was not given back");
    }
}
