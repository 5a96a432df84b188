//! Lists of CPUs, in the syntax of taskset and cpuset: `0-3,8,10-11`.

/// A list of CPUs as typed by the user; sorted, without repetitions, never empty.
#[derive(Debug, Clone, PartialEq, Eq, serde::Deserialize)]
#[serde(try_from = "String")]
pub(crate) struct CpuList(pub(crate) Vec<usize>);

impl std::str::FromStr for CpuList {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        const CPU_MAX: usize = rustix::thread::CpuSet::MAX_CPU - 1;
        let bad = || format!("\"{text}\" is not a list of CPUs; write it like 0-3,8");
        let number = |text: &str| text.trim().parse::<usize>().map_err(|_| bad());
        let mut cpus = Vec::new();
        for part in text.split(',') {
            let (first, last) = match part.split_once('-') {
                Some((first, last)) => (number(first)?, number(last)?),
                None => (number(part)?, number(part)?),
            };
            if first > last {
                return Err(bad());
            }
            if last > CPU_MAX {
                return Err(format!("there is no CPU {last}; the largest number is {CPU_MAX}"));
            }
            cpus.extend(first..=last);
        }
        cpus.sort_unstable();
        cpus.dedup();
        Ok(CpuList(cpus))
    }
}

impl TryFrom<String> for CpuList {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

/// Writes a sorted list in the short form.
pub(crate) fn format(cpus: &[usize]) -> String {
    let mut parts: Vec<String> = Vec::new();
    let mut rest = cpus;
    while let Some(&first) = rest.first() {
        let run = rest.iter().enumerate().take_while(|(at, cpu)| **cpu == first + at).count();
        parts.push(match run {
            1 => first.to_string(),
            _ => format!("{first}-{}", first + run - 1),
        });
        rest = &rest[run..];
    }
    parts.join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_read_and_written() {
        for (text, cpus, back) in [
            ("0", vec![0], "0"),
            ("0-3,8,10-11", vec![0, 1, 2, 3, 8, 10, 11], "0-3,8,10-11"),
            ("3,1,2,1", vec![1, 2, 3], "1-3"),
            ("5-5", vec![5], "5"),
        ] {
            let list: CpuList = text.parse().unwrap();
            assert_eq!(list.0, cpus, "{text}");
            assert_eq!(format(&list.0), back);
        }
    }

    #[test]
    fn nonsense_is_refused_by_name() {
        for text in ["", "a", "1-", "-1", "3-1", "0,,1", "0x1", "99999999"] {
            assert!(text.parse::<CpuList>().is_err(), "{text}");
        }
        assert!("9999".parse::<CpuList>().unwrap_err().contains("9999"));
    }
}
