//! The progress line: on stderr, rewritten in place, only on runs that last.

use std::io::{IsTerminal, Write};
use std::time::Duration;

use crate::calls::args::CallPlan;
use crate::drive::threads::Progress;

/// Runs shorter than this show nothing.
const PATIENCE: Duration = Duration::from_secs(2);

/// The line and whether it stands on the screen.
#[derive(Debug)]
pub(crate) struct ProgressLine {
    enabled: bool,
    shown: bool,
    tool: &'static str,
    /// Over all threads.
    messages: Option<u64>,
    duration: Option<Duration>,
}

impl ProgressLine {
    /// For a terminal, or as the user said.
    pub(crate) fn new(plan: &CallPlan) -> ProgressLine {
        ProgressLine {
            enabled: plan.args.progress || !plan.args.no_progress && std::io::stderr().is_terminal(),
            shown: false,
            tool: plan.drive.tool,
            messages: plan.drive.requests,
            duration: plan.drive.duration,
        }
    }

    /// Shows how far a run is.
    pub(crate) fn show(&mut self, progress: Progress, err: &mut dyn Write) {
        if !self.enabled || progress.elapsed < PATIENCE {
            return;
        }
        self.shown = true;
        // Talk that cannot be delivered is dropped: the results matter.
        let _ = write!(err, "\r{}\x1b[K", self.text(progress)).and_then(|()| err.flush());
    }

    /// Takes the line away before something else is printed.
    pub(crate) fn clear(&mut self, err: &mut dyn Write) {
        if std::mem::take(&mut self.shown) {
            let _ = write!(err, "\r\x1b[K").and_then(|()| err.flush());
        }
    }

    fn text(&self, progress: Progress) -> String {
        let seconds = progress.elapsed.as_secs_f64();
        let mut text = format!(
            "{}: run {}, {seconds:.0} s, {} replies, {:.0}/s",
            self.tool,
            progress.run,
            progress.settled,
            progress.settled as f64 / seconds
        );
        let by_count = self.messages.map(|messages| progress.settled as f64 / messages as f64);
        let by_time = self.duration.map(|duration| seconds / duration.as_secs_f64());
        if let Some(part) = [by_count, by_time].into_iter().flatten().reduce(f64::max) {
            text += &format!(", {:.0} %", (part * 100.0).min(100.0));
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(messages: Option<u64>, duration: Option<Duration>) -> ProgressLine {
        ProgressLine { enabled: true, shown: false, tool: "rpctest", messages, duration }
    }

    fn at(seconds: u64) -> Progress {
        Progress { run: 3, settled: 1000, elapsed: Duration::from_secs(seconds) }
    }

    #[test]
    fn it_says_how_far_the_run_is() {
        let text = line(Some(2000), None).text(at(10));
        assert_eq!(text, "rpctest: run 3, 10 s, 1000 replies, 100/s, 50 %");
        let text = line(None, Some(Duration::from_secs(40))).text(at(10));
        assert!(text.ends_with("25 %"), "{text}");
    }

    #[test]
    fn short_runs_show_nothing_and_long_ones_clean_up() {
        let (mut line, mut screen) = (line(None, None), Vec::new());
        line.show(at(1), &mut screen);
        line.clear(&mut screen);
        assert!(screen.is_empty());
        line.show(at(3), &mut screen);
        line.clear(&mut screen);
        line.clear(&mut screen);
        let text = String::from_utf8(screen).unwrap();
        assert_eq!(text.matches('\r').count(), 2);
        assert!(text.ends_with("\r\x1b[K"));
    }
}
