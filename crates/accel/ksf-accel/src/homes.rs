//! Which CPU is a worker's home.

use std::collections::BTreeMap;
use std::io;

use ksf::cpus::CpuSet;

/// Workers by the CPU they are at home on.
#[derive(Debug, Default)]
pub(crate) struct Homes {
    workers: BTreeMap<u32, Vec<u8>>,
}

impl Homes {
    /// The CPU with the fewest workers among those allowed; of equals the one with the lowest number.
    pub(crate) fn emptiest(&self, allowed: &[u32]) -> Option<u32> {
        allowed.iter().copied().min_by_key(|cpu| (self.on(*cpu).len(), *cpu))
    }

    pub(crate) fn on(&self, cpu: u32) -> &[u8] {
        self.workers.get(&cpu).map_or(&[], Vec::as_slice)
    }

    pub(crate) fn add(&mut self, cpu: u32, worker: u8) {
        self.workers.entry(cpu).or_default().push(worker);
    }

    pub(crate) fn remove(&mut self, cpu: u32, worker: u8) {
        if let Some(workers) = self.workers.get_mut(&cpu) {
            workers.retain(|&other| other != worker);
        }
    }
}

/// CPUs a worker may be at home on: the administrator's choice inside what the thread may run on. Where they have
/// nothing in common the thread's own mask stands: ksf never widens it.
pub(crate) fn allowed(chosen: Option<&[u32]>, affinity: &[u32]) -> Vec<u32> {
    let Some(chosen) = chosen else { return affinity.to_vec() };
    let both: Vec<u32> = affinity.iter().copied().filter(|cpu| chosen.contains(cpu)).collect();
    if both.is_empty() { affinity.to_vec() } else { both }
}

/// CPUs that a thread may run on.
pub(crate) fn affinity(tid: Option<rustix::thread::Pid>) -> io::Result<Vec<u32>> {
    Ok(CpuSet::of_thread(tid)?.iter().map(|cpu| cpu as u32).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_emptiest_cpu_is_next_and_places_are_given_back() {
        let mut homes = Homes::default();
        let allowed = [0, 1, 3];
        let mut given = Vec::new();
        for worker in 0..6 {
            let cpu = homes.emptiest(&allowed).unwrap();
            homes.add(cpu, worker);
            given.push(cpu);
        }
        assert_eq!(given, [0, 1, 3, 0, 1, 3]);
        homes.remove(1, 1);
        homes.remove(1, 4);
        assert_eq!(homes.emptiest(&allowed), Some(1));
        assert_eq!(homes.on(3), [2, 5]);
        assert_eq!(homes.emptiest(&[]), None);
    }

    #[test]
    fn a_mask_is_narrowed_and_never_widened() {
        assert_eq!(allowed(None, &[2, 3]), [2, 3]);
        assert_eq!(allowed(Some(&[0, 3]), &[2, 3]), [3]);
        assert_eq!(allowed(Some(&[0, 1]), &[2, 3]), [2, 3]);
    }
}
