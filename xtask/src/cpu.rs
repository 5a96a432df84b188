//! CPU time, events and memory as the kernel tells them.

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result};
use ksf::cpus::CpuSet;
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeVal;
use rustix::process::Pid;

/// The kernel's unit of CPU time in /proc, 1/100 s on every Linux (USER_HZ).
const TICKS_PER_SECOND: u64 = 100;

/// What was spent so far: by a server, by the bench itself, and by everything.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Spent {
    /// User and system time of the server's process, all threads.
    pub(crate) process: Duration,
    /// User and system time of this process and of its children that have ended: the clients.
    pub(crate) clients: Duration,
    /// All CPUs, everything but idle and waiting for disks: also softirq and kernel threads.
    pub(crate) machine: Duration,
    pub(crate) events: Events,
}

/// What has happened so far.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Events {
    /// Context switches of the whole machine.
    pub(crate) switches: u64,
    /// Interrupts of the whole machine, timers and those between CPUs among them.
    pub(crate) interrupts: u64,
    /// Interrupts between CPUs, to run a task or a function there.
    pub(crate) between_cpus: u64,
    /// Runs of the softirq that takes received packets.
    pub(crate) receive_softirqs: u64,
    /// How often children of this process that have ended, the clients, had gone to sleep.
    pub(crate) clients_slept: u64,
}

/// How often a process stopped running.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Switches {
    /// It waited for something.
    pub(crate) slept: u64,
    /// Another was to run.
    pub(crate) preempted: u64,
}

impl Switches {
    /// Of all children of this process that were waited for, their threads and their own children.
    pub(crate) fn of_children() -> Result<Switches> {
        let usage = getrusage(UsageWho::RUSAGE_CHILDREN).context("no usage of children")?;
        let count = |count: i64| u64::try_from(count).unwrap_or(0);
        Ok(Switches {
            slept: count(usage.voluntary_context_switches()),
            preempted: count(usage.involuntary_context_switches()),
        })
    }

    pub(crate) fn since(&self, earlier: &Switches) -> Switches {
        Switches { slept: self.slept - earlier.slept, preempted: self.preempted - earlier.preempted }
    }
}

impl Spent {
    /// Reads all at about the same moment.
    pub(crate) fn read(pid: u32) -> Result<Spent> {
        let of_machine = fs::read_to_string("/proc/stat")?;
        let interrupts = fs::read_to_string("/proc/interrupts")?;
        let number = |key, field| stat_number(&of_machine, key, field);
        Ok(Spent {
            process: process_time(pid)?,
            clients: used_by(UsageWho::RUSAGE_SELF)? + used_by(UsageWho::RUSAGE_CHILDREN)?,
            machine: machine_busy(&of_machine)?,
            events: Events {
                switches: number("ctxt", 1)?,
                interrupts: number("intr", 1)?,
                between_cpus: between_cpus(&interrupts),
                // Of all, HI, TIMER, NET_TX, NET_RX and so on (kernel/softirq.c).
                receive_softirqs: number("softirq", 5)?,
                clients_slept: Switches::of_children()?.slept,
            },
        })
    }

    /// What was spent between `earlier` and this.
    pub(crate) fn since(&self, earlier: &Spent) -> Spent {
        let (now, then) = (&self.events, &earlier.events);
        Spent {
            process: self.process.saturating_sub(earlier.process),
            clients: self.clients.saturating_sub(earlier.clients),
            machine: self.machine.saturating_sub(earlier.machine),
            events: Events {
                switches: now.switches - then.switches,
                interrupts: now.interrupts - then.interrupts,
                between_cpus: now.between_cpus - then.between_cpus,
                receive_softirqs: now.receive_softirqs - then.receive_softirqs,
                clients_slept: now.clients_slept - then.clients_slept,
            },
        }
    }

    /// What neither the server's process nor the clients spent: interrupts, work queues, and
    /// whatever else ran on the machine.
    pub(crate) fn other(&self) -> Duration {
        self.machine.saturating_sub(self.process).saturating_sub(self.clients)
    }
}

/// User and system time of a process, all threads, to the nanosecond: /proc has it in hundredths of a second only.
pub(crate) fn process_time(pid: u32) -> Result<Duration> {
    let ns = ksf_load::process_cpu_ns(pid).with_context(|| format!("no CPU time of process {pid}"))?;
    Ok(Duration::from_nanos(ns))
}

/// User and system time of this process, or of its children that were waited for.
fn used_by(who: UsageWho) -> Result<Duration> {
    let usage = getrusage(who).context("no usage")?;
    let time = |time: TimeVal| Duration::new(time.tv_sec() as u64, time.tv_usec() as u32 * 1000);
    Ok(time(usage.user_time()) + time(usage.system_time()))
}

/// Private memory of a process that is not backed by files, in bytes: stacks, heap, pools.
pub(crate) fn anonymous_bytes(pid: u32) -> Result<u64> {
    let text =
        fs::read_to_string(format!("/proc/{pid}/status")).with_context(|| format!("no status of process {pid}"))?;
    // Shared memory counts, too: a pool may live in a memfd.
    let kib: u64 = ["RssAnon:", "RssShmem:"].iter().filter_map(|key| status_kib(&text, key)).sum();
    Ok(kib * 1024)
}

/// The CPUs that another process or thread may run on, in order.
pub(crate) fn allowed_to(thread: u32) -> Result<Vec<usize>> {
    let pid = i32::try_from(thread).ok().and_then(Pid::from_raw).context("no such thread")?;
    let cpus = CpuSet::of_thread(Some(pid)).with_context(|| format!("no CPUs of thread {thread}"))?;
    Ok(cpus.iter().collect())
}

/// Busy time in the first line of /proc/stat: user nice system idle iowait irq softirq steal.
fn machine_busy(stat: &str) -> Result<Duration> {
    let line = stat.lines().next().and_then(|line| line.strip_prefix("cpu "));
    let fields: Vec<u64> = line
        .context("/proc/stat does not begin with 'cpu '")?
        .split_ascii_whitespace()
        .map(|field| field.parse().context("/proc/stat has no numbers"))
        .collect::<Result<_>>()?;
    let busy = [0, 1, 2, 5, 6].iter().filter_map(|&index| fields.get(index)).sum();
    Ok(ticks(busy))
}

/// A field of a line of /proc/stat, counted from 0, the key.
fn stat_number(stat: &str, key: &str, field: usize) -> Result<u64> {
    let line = stat.lines().find(|line| line.split(' ').next() == Some(key));
    let number = line.and_then(|line| line.split(' ').nth(field)?.parse().ok());
    number.with_context(|| format!("/proc/stat has no field {field} of {key}"))
}

/// The sum over all CPUs of two lines of /proc/interrupts, which have other names on other processors.
fn between_cpus(interrupts: &str) -> u64 {
    let is_between =
        |line: &&str| ["Rescheduling interrupts", "Function call interrupts"].iter().any(|end| line.ends_with(end));
    let counts = interrupts.lines().filter(is_between).flat_map(|line| line.split_whitespace().skip(1));
    counts.map_while(|word| Some(word.parse::<u64>().ok())).flatten().sum()
}

fn status_kib(status: &str, key: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix(key))?;
    line.split_ascii_whitespace().next()?.parse().ok()
}

fn ticks(count: u64) -> Duration {
    Duration::from_millis(count * 1000 / TICKS_PER_SECOND)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_iowait_and_steal_are_not_busy() {
        let stat = "cpu  100 10 200 99999 8888 1 2 777 0 0\ncpu0 1 1 1 1\n";
        assert_eq!(machine_busy(stat).unwrap(), Duration::from_millis(3130));
    }

    #[test]
    fn other_time_is_what_nobody_claims() {
        let ms = Duration::from_millis;
        let time = Spent { process: ms(100), clients: ms(300), machine: ms(450), ..Spent::default() };
        assert_eq!(time.other(), ms(50));
        let skewed = Spent { process: ms(300), ..time };
        assert_eq!(skewed.other(), ms(0));
    }

    #[test]
    fn events_are_found() {
        let stat = "cpu  1 2\nintr 5414 0 7\nctxt 19579351\nsoftirq 264 0 37 16 239 68 0\n";
        assert_eq!(stat_number(stat, "ctxt", 1).unwrap(), 19_579_351);
        assert_eq!(stat_number(stat, "softirq", 5).unwrap(), 239);
        assert!(stat_number(stat, "softirq", 9).is_err() && stat_number(stat, "soft", 1).is_err());
        let interrupts = "           CPU0       CPU1\n 24:  1  0  IO-APIC  5-edge  ACPI\n LOC:  9  9  Local timer interrupts\n\
                          RES:      56      50   Rescheduling interrupts\nIPI1:  200  100   Function call interrupts\n";
        assert_eq!(between_cpus(interrupts), 406);
    }

    #[test]
    fn a_child_that_waits_has_slept() {
        let before = Switches::of_children().unwrap();
        let slept = std::process::Command::new("sleep").arg("0.01").status().unwrap();
        assert!(slept.success() && Switches::of_children().unwrap().since(&before).slept > 0);
    }

    #[test]
    fn this_process_has_cpus_memory_and_time() {
        let pid = std::process::id();
        assert_eq!(allowed_to(pid).unwrap(), ksf::cpus::allowed().unwrap());
        assert!(anonymous_bytes(pid).unwrap() > 0);
        let time = process_time(pid).unwrap();
        assert!(time > Duration::ZERO && process_time(pid).unwrap() > time);
        assert!(Spent::read(pid).unwrap().machine > Duration::ZERO);
    }
}
