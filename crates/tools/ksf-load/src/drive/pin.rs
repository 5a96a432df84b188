//! On which CPU each thread runs.

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::error::LoadError;

/// From how many threads on the original no longer pinned them.
const PINNED_THREADS_MAX: usize = 16;

/// Which threads are pinned where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Pinning {
    /// `--no-pin`: the scheduler decides.
    Off,
    /// As the original: thread i on the i-th CPU of the process's mask, for fewer than 16 threads. Threads beyond
    /// the mask start again at its first CPU (the original put them all on CPU 0, in the mask or not).
    Mask,
    /// `--cpu LIST`: thread i on the i-th CPU of the list, round and round.
    List(Vec<usize>),
}

impl Pinning {
    /// What `--cpu LIST` and `--no-pin` ask for.
    pub(crate) fn of_options(cpu: Option<&str>, no_pin: bool) -> Result<Pinning, LoadError> {
        match (cpu, no_pin) {
            (Some(list), _) => match parse_cpu_list(list) {
                Ok(cpus) => Ok(Pinning::List(cpus)),
                Err(reason) => Err(LoadError::Usage(format!("--cpu: {reason}"))),
            },
            (None, true) => Ok(Pinning::Off),
            (None, false) => Ok(Pinning::Mask),
        }
    }

    /// The CPU of one thread, or `None` if it is not pinned.
    pub(crate) fn cpu_of(&self, thread: usize, threads: usize, allowed: &[usize]) -> Option<usize> {
        let cpus = match self {
            Pinning::Off => return None,
            Pinning::Mask if threads >= PINNED_THREADS_MAX => return None,
            Pinning::Mask => allowed,
            Pinning::List(cpus) => cpus,
        };
        match cpus.is_empty() {
            true => None,
            false => Some(cpus[thread % cpus.len()]),
        }
    }
}

/// The CPUs this process may use, in ascending order.
pub(crate) fn allowed_cpus() -> Vec<usize> {
    let Ok(set) = sched_getaffinity(None) else {
        return Vec::new();
    };
    (0..CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).collect()
}

/// Binds the calling thread to one CPU.
pub(crate) fn pin_to(cpu: usize) -> std::io::Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu);
    Ok(sched_setaffinity(None, &set)?)
}

/// Reads a CPU list as the kernel writes it: `0`, `0,2`, `1-3,7`. The order is kept.
fn parse_cpu_list(text: &str) -> Result<Vec<usize>, String> {
    let mut cpus = Vec::new();
    for part in text.split(',') {
        let number = |digits: &str| match digits.trim().parse::<usize>() {
            Ok(cpu) if cpu < CpuSet::MAX_CPU => Ok(cpu),
            _ => Err(format!("`{text}` is not a list of CPUs such as 0,2-3")),
        };
        let (first, last) = match part.split_once('-') {
            Some((first, last)) => (number(first)?, number(last)?),
            None => (number(part)?, number(part)?),
        };
        if first > last {
            return Err(format!("`{part}` runs backwards"));
        }
        cpus.extend(first..=last);
    }
    Ok(cpus)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_read_in_order() {
        assert_eq!(parse_cpu_list("0"), Ok(vec![0]));
        assert_eq!(parse_cpu_list("3,0-2,7"), Ok(vec![3, 0, 1, 2, 7]));
        for wrong in ["", "a", "1-", "3-1", "1,,2", "99999", "-1"] {
            assert!(parse_cpu_list(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn threads_stay_inside_the_mask() {
        let allowed = [2, 5];
        let cpus: Vec<_> = (0..4).map(|i| Pinning::Mask.cpu_of(i, 4, &allowed)).collect();
        assert_eq!(cpus, [Some(2), Some(5), Some(2), Some(5)]);
        assert_eq!(Pinning::Mask.cpu_of(0, 16, &allowed), None);
        assert_eq!(Pinning::Off.cpu_of(0, 1, &allowed), None);
        let list = Pinning::List(vec![7, 1]);
        assert_eq!(list.cpu_of(2, 20, &allowed), Some(7));
    }

    #[test]
    fn pinning_takes_effect() {
        let cpu = *allowed_cpus().last().expect("a process has a CPU");
        std::thread::spawn(move || {
            pin_to(cpu).unwrap();
            assert_eq!(allowed_cpus(), [cpu]);
            assert_eq!(rustix::thread::sched_getcpu(), cpu);
        })
        .join()
        .unwrap();
    }
}
