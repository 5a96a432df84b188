//! Sets of CPUs that need no allocation.

use std::fmt;
use std::str::FromStr;

/// CPU numbers below this can be in a set: `KSF_FLOW_CPUS_MAX` of `ksf_flow_abi.h`.
pub const CPUS_MAX: usize = 1024;

/// A set of CPUs. Its text form is that of taskset and cpuset: `0-3,8`.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct CpuMask {
    words: [u64; CPUS_MAX / 64],
}

impl CpuMask {
    /// No CPU.
    pub const EMPTY: Self = Self { words: [0; CPUS_MAX / 64] };

    /// The CPUs this thread may run on. CPUs from [`CPUS_MAX`] on are left out.
    pub fn of_this_thread() -> std::io::Result<Self> {
        let allowed = rustix::thread::sched_getaffinity(None)?;
        let last = CPUS_MAX.min(rustix::thread::CpuSet::MAX_CPU);
        Ok((0..last).filter(|&cpu| allowed.is_set(cpu)).collect())
    }

    /// Adds a CPU; one from [`CPUS_MAX`] on is ignored.
    pub fn insert(&mut self, cpu: usize) {
        if let Some(word) = self.words.get_mut(cpu / 64) {
            *word |= 1 << (cpu % 64);
        }
    }

    /// Whether it holds a CPU.
    pub fn contains(&self, cpu: usize) -> bool {
        self.words.get(cpu / 64).is_some_and(|word| word & 1 << (cpu % 64) != 0)
    }

    /// How many CPUs it holds.
    pub fn len(&self) -> usize {
        self.words.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// Whether it holds none.
    pub fn is_empty(&self) -> bool {
        *self == Self::EMPTY
    }

    /// How many CPUs of the set have a lower number: the place of `cpu` in the ascending list. `None` if `cpu` is not
    /// in the set.
    pub fn index_of(&self, cpu: usize) -> Option<usize> {
        if !self.contains(cpu) {
            return None;
        }
        let below = self.words[..cpu / 64].iter().map(|word| word.count_ones() as usize).sum::<usize>();
        let mask = (1u64 << (cpu % 64)) - 1;
        Some(below + (self.words[cpu / 64] & mask).count_ones() as usize)
    }

    /// The CPUs in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        (0..CPUS_MAX).filter(|&cpu| self.contains(cpu))
    }
}

impl FromIterator<usize> for CpuMask {
    fn from_iter<I: IntoIterator<Item = usize>>(cpus: I) -> Self {
        let mut mask = Self::EMPTY;
        cpus.into_iter().for_each(|cpu| mask.insert(cpu));
        mask
    }
}

impl fmt::Display for CpuMask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut comma = "";
        let mut first = 0;
        while first < CPUS_MAX {
            if !self.contains(first) {
                first += 1;
                continue;
            }
            let end = (first..CPUS_MAX).find(|&cpu| !self.contains(cpu)).unwrap_or(CPUS_MAX);
            write!(f, "{comma}{first}")?;
            if end - first > 1 {
                write!(f, "-{}", end - 1)?;
            }
            comma = ",";
            first = end;
        }
        Ok(())
    }
}

impl fmt::Debug for CpuMask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CpuMask({self})")
    }
}

impl FromStr for CpuMask {
    type Err = BadCpuList;

    /// Allocates nothing.
    fn from_str(text: &str) -> Result<Self, BadCpuList> {
        let mut mask = Self::EMPTY;
        for part in text.split(',') {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let first: usize = first.parse().map_err(|_| BadCpuList)?;
            let last: usize = last.parse().map_err(|_| BadCpuList)?;
            if first > last || last >= CPUS_MAX {
                return Err(BadCpuList);
            }
            (first..=last).for_each(|cpu| mask.insert(cpu));
        }
        Ok(mask)
    }
}

/// A text that is not a list of CPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a list of CPUs below {CPUS_MAX}; write it like 0-3,8")]
pub struct BadCpuList;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_read_and_written() {
        for text in ["0", "0-3,8,10-11", "63-64", "5,1000-1023"] {
            let mask: CpuMask = text.parse().unwrap();
            assert_eq!(mask.to_string(), text);
        }
        for text in ["", "a", "1-", "-1", "3-1", "0,,1", "1024", "0-99999999999999999999"] {
            assert_eq!(text.parse::<CpuMask>(), Err(BadCpuList), "{text}");
        }
    }

    #[test]
    fn an_index_is_the_place_in_the_list() {
        let mask: CpuMask = "1,63-65,200,1023".parse().unwrap();
        let list: Vec<usize> = mask.iter().collect();
        assert_eq!(list, [1, 63, 64, 65, 200, 1023]);
        assert_eq!(mask.len(), list.len());
        for cpu in 0..CPUS_MAX + 2 {
            assert_eq!(mask.index_of(cpu), list.iter().position(|&it| it == cpu), "{cpu}");
        }
    }
}
