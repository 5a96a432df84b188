//! Level 2: a classic BPF program on the reuseport group, made from who is ready.
//!
//! Its answer is an index into the group. The kernel puts a new member at the end and, when one closes, the last into
//! the hole (net/core/sock_reuseport.c). The holder keeps all queues of a listener until it closes them together, so the
//! program's own listener is 0 and the n-th queue n + 1.

use std::io;
use std::os::fd::BorrowedFd;

use libc::sock_filter;

use crate::sys;

/// One queue as the holder knows it.
pub(crate) struct Choice<'a> {
    pub(crate) queue: BorrowedFd<'a>,
    /// Index in the group.
    pub(crate) member: u32,
    /// Home of its worker, where it has one that is ready.
    pub(crate) cpu: Option<u32>,
}

pub(super) fn probe(socket: BorrowedFd<'_>) -> io::Result<()> {
    attach(socket, &[])
}

/// Gives the group a program for these choices; none: everything to the program's own listener.
pub(super) fn attach(member: BorrowedFd<'_>, choices: &[Choice<'_>]) -> io::Result<()> {
    let homes: Vec<(u32, u32)> = choices.iter().filter_map(|choice| Some((choice.cpu?, choice.member))).collect();
    sys::attach_classic(member, libc::SO_ATTACH_REUSEPORT_CBPF, &program(&homes))
}

// linux/bpf_common.h, linux/filter.h
const LOAD: u16 = 0x20;
const MOD: u16 = 0x94;
const JUMP_EQUAL: u16 = 0x15;
const RETURN: u16 = 0x06;
const CPU: u32 = (-0x1000i32 + 36) as u32;
const RANDOM: u32 = (-0x1000i32 + 56) as u32;

/// `homes`: CPU and member of each ready worker.
///
/// ```text
/// A = CPU; if A == c: [A = random % n; if A == i: return member]...; return the last; ... return any worker
/// ```
fn program(homes: &[(u32, u32)]) -> Vec<sock_filter> {
    let op = |code, jt, jf, k| sock_filter { code, jt, jf, k };
    let mut program = vec![op(LOAD, 0, 0, CPU)];
    let mut cpus: Vec<u32> = homes.iter().map(|&(cpu, _)| cpu).collect();
    cpus.sort_unstable();
    cpus.dedup();
    for cpu in cpus {
        // A jump is 8 bits wide, and a program has 4096 instructions.
        let members: Vec<u32> = homes.iter().filter(|home| home.0 == cpu).map(|home| home.1).take(64).collect();
        let block = among(&members);
        if program.len() + block.len() > 3800 {
            break;
        }
        program.push(op(JUMP_EQUAL, 0, block.len() as u8, cpu));
        program.extend(block);
    }
    // A CPU without a worker of its own: any of the ready ones, or the program's own listener.
    let all: Vec<u32> = homes.iter().map(|home| home.1).take(64).collect();
    program.extend(among(if all.is_empty() { &[0] } else { &all }));
    program
}

/// One of these, each as often.
fn among(members: &[u32]) -> Vec<sock_filter> {
    let op = |code, jt, jf, k| sock_filter { code, jt, jf, k };
    let (last, others) = members.split_last().expect("at least one");
    let mut block = Vec::new();
    if !others.is_empty() {
        block.push(op(LOAD, 0, 0, RANDOM));
        block.push(op(MOD, 0, 0, members.len() as u32));
        for (index, member) in others.iter().enumerate() {
            block.push(op(JUMP_EQUAL, 0, 1, index as u32));
            block.push(op(RETURN, 0, 0, *member));
        }
    }
    block.push(op(RETURN, 0, 0, *last));
    block
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the kernel would answer.
    fn run(program: &[sock_filter], cpu: u32, random: u32) -> u32 {
        let (mut a, mut at) = (0, 0);
        loop {
            let op = &program[at];
            at += 1;
            match op.code {
                LOAD => a = if op.k == CPU { cpu } else { random },
                MOD => a %= op.k,
                JUMP_EQUAL => at += usize::from(if a == op.k { op.jt } else { op.jf }),
                RETURN => return op.k,
                other => panic!("instruction {other:#x}"),
            }
        }
    }

    #[test]
    fn a_cpu_goes_to_its_own_workers_in_turn() {
        let program = program(&[(0, 1), (3, 2), (0, 3)]);
        assert_eq!(run(&program, 3, 9), 2);
        assert_eq!([0, 1, 2].map(|random| run(&program, 0, random)), [1, 3, 1]);
    }

    #[test]
    fn a_cpu_without_a_worker_goes_to_all_and_nobody_is_the_listener() {
        let some = program(&[(0, 1), (3, 2)]);
        assert_eq!([4, 5].map(|random| run(&some, 7, random)), [1, 2]);
        assert_eq!(run(&program(&[]), 7, 1), 0);
    }

    #[test]
    fn it_is_never_too_long_for_the_kernel() {
        let homes: Vec<(u32, u32)> = (0..4096).map(|member| (member % 1024, member)).collect();
        assert!(program(&homes).len() <= 4096);
        let one_cpu: Vec<(u32, u32)> = (0..256).map(|member| (0, member)).collect();
        let program = program(&one_cpu);
        assert!((0..64).all(|random| run(&program, 0, random) == random));
    }
}
