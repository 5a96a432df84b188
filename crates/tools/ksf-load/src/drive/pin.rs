//! On which CPU each thread runs.

use ksf::cpus;

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
            (Some(list), _) => match cpus::in_order(list) {
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
        if cpus.is_empty() { None } else { Some(cpus[thread % cpus.len()]) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_read_in_order() {
        let read = |list| Pinning::of_options(Some(list), false);
        assert_eq!(read("3,0-2,7").unwrap(), Pinning::List(vec![3, 0, 1, 2, 7]));
        assert!(read("3-1").unwrap_err().to_string().contains("--cpu: \"3-1\" is not a list of CPUs"));
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
        let cpu = *cpus::allowed().unwrap().last().expect("a process has a CPU");
        std::thread::spawn(move || {
            cpus::pin_to(cpu).unwrap();
            assert_eq!(cpus::allowed().unwrap(), [cpu]);
            assert_eq!(rustix::thread::sched_getcpu(), cpu);
        })
        .join()
        .unwrap();
    }
}
