//! The administrator's CPU mask. It is narrowed, never widened.

use std::io;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::error::Error;

/// CPUs this process may use, in ascending order.
pub fn allowed() -> io::Result<Vec<usize>> {
    let set = sched_getaffinity(None)?;
    Ok((0..CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).collect())
}

/// The CPUs to run shards on: those asked for that are allowed, or all allowed ones where none were asked for.
pub fn choose(asked: Option<&[usize]>) -> Result<Vec<usize>, Error> {
    let allowed = allowed().map_err(Error::Thread)?;
    let Some(asked) = asked else { return Ok(allowed) };
    let mut chosen: Vec<_> = allowed.iter().copied().filter(|cpu| asked.contains(cpu)).collect();
    chosen.dedup();
    if chosen.is_empty() { Err(Error::NoCpu { asked: asked.to_vec(), allowed }) } else { Ok(chosen) }
}

/// Binds the calling thread to one CPU.
pub fn pin_to(cpu: usize) -> io::Result<()> {
    let mut set = CpuSet::new();
    if cpu >= CpuSet::MAX_CPU {
        return Err(io::Error::from(io::ErrorKind::InvalidInput));
    }
    set.set(cpu);
    Ok(sched_setaffinity(None, &set)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn never_leaves_the_mask() {
        let allowed = allowed().unwrap();
        assert_eq!(choose(None).unwrap(), allowed);
        assert_eq!(choose(Some(&[allowed[0], 9999])).unwrap(), [allowed[0]]);
        assert!(matches!(choose(Some(&[9999])), Err(Error::NoCpu { .. })));
    }
}
