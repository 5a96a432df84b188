//! Sets of CPUs, in the three forms the kernel writes them: lists (`0-3,8`), masks (`ff,00000000`), and names.

use std::collections::BTreeSet;
use std::fmt;

/// Larger than any `CONFIG_NR_CPUS` there is; it bounds what a wrong file can make a set grow to.
const CPUS_MAX: u32 = 1 << 16;

/// A set of CPUs, without a limit of 64 or any other number of machine words.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct CpuSet(BTreeSet<u32>);

/// Why a text is not a set of CPUs.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("\"{text}\" is not {form}")]
pub struct CpuSetError {
    text: String,
    form: &'static str,
}

impl CpuSet {
    /// The CPUs from 0 up to, and without, `count`.
    pub fn first(count: u32) -> Self {
        (0..count).collect()
    }

    /// Reads a list as in `/sys/devices/system/cpu/online` and taskset(1): `0-3,8`. Nothing is the empty set.
    pub fn from_list(text: &str) -> Result<Self, CpuSetError> {
        let bad = || CpuSetError { text: text.trim().to_owned(), form: "a list of CPUs; write it like 0-3,8" };
        let number = |text: &str| text.trim().parse().ok().filter(|cpu| *cpu < CPUS_MAX).ok_or_else(bad);
        let mut cpus = BTreeSet::new();
        for part in text.trim().split(',').filter(|_| !text.trim().is_empty()) {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let (first, last): (u32, u32) = (number(first)?, number(last)?);
            if first > last {
                return Err(bad());
            }
            cpus.extend(first..=last);
        }
        Ok(Self(cpus))
    }

    /// Reads a mask as the kernel writes it: hexadecimal groups of 32 CPUs, the highest first, with commas between.
    pub fn from_mask(text: &str) -> Result<Self, CpuSetError> {
        let bad = || CpuSetError { text: text.trim().to_owned(), form: "a mask of CPUs, as in ff,00000000" };
        let groups: Vec<&str> = text.trim().split(',').collect();
        if groups.len() > (CPUS_MAX / 32) as usize {
            return Err(bad());
        }
        let mut cpus = BTreeSet::new();
        for (group, digits) in (0u32..).zip(groups.iter().rev()) {
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

    /// The CPUs in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.0.iter().copied()
    }

    /// The CPUs in both sets.
    pub fn and(&self, other: &Self) -> Self {
        Self(self.0.intersection(&other.0).copied().collect())
    }

    /// The CPUs in this set and not in the other.
    pub fn without(&self, other: &Self) -> Self {
        Self(self.0.difference(&other.0).copied().collect())
    }
}

impl FromIterator<u32> for CpuSet {
    fn from_iter<T: IntoIterator<Item = u32>>(cpus: T) -> Self {
        Self(cpus.into_iter().collect())
    }
}

impl fmt::Display for CpuSet {
    /// The list form, which people read.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut cpus = self.0.iter().copied().peekable();
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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

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
    fn nonsense_is_refused() {
        for text in ["x", "1-", "-1", "3-1", "0,,1", "0x1", "0-4294967295", "65536"] {
            assert!(CpuSet::from_list(text).is_err(), "{text}");
        }
        for text in ["", "x", ",", "1,", "123456789", "+1", &vec!["0"; 4000].join(",")] {
            assert!(CpuSet::from_mask(text).is_err(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn every_set_survives_both_forms(cpus in proptest::collection::btree_set(0u32..2048, 0..200)) {
            let set: CpuSet = cpus.into_iter().collect();
            prop_assert_eq!(&CpuSet::from_mask(&set.mask()).unwrap(), &set);
            prop_assert_eq!(&CpuSet::from_list(&set.to_string()).unwrap(), &set);
        }
    }
}
