//! From the threads of a run to the figures of a line, and from the lines so far to running medians.

use crate::drive::driver::RunResult;
use crate::drive::exchange::End;
use crate::drive::open::OpenRecord;
use crate::record::Latencies;
use crate::record::fault::Faults;

/// The figures of one run, all threads together.
///
/// The rate is the number of correct replies divided by the wall time from the first thread's start to the
/// last thread's end. (The original divided by the median of the threads' times, which hides a slow thread.)
#[derive(Debug, Clone)]
pub(crate) struct Summary {
    pub(crate) number: u64,
    pub(crate) started_unix_s: f64,
    pub(crate) wall_s: f64,
    /// Correct replies.
    pub(crate) messages: u64,
    pub(crate) latencies: Latencies,
    pub(crate) faults: Faults,
    pub(crate) reordered: u64,
    pub(crate) sent_bytes: u64,
    pub(crate) received_bytes: u64,
    pub(crate) send_calls: u64,
    pub(crate) receive_calls: u64,
    pub(crate) replies_per_receive_max: u64,
    /// User and system time of all threads.
    pub(crate) cpu_s: f64,
    /// Elapsed time of the threads in seconds, ascending.
    pub(crate) thread_s: Vec<f64>,
    pub(crate) dropped: u64,
    pub(crate) open: Option<OpenRecord>,
    /// Why threads gave up, if they did.
    pub(crate) failures: Vec<String>,
}

impl Summary {
    pub(crate) fn of(run: &RunResult) -> Summary {
        let first_ns = run.threads.iter().map(|t| t.start_ns).min().unwrap_or(0);
        let last_ns = run.threads.iter().map(|t| t.end_ns).max().unwrap_or(0);
        let mut summary = Summary {
            number: run.number,
            started_unix_s: run.started_unix_s,
            wall_s: (last_ns - first_ns) as f64 / 1e9,
            messages: 0,
            latencies: Latencies::new(),
            faults: Faults::default(),
            reordered: 0,
            sent_bytes: 0,
            received_bytes: 0,
            send_calls: 0,
            receive_calls: 0,
            replies_per_receive_max: 0,
            cpu_s: 0.0,
            thread_s: Vec::with_capacity(run.threads.len()),
            dropped: 0,
            open: None,
            failures: Vec::new(),
        };
        for thread in &run.threads {
            let record = &thread.record;
            summary.latencies.merge(&record.latencies);
            summary.faults.merge(&record.faults);
            summary.reordered += record.reordered;
            summary.sent_bytes += record.sent_bytes;
            summary.received_bytes += record.received_bytes;
            summary.send_calls += record.send_calls;
            summary.receive_calls += record.receive_calls;
            summary.replies_per_receive_max = summary.replies_per_receive_max.max(record.replies_per_receive_max);
            summary.cpu_s += thread.cpu_ns as f64 / 1e9;
            summary.thread_s.push(thread.elapsed_ns() as f64 / 1e9);
            summary.dropped += thread.dropped;
            if let Some(open) = &thread.open {
                summary.open.get_or_insert_with(OpenRecord::new).merge(open);
            }
            if let End::Failed(reason) = &thread.end {
                summary.failures.push(reason.clone());
            }
        }
        summary.messages = summary.latencies.count();
        summary.thread_s.sort_by(f64::total_cmp);
        summary
    }

    /// Correct replies per second.
    pub(crate) fn rate_per_s(&self) -> f64 {
        per(self.messages as f64, self.wall_s)
    }

    /// Bits sent and received, record marks and message headers included, in 10^6 per second.
    pub(crate) fn mbps(&self) -> f64 {
        per((self.sent_bytes + self.received_bytes) as f64 * 8.0 / 1e6, self.wall_s)
    }

    /// Client CPU per correct reply, in microseconds.
    pub(crate) fn cpu_us_per_message(&self) -> f64 {
        per(self.cpu_s * 1e6, self.messages as f64)
    }

    /// Whether every reply was right and none is missing.
    pub(crate) fn is_clean(&self) -> bool {
        self.faults.total() == 0 && self.failures.is_empty()
    }
}

/// `amount / of`; 0 where there is nothing to divide by.
pub(crate) fn per(amount: f64, of: f64) -> f64 {
    match of > 0.0 {
        true => amount / of,
        false => 0.0,
    }
}

/// Median and mean of the values seen so far: one per run, so endless runs stay cheap.
#[derive(Debug, Clone, Default)]
pub(crate) struct Running {
    sorted: Vec<f64>,
    sum: f64,
}

impl Running {
    pub(crate) fn add(&mut self, value: f64) {
        let at = self.sorted.partition_point(|have| *have < value);
        self.sorted.insert(at, value);
        self.sum += value;
    }

    pub(crate) fn len(&self) -> usize {
        self.sorted.len()
    }

    /// The middle value, or the mean of the two middle ones.
    pub(crate) fn median(&self) -> f64 {
        median_of_sorted(&self.sorted)
    }

    pub(crate) fn mean(&self) -> f64 {
        per(self.sum, self.sorted.len() as f64)
    }

    pub(crate) fn min(&self) -> f64 {
        self.sorted.first().copied().unwrap_or(0.0)
    }

    pub(crate) fn max(&self) -> f64 {
        self.sorted.last().copied().unwrap_or(0.0)
    }
}

/// The middle of ascending values, or the mean of the two middle ones; 0 for none.
pub(crate) fn median_of_sorted(sorted: &[f64]) -> f64 {
    let middle = sorted.len() / 2;
    match (sorted.len(), sorted.len() % 2) {
        (0, _) => 0.0,
        (_, 1) => sorted[middle],
        _ => (sorted[middle - 1] + sorted[middle]) / 2.0,
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::drive::driver::ThreadResult;
    use crate::options::target::Endpoint;
    use crate::record::Record;
    use crate::record::fault::Fault;
    use proptest::prelude::*;

    /// A thread that ran from `start_ns` to `end_ns` and got a correct reply for every latency.
    pub(crate) fn thread(start_ns: u64, end_ns: u64, latencies_ns: &[u64]) -> ThreadResult {
        let mut record = Record::new();
        for &latency in latencies_ns {
            record.latencies.record(latency);
            record.settled += 1;
            record.sent_bytes += 44;
            record.received_bytes += 28;
            record.send_calls += 1;
            record.receive_calls += 1;
        }
        record.replies_per_receive_max = 1;
        ThreadResult {
            index: 0,
            cpu: Some(0),
            peer: Endpoint::Inet("127.0.0.1:62049".parse().unwrap()),
            record,
            open: None,
            start_ns,
            end_ns,
            cpu_ns: (end_ns - start_ns) / 2,
            runqueue_wait_ns: 0,
            dropped: 0,
            end: End::Done,
        }
    }

    pub(crate) fn run(number: u64, threads: Vec<ThreadResult>) -> RunResult {
        RunResult { number, started_unix_s: 1_700_000_000.5, threads }
    }

    #[test]
    fn a_run_is_summed_over_its_threads() {
        let summary = Summary::of(&run(
            1,
            vec![
                thread(1_000_000_000, 2_000_000_000, &[10_000, 20_000]),
                thread(1_500_000_000, 3_000_000_000, &[30_000, 40_000, 50_000, 60_000]),
            ],
        ));
        assert_eq!(summary.messages, 6);
        assert_eq!(summary.wall_s, 2.0);
        assert_eq!(summary.rate_per_s(), 3.0);
        assert_eq!(summary.thread_s, [1.0, 1.5]);
        assert_eq!(summary.cpu_s, 1.25);
        assert!((summary.cpu_us_per_message() - 1.25e6 / 6.0).abs() < 1e-6);
        assert!((summary.mbps() - 6.0 * 72.0 * 8.0 / 1e6 / 2.0).abs() < 1e-12);
        assert_eq!((summary.latencies.min(), summary.latencies.max_ns), (10_000, 60_000));
        assert!(summary.is_clean());
    }

    #[test]
    fn a_fault_or_a_failed_thread_is_not_clean() {
        let mut wrong = thread(0, 1, &[1]);
        wrong.record.fault(Fault::Lost, 2, String::new);
        assert!(!Summary::of(&run(1, vec![wrong])).is_clean());
        let mut broken = thread(0, 1, &[1]);
        broken.end = End::Failed("x".into());
        assert!(!Summary::of(&run(1, vec![broken])).is_clean());
    }

    #[test]
    fn nothing_measured_divides_nothing() {
        let summary = Summary::of(&run(1, vec![thread(5, 5, &[])]));
        let figures = [summary.rate_per_s(), summary.mbps(), summary.cpu_us_per_message()];
        assert_eq!(figures, [0.0; 3]);
        assert_eq!(Running::default().median(), 0.0);
    }

    proptest! {
        #[test]
        fn running_figures_equal_those_of_the_whole(values in proptest::collection::vec(0.0f64..1e6, 1..60)) {
            let mut running = Running::default();
            for value in &values {
                running.add(*value);
            }
            let mut sorted = values.clone();
            sorted.sort_by(f64::total_cmp);
            prop_assert_eq!(running.median(), median_of_sorted(&sorted));
            prop_assert_eq!((running.min(), running.max()), (sorted[0], sorted[sorted.len() - 1]));
            let mean = values.iter().sum::<f64>() / values.len() as f64;
            prop_assert!((running.mean() - mean).abs() <= 1e-9 * mean.max(1.0));
            let below = sorted.iter().filter(|v| **v <= running.median()).count();
            prop_assert!(2 * below >= sorted.len());
        }
    }
}
