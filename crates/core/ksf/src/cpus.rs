//! CPUs: sets of them in the forms that the kernel and people write, and where a thread may run.
//!
//! The administrator's mask is narrowed, never widened.

use std::collections::BTreeSet;
use std::fmt;
use std::io;
use std::ops::RangeInclusive;
use std::str::FromStr;

use rustix::thread::{CpuSet as Affinity, Pid, sched_getaffinity, sched_setaffinity};

use crate::error::Error;

/// Numbers below this can stand in a set. It is more than any `CONFIG_NR_CPUS` there is, and bounds what a wrong file
/// can make a set grow to.
const CPUS_MAX: usize = 1 << 16;

/// A set of CPUs.
///
/// Its text is a list as taskset(1) and cpuset have it, `0-3,8`. Text that people type is parsed (`FromStr`): it names
/// one CPU at least. Files of the kernel are read by [`Self::from_list`] and [`Self::from_mask`].
#[derive(Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Deserialize), serde(try_from = "String"))]
pub struct CpuSet(BTreeSet<usize>);

/// Why a text is not a set of CPUs.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("\"{text}\" is not {form}")]
pub struct CpuSetError {
    text: String,
    form: &'static str,
}

impl CpuSet {
    /// The CPUs that a thread may use: `None`, the calling one.
    ///
    /// # Errors
    ///
    /// There is no such thread.
    pub fn of_thread(thread: Option<Pid>) -> io::Result<Self> {
        let set = sched_getaffinity(thread)?;
        Ok((0..Affinity::MAX_CPU).filter(|cpu| set.is_set(*cpu)).collect())
    }

    /// Keeps a thread to these CPUs (`None`, the calling one), and those that it starts from now on.
    ///
    /// # Errors
    ///
    /// None of them is there, or the thread is not, or it belongs to another user.
    pub fn bind(&self, thread: Option<Pid>) -> io::Result<()> {
        bind(thread, self.iter())
    }

    /// The CPUs from 0 up to, and without, `count`.
    pub fn first(count: usize) -> Self {
        (0..count).collect()
    }

    /// Reads a list as in `/sys/devices/system/cpu/online`: `0-3,8`. Nothing is the empty set.
    ///
    /// # Errors
    ///
    /// It is another kind of text, or has numbers from 65,536 on.
    pub fn from_list(text: &str) -> Result<Self, CpuSetError> {
        match text.trim() {
            "" => Ok(Self::default()),
            text => Ok(ranges(text)?.into_iter().flatten().collect()),
        }
    }

    /// Reads a mask as the kernel writes it: hexadecimal groups of 32 CPUs, the highest first, with commas between.
    ///
    /// # Errors
    ///
    /// It is another kind of text, or has numbers from 65,536 on.
    pub fn from_mask(text: &str) -> Result<Self, CpuSetError> {
        let bad = || CpuSetError { text: text.trim().to_owned(), form: "a mask of CPUs, as in ff,00000000" };
        let groups: Vec<&str> = text.trim().split(',').collect();
        if groups.len() > CPUS_MAX / 32 {
            return Err(bad());
        }
        let mut cpus = BTreeSet::new();
        for (group, digits) in groups.iter().rev().enumerate() {
            if digits.is_empty() || digits.len() > 8 || !digits.bytes().all(|byte| byte.is_ascii_hexdigit()) {
                return Err(bad());
            }
            let bits = u32::from_str_radix(digits, 16).map_err(|_| bad())?;
            cpus.extend((0..32).filter(|bit| bits & (1u32 << bit) != 0).map(|bit| group * 32 + bit));
        }
        Ok(Self(cpus))
    }

    /// Writes the mask in as few groups as hold it.
    ///
    /// Linux refuses a mask with more groups than its CPUs need, even where the surplus ones are zero: on a machine
    /// of two CPUs `0,00000001` is EOVERFLOW (seen on 6.18).
    pub fn mask(&self) -> String {
        let groups = self.0.last().map_or(1, |last| last / 32 + 1);
        let mut text = String::new();
        for group in (0..groups).rev() {
            let in_group = self.0.range(group * 32..(group + 1) * 32);
            let bits = in_group.fold(0u32, |bits, cpu| bits | 1u32 << (cpu % 32));
            let first = text.is_empty();
            text += &if first { format!("{bits:x}") } else { format!(",{bits:08x}") };
        }
        text
    }

    /// Whether no CPU is in the set.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// How many CPUs are in the set.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether a CPU is in the set.
    pub fn contains(&self, cpu: usize) -> bool {
        self.0.contains(&cpu)
    }

    /// The CPUs in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        self.0.iter().copied()
    }

    /// The CPUs in both sets.
    #[must_use]
    pub fn and(&self, other: &Self) -> Self {
        Self(self.0.intersection(&other.0).copied().collect())
    }

    /// The CPUs in this set and not in the other.
    #[must_use]
    pub fn without(&self, other: &Self) -> Self {
        Self(self.0.difference(&other.0).copied().collect())
    }
}

impl FromStr for CpuSet {
    type Err = CpuSetError;

    fn from_str(text: &str) -> Result<Self, CpuSetError> {
        in_order(text).map(|cpus| cpus.into_iter().collect())
    }
}

impl TryFrom<String> for CpuSet {
    type Error = CpuSetError;

    fn try_from(text: String) -> Result<Self, CpuSetError> {
        text.parse()
    }
}

impl FromIterator<usize> for CpuSet {
    fn from_iter<T: IntoIterator<Item = usize>>(cpus: T) -> Self {
        Self(cpus.into_iter().collect())
    }
}

impl fmt::Display for CpuSet {
    /// The list.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut cpus = self.iter().peekable();
        let mut comma = "";
        while let Some(first) = cpus.next() {
            let mut last = first;
            while let Some(next) = cpus.next_if_eq(&(last + 1)) {
                last = next;
            }
            f.write_str(comma)?;
            comma = ",";
            if first == last { write!(f, "{first}")? } else { write!(f, "{first}-{last}")? }
        }
        Ok(())
    }
}

impl fmt::Debug for CpuSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CpuSet({self})")
    }
}

/// The CPUs of a list in the order in which they were typed, `3,0-2`: which thread runs where.
///
/// # Errors
///
/// It is another kind of text, names no CPU, or has numbers from 65,536 on.
pub fn in_order(text: &str) -> Result<Vec<usize>, CpuSetError> {
    Ok(ranges(text.trim())?.into_iter().flatten().collect())
}

fn ranges(text: &str) -> Result<Vec<RangeInclusive<usize>>, CpuSetError> {
    let bad = || CpuSetError { text: text.to_owned(), form: "a list of CPUs; write it like 0-3,8" };
    let number = |text: &str| text.trim().parse().ok().filter(|cpu| *cpu < CPUS_MAX).ok_or_else(bad);
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (number(first)?, number(last)?);
        if first <= last { Ok(first..=last) } else { Err(bad()) }
    };
    text.split(',').map(range).collect()
}

/// CPUs that the calling thread may use, in ascending order.
///
/// # Errors
///
/// Of the system call, which has no reason to fail.
pub fn allowed() -> io::Result<Vec<usize>> {
    CpuSet::of_thread(None).map(|set| set.iter().collect())
}

/// The CPUs to run shards on: those asked for that are allowed, or all allowed ones where none were asked for.
///
/// # Errors
///
/// None of those asked for is allowed.
pub fn choose(asked: Option<&CpuSet>) -> Result<Vec<usize>, Error> {
    let allowed = CpuSet::of_thread(None).map_err(Error::Thread)?;
    let Some(asked) = asked else { return Ok(allowed.iter().collect()) };
    let chosen = allowed.and(asked);
    if chosen.is_empty() {
        return Err(Error::NoCpu { asked: asked.clone(), allowed });
    }
    Ok(chosen.iter().collect())
}

/// Binds the calling thread to one CPU. Allocates nothing, so it may be called between fork and exec.
///
/// # Errors
///
/// The CPU is not there.
pub fn pin_to(cpu: usize) -> io::Result<()> {
    bind(None, [cpu])
}

/// Keeps the calling thread, and the threads it starts from now on, to these CPUs.
///
/// # Errors
///
/// None of them is there.
pub fn keep_to(cpus: &[usize]) -> io::Result<()> {
    bind(None, cpus.iter().copied())
}

fn bind(thread: Option<Pid>, cpus: impl IntoIterator<Item = usize>) -> io::Result<()> {
    let mut set = Affinity::new();
    for cpu in cpus {
        if cpu >= Affinity::MAX_CPU {
            return Err(io::Error::from(io::ErrorKind::InvalidInput));
        }
        set.set(cpu);
    }
    Ok(sched_setaffinity(thread, &set)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn never_leaves_the_mask() {
        let allowed = allowed().unwrap();
        assert_eq!(choose(None).unwrap(), allowed);
        let asked = |cpus: &[usize]| choose(Some(&cpus.iter().copied().collect()));
        assert_eq!(asked(&[allowed[0], 9999]).unwrap(), [allowed[0]]);
        assert!(matches!(asked(&[9999]), Err(Error::NoCpu { .. })));
    }

    #[test]
    fn threads_inherit_where_they_may_run() {
        let last = *allowed().unwrap().last().unwrap();
        let inherited = std::thread::spawn(move || {
            keep_to(&[last])?;
            std::thread::spawn(allowed).join().unwrap()
        });
        assert_eq!(inherited.join().unwrap().unwrap(), [last]);
        assert!(keep_to(&[Affinity::MAX_CPU]).is_err() && keep_to(&[]).is_err());
    }

    #[test]
    fn another_thread_is_bound_and_let_go() {
        let (say, hear) = std::sync::mpsc::channel();
        let (end, wait) = std::sync::mpsc::channel::<()>();
        let thread = std::thread::spawn(move || {
            say.send(rustix::thread::gettid()).unwrap();
            let _ = wait.recv();
        });
        let other = Some(hear.recv().unwrap());
        let before = CpuSet::of_thread(other).unwrap();
        let one: CpuSet = before.iter().take(1).collect();
        one.bind(other).unwrap();
        assert_eq!(CpuSet::of_thread(other).unwrap(), one);
        assert_eq!(CpuSet::of_thread(None).unwrap(), before, "only the one that was named");
        before.bind(other).unwrap();
        assert_eq!(CpuSet::of_thread(other).unwrap(), before);
        drop(end);
        thread.join().unwrap();
    }

    #[test]
    fn masks_are_written_as_the_kernel_writes_them() {
        for (cpus, mask) in [
            ("", "0"),
            ("0", "1"),
            ("0-1", "3"),
            ("31", "80000000"),
            ("32", "1,00000000"),
            ("0-63", "ffffffff,ffffffff"),
            ("64", "1,00000000,00000000"),
            ("0,64,127", "80000000,00000001,00000000,00000001"),
            ("299", &("800,".to_owned() + &["00000000"; 9].join(","))),
        ] {
            let set = CpuSet::from_list(cpus).unwrap();
            assert_eq!(set.mask(), mask, "{cpus}");
            assert_eq!(CpuSet::from_mask(mask).unwrap(), set, "{mask}");
            assert_eq!(set.to_string(), cpus);
        }
        // The kernel pads to its number of CPUs.
        assert_eq!(CpuSet::from_mask("00000000,00000003\n").unwrap(), CpuSet::first(2));
    }

    #[test]
    fn lists_that_people_type_are_read_and_written() {
        for (text, order, back) in [
            ("0", vec![0], "0"),
            (" 0-3, 8,10-11 ", vec![0, 1, 2, 3, 8, 10, 11], "0-3,8,10-11"),
            ("3,1,2,1", vec![3, 1, 2, 1], "1-3"),
            ("5-5", vec![5], "5"),
        ] {
            assert_eq!(in_order(text).unwrap(), order, "{text}");
            assert_eq!(text.parse::<CpuSet>().unwrap().to_string(), back);
        }
        assert!("".parse::<CpuSet>().unwrap_err().to_string().contains("\"\" is not a list of CPUs"));
    }

    #[test]
    fn nonsense_is_refused() {
        for text in ["x", "1-", "-1", "3-1", "0,,1", "0x1", "0-4294967295", "65536"] {
            assert!(CpuSet::from_list(text).is_err() && text.parse::<CpuSet>().is_err(), "{text}");
        }
        for text in ["", "x", ",", "1,", "123456789", "+1", &vec!["0"; 4000].join(",")] {
            assert!(CpuSet::from_mask(text).is_err(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn every_set_survives_both_forms(cpus in proptest::collection::btree_set(0usize..2048, 0..200)) {
            let set: CpuSet = cpus.into_iter().collect();
            prop_assert_eq!(&CpuSet::from_mask(&set.mask()).unwrap(), &set);
            prop_assert_eq!(&CpuSet::from_list(&set.to_string()).unwrap(), &set);
        }
    }
}
