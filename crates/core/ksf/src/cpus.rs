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
    keep_to(&[cpu])
}

/// Keeps the calling thread, and the threads it starts from now on, to these CPUs.
pub fn keep_to(cpus: &[usize]) -> io::Result<()> {
    let mut set = CpuSet::new();
    for cpu in cpus {
        if *cpu >= CpuSet::MAX_CPU {
            return Err(io::Error::from(io::ErrorKind::InvalidInput));
        }
        set.set(*cpu);
    }
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

    #[test]
    fn threads_inherit_where_they_may_run() {
        let last = *allowed().unwrap().last().unwrap();
        let inherited = std::thread::spawn(move || {
            keep_to(&[last])?;
            std::thread::spawn(allowed).join().unwrap()
        });
        assert_eq!(inherited.join().unwrap().unwrap(), [last]);
        assert!(keep_to(&[CpuSet::MAX_CPU]).is_err() && keep_to(&[]).is_err());
    }
}
