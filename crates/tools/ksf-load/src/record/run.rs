//! One run: what its threads measured, each and together.

use crate::drive::schedule::Lateness;
use crate::drive::spin::SpinRecord;
use crate::options::target::Endpoint;
use crate::record::running::per;
use crate::record::sink::Share;
use crate::record::{Counters, Latencies, Record};

/// What one thread did in one run.
#[derive(Debug, Clone)]
pub(crate) struct ThreadRun<C> {
    pub(crate) cpu: Option<usize>,
    pub(crate) record: Record<C>,
    pub(crate) lateness: Option<Lateness>,
    /// CLOCK_MONOTONIC.
    pub(crate) start_ns: u64,
    /// The end of what counts for rates.
    pub(crate) end_ns: u64,
    /// Until the last reply was taken or given up.
    pub(crate) elapsed_ns: u64,
    /// User and system time.
    pub(crate) cpu_ns: u64,
    pub(crate) runqueue_wait_ns: u64,
    /// Of the connections that were to last, with what each brought.
    pub(crate) peers: Vec<(Endpoint, Share)>,
    /// Datagrams that the sockets' receive buffers had no room for.
    pub(crate) dropped: u64,
    pub(crate) spin: SpinRecord,
    /// The user ended it.
    pub(crate) interrupted: bool,
    /// It was ended because not one of the first connections was established.
    pub(crate) hopeless: bool,
}

/// What one run did.
#[derive(Debug, Clone)]
pub(crate) struct RunRecord<C> {
    /// From 1.
    pub(crate) number: u64,
    pub(crate) started_unix_s: f64,
    pub(crate) threads: Vec<ThreadRun<C>>,
    /// All threads together.
    pub(crate) record: Record<C>,
    /// Of all operations.
    pub(crate) latencies: Latencies,
    /// Only in an open loop.
    pub(crate) lateness: Option<Lateness>,
}

impl<C: Counters> RunRecord<C> {
    /// Sums up the threads, in their order; there is at least one.
    pub(crate) fn new(number: u64, started_unix_s: f64, threads: Vec<ThreadRun<C>>) -> RunRecord<C> {
        let (first, rest) = threads.split_first().expect("a run has a thread");
        let mut run = RunRecord {
            number,
            started_unix_s,
            record: first.record.clone(),
            latencies: Latencies::new(),
            lateness: first.lateness.clone(),
            threads: Vec::new(),
        };
        for thread in rest {
            run.record.merge(&thread.record);
            if let (Some(mine), Some(theirs)) = (&mut run.lateness, &thread.lateness) {
                mine.merge(theirs);
            }
        }
        run.latencies = Latencies::sum(&run.record.latencies);
        run.threads = threads;
        run
    }

    pub(crate) fn start_ns(&self) -> u64 {
        self.threads.iter().map(|thread| thread.start_ns).min().unwrap_or(0)
    }

    /// From the first thread's start to the last thread's end.
    pub(crate) fn wall_s(&self) -> f64 {
        let end_ns = self.threads.iter().map(|thread| thread.end_ns).max().unwrap_or(0);
        (end_ns - self.start_ns()) as f64 / 1e9
    }

    /// Right replies per second of wall time. (The original divided by the median of the threads' times, which hides
    /// a slow thread.)
    pub(crate) fn rate_per_s(&self) -> f64 {
        per(self.record.answered_in_time as f64, self.wall_s())
    }

    /// Bits sent and received, record marks and message headers included, in 10^6 per second.
    pub(crate) fn mbps(&self) -> f64 {
        per((self.record.sent_bytes + self.record.received_bytes) as f64 * 8.0 / 1e6, self.wall_s())
    }

    /// User and system time of all threads.
    pub(crate) fn cpu_s(&self) -> f64 {
        self.threads.iter().map(|thread| thread.cpu_ns).sum::<u64>() as f64 / 1e9
    }

    /// The same per right reply, in microseconds.
    pub(crate) fn cpu_us_per_reply(&self) -> f64 {
        per(self.cpu_s() * 1e6, self.record.answered as f64)
    }

    /// Elapsed time of the threads in seconds, ascending.
    pub(crate) fn thread_s(&self) -> Vec<f64> {
        let mut seconds: Vec<f64> = self.threads.iter().map(|thread| thread.elapsed_ns as f64 / 1e9).collect();
        seconds.sort_by(f64::total_cmp);
        seconds
    }

    /// Datagrams that this machine dropped.
    pub(crate) fn dropped(&self) -> u64 {
        self.threads.iter().map(|thread| thread.dropped).sum()
    }

    /// What polling before sleeping brought.
    pub(crate) fn spin(&self) -> SpinRecord {
        let mut spin = SpinRecord::default();
        self.threads.iter().for_each(|thread| spin.merge(&thread.spin));
        spin
    }

    pub(crate) fn is_interrupted(&self) -> bool {
        self.threads.iter().any(|thread| thread.interrupted)
    }

    /// The addresses of the connections that were to last, each once.
    pub(crate) fn addresses(&self) -> Vec<String> {
        let mut addresses: Vec<String> = Vec::new();
        for (peer, _) in self.threads.iter().flat_map(|thread| &thread.peers) {
            let address = peer.to_string();
            if !addresses.contains(&address) {
                addresses.push(address);
            }
        }
        addresses
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::record::{Fault, Moment};

    /// A thread that ran from `start_ns` to `end_ns` and got a right reply for every latency.
    pub(crate) fn thread(start_ns: u64, end_ns: u64, latencies_ns: &[u64]) -> ThreadRun<()> {
        let mut record = Record::new(1, false);
        for &latency in latencies_ns {
            record.started += 1;
            record.answer(0, latency, end_ns);
            record.sent_bytes += 44;
            record.received_bytes += 28;
            record.calls.sends += 1;
            record.calls.receives += 1;
        }
        record.calls.replies_per_receive_max = 1;
        ThreadRun {
            cpu: Some(0),
            record,
            lateness: None,
            start_ns,
            end_ns,
            elapsed_ns: end_ns - start_ns,
            cpu_ns: (end_ns - start_ns) / 2,
            runqueue_wait_ns: 0,
            peers: vec![(Endpoint::Inet("127.0.0.1:62049".parse().unwrap()), Share::default())],
            dropped: 0,
            spin: SpinRecord::default(),
            interrupted: false,
            hopeless: false,
        }
    }

    pub(crate) fn run(number: u64, threads: Vec<ThreadRun<()>>) -> RunRecord<()> {
        RunRecord::new(number, 1_700_000_000.5, threads)
    }

    #[test]
    fn a_run_is_summed_over_its_threads() {
        let run = run(
            1,
            vec![
                thread(1_000_000_000, 2_000_000_000, &[10_000, 20_000]),
                thread(1_500_000_000, 3_000_000_000, &[30_000, 40_000, 50_000, 60_000]),
            ],
        );
        assert_eq!((run.record.answered, run.wall_s(), run.rate_per_s()), (6, 2.0, 3.0));
        assert_eq!((run.thread_s(), run.cpu_s()), (vec![1.0, 1.5], 1.25));
        assert!((run.cpu_us_per_reply() - 1.25e6 / 6.0).abs() < 1e-6);
        assert!((run.mbps() - 6.0 * 72.0 * 8.0 / 1e6 / 2.0).abs() < 1e-12);
        assert_eq!((run.latencies.min(), run.latencies.max_ns), (10_000, 60_000));
        assert_eq!(run.addresses(), ["127.0.0.1:62049"]);
        assert!(run.record.is_clean() && run.record.check(0, 0, 0).is_ok());
    }

    #[test]
    fn a_fault_or_a_failed_thread_is_not_clean() {
        let mut wrong = thread(0, 1, &[1]);
        wrong.record.fault(Fault::Lost, 2, Moment { now_ns: 0, connection: 0 }, String::new);
        assert!(!run(1, vec![wrong]).record.is_clean());
        let mut broken = thread(0, 1, &[1]);
        broken.record.failures.push("x".into());
        assert!(!run(1, vec![thread(0, 1, &[1]), broken]).record.is_clean());
    }

    #[test]
    fn nothing_measured_divides_nothing() {
        let run = run(1, vec![thread(5, 5, &[])]);
        assert_eq!([run.rate_per_s(), run.mbps(), run.cpu_us_per_reply()], [0.0; 3]);
    }
}
