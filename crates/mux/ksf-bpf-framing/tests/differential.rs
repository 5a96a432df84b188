//! Random programs that the verifier accepts give the same result here and in the kernel.

use std::ffi::c_void;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr;

use crate::common::asm::{call, exit, load_bytes, mov, mov_reg, mov64, op};
use ksf_bpf_framing::{FramingOptions, FramingProgram, FramingVerdict, RunError};
use ksf_test::{Random, skip};

/// Loads encoded instructions as a socket filter.
fn load(instructions: &[u8]) -> io::Result<OwnedFd> {
    // SAFETY: the pointers are to a name and a licence that live for ever and to whole instructions of which the count
    // is given; no options are one of the allowed values. The kernel copies all of it.
    let fd = unsafe {
        libbpf_sys::bpf_prog_load(
            libbpf_sys::BPF_PROG_TYPE_SOCKET_FILTER,
            c"random".as_ptr(),
            c"GPL".as_ptr(),
            instructions.as_ptr().cast(),
            (instructions.len() / 8) as libbpf_sys::size_t,
            ptr::null_mut(),
        )
    };
    if fd < 0 {
        return Err(io::Error::from_raw_os_error(-fd));
    }
    // SAFETY: the call made this descriptor, and nothing else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn run(program: &OwnedFd, stream: &[u8]) -> i32 {
    // The kernel takes the first 14 bytes for an Ethernet header.
    let frame = [&[0; 14], stream].concat();
    let mut options = libbpf_sys::bpf_test_run_opts {
        sz: size_of::<libbpf_sys::bpf_test_run_opts>() as libbpf_sys::size_t,
        data_in: frame.as_ptr().cast::<c_void>(),
        data_size_in: frame.len() as u32,
        ..Default::default()
    };
    // SAFETY: `options` says its own size, and points to `frame` with its length; both outlive the call.
    let result = unsafe { libbpf_sys::bpf_prog_test_run_opts(program.as_raw_fd(), &raw mut options) };
    assert_eq!(result, 0, "the kernel runs what it has verified");
    options.retval as i32
}

/// Registers that hold numbers: r6 is the context, r10 the stack.
const NUMBERS: [u8; 8] = [0, 1, 2, 3, 4, 5, 7, 8];
const ARGUMENTS: [u8; 5] = [1, 2, 3, 4, 5];

/// A program without loops whose values partly come from the stream, so that the verifier cannot foresee them.
fn program(random: &mut Random) -> Vec<u8> {
    let mut slots: Vec<Vec<u8>> = vec![mov_reg(6, 1)];
    let refill = |random: &mut Random, registers: &[u8], slots: &mut Vec<Vec<u8>>| {
        for register in registers {
            let value = match random.below(3) {
                0 => random.bits(),
                1 => random.pick(&[0, 1, u64::MAX, 1 << 31, 1 << 32, 1 << 63, 0x7fff_ffff]),
                _ => random.below(100),
            };
            slots.push(mov64(*register, value));
        }
    };
    slots.push(load_bytes(random.below(4) as i32, -16, 16));
    refill(random, &NUMBERS, &mut slots);
    slots.push(op(0x79, 7, 10, -16, 0));
    slots.push(op(0x79, 8, 10, -8, 0));
    for _ in 0..random.below(30) {
        let (dst, src) = (random.pick(&NUMBERS), random.pick(&NUMBERS));
        let class = random.pick(&[4, 7]);
        match random.below(12) {
            0..=4 => {
                let kind = random.pick(&[0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12]) << 4;
                if random.below(2) == 0 {
                    slots.push(op(class | 8 | kind, dst, src, 0, 0));
                } else {
                    let imm = match kind {
                        0x60 | 0x70 | 0xc0 => random.below(32) as i32,
                        0x30 | 0x90 => random.bits() as i32 | 1,
                        _ => random.bits() as i32,
                    };
                    slots.push(op(class | kind, dst, 0, 0, imm));
                }
            }
            5 => slots.push(op(class | 0x80, dst, 0, 0, 0)),
            6 => slots.push(op(random.pick(&[0xd4, 0xdc]), dst, 0, 0, random.pick(&[16, 32, 64]))),
            7 | 8 => {
                // Skips one instruction.
                let test = random.pick(&[1, 2, 3, 4, 5, 6, 7, 10, 11, 12, 13]) << 4;
                let class = random.pick(&[5, 6]);
                if random.below(2) == 0 {
                    slots.push(op(class | 8 | test, dst, src, 1, 0));
                } else {
                    slots.push(op(class | test, dst, 0, 1, random.bits() as i32));
                }
                slots.push(mov(random.pick(&NUMBERS), random.bits() as i32));
            }
            9 => {
                let (size, bytes) = random.pick(&[(0x00, 4), (0x08, 2), (0x10, 1), (0x18, 8)]);
                let at = -16 + bytes * random.below(16 / bytes as u64) as i16;
                slots.push(match random.below(3) {
                    0 => op(0x62 | size, 10, 0, at, random.bits() as i32),
                    1 => op(0x63 | size, 10, src, at, 0),
                    _ => op(0x61 | size, dst, 10, at, 0),
                });
            }
            10 => {
                let mode = random.pick(&[0x20, 0x40]);
                let size = random.pick(&[0x00, 0x08, 0x10]);
                let index = if mode == 0x40 { random.pick(&NUMBERS) } else { 0 };
                // Mostly there, now and then beyond the end.
                if index != 0 {
                    slots.push(op(0x57, index, 0, 0, 15));
                }
                slots.push(op(mode | size, 0, index, 0, random.below(12) as i32));
                refill(random, &ARGUMENTS, &mut slots);
            }
            _ => {
                slots.push(load_bytes(random.below(24) as i32, -16, 1 + random.below(16) as i32));
                refill(random, &ARGUMENTS, &mut slots);
            }
        }
    }
    // Everything counts, also the upper half.
    for register in [1, 2, 3, 4, 5, 7, 8] {
        slots.push(op(0xaf, 0, register, 0, 0));
    }
    slots.extend([mov_reg(7, 0), op(0x77, 7, 0, 0, 32), op(0xaf, 0, 7, 0, 0), exit()]);
    slots.concat()
}

#[test]
fn random_programs_run_alike() {
    match load(&[mov(0, 0), exit()].concat()) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            return skip("needs root (loads socket filters)");
        }
        other => drop(other.expect("a trivial program loads")),
    }
    const PROGRAMS: u32 = 1000;
    let mut random = Random::of_test(3);
    let mut accepted = 0;
    for number in 0..PROGRAMS {
        let instructions = program(&mut random);
        let here = FramingProgram::from_instructions(&instructions, &FramingOptions::default());
        let here = here.unwrap_or_else(|error| panic!("program {number}: {error}"));
        let Ok(there) = load(&instructions) else { continue };
        accepted += 1;
        for _ in 0..4 {
            let len = 1 + random.below(31);
            let stream: Vec<u8> = (0..len).map(|_| random.bits() as u8).collect();
            let (front, back) = stream.split_at(random.below(len) as usize);
            let here = match here.message_len(&[front, back]) {
                Ok(FramingVerdict::Length(bytes)) => bytes as i32,
                Ok(FramingVerdict::NeedMore) => 0,
                Ok(FramingVerdict::Error(errno)) => -errno,
                Err(RunError::NotAnErrno { value }) => value,
                Err(error) => panic!("program {number}: the verifier took it, but here: {error}"),
            };
            assert_eq!(here, run(&there, &stream), "program {number} on {stream:?}:\n{instructions:02x?}");
        }
    }
    assert!(accepted > PROGRAMS / 2, "the verifier took only {accepted} of {PROGRAMS} programs");
    // A helper that exists in neither place, so that the comparison has two sides.
    assert!(load(&[call(9999), exit()].concat()).is_err());
}
