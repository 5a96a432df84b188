//! Programs of a few instructions: what each may do, and that each crime has its own error.

use crate::common::asm::{add, call, exit, load_bytes, mov, mov_reg, mov64, op};
use ksf_bpf_framing::{Access, Fault, FramingLoadError, FramingOptions, FramingProgram, FramingVerdict, RunError};

fn program(instructions: &[Vec<u8>]) -> Result<FramingProgram, FramingLoadError> {
    FramingProgram::from_instructions(&instructions.concat(), &FramingOptions::default())
}

fn run(instructions: &[Vec<u8>], stream: &[u8]) -> Result<FramingVerdict, RunError> {
    program(instructions).expect("it loads").message_len(&[stream])
}

fn fault(instructions: &[Vec<u8>]) -> (u32, Fault) {
    match run(instructions, b"0123456789") {
        Err(RunError::Fault { at, fault }) => (at, fault),
        other => panic!("no fault but {other:?}"),
    }
}

fn refused(instructions: &[Vec<u8>]) -> String {
    program(instructions).expect_err("it must be refused").to_string()
}

#[test]
fn the_result_is_a_verdict() {
    let returns = |value| run(&[mov(0, value), exit()], b"");
    assert_eq!(returns(0), Ok(FramingVerdict::NeedMore));
    assert_eq!(returns(7), Ok(FramingVerdict::Length(7)));
    assert_eq!(returns(i32::MAX), Ok(FramingVerdict::Length(0x7fff_ffff)));
    assert_eq!(returns(-86), Ok(FramingVerdict::Error(FramingVerdict::ESTRPIPE)));
    assert_eq!(returns(-4095), Ok(FramingVerdict::Error(4095)));
    assert_eq!(returns(-4096), Err(RunError::NotAnErrno { value: -4096 }));
    assert_eq!(returns(i32::MIN), Err(RunError::NotAnErrno { value: i32::MIN }));
    // The kernel takes the lower half.
    assert_eq!(run(&[mov64(0, 0xdead_beef_0000_0005), exit()], b""), Ok(FramingVerdict::Length(5)));
    assert_eq!(run(&[mov64(0, 1 << 32), exit()], b""), Ok(FramingVerdict::NeedMore));
}

#[test]
fn lengths_have_limits() {
    let mut options = FramingOptions::default();
    (options.message_bytes_min, options.message_bytes_max) = (4, 100);
    let returns = |value, seen| {
        let program = FramingProgram::from_instructions(&[mov(0, value), exit()].concat(), &options).unwrap();
        program.message_len_after(&[b"0123456789"], seen)
    };
    assert_eq!(returns(3, 0), Err(RunError::TooShort { bytes: 3, min_bytes: 4 }));
    assert_eq!(returns(4, 0), Ok(FramingVerdict::Length(4)));
    assert_eq!(returns(100, 0), Ok(FramingVerdict::Length(100)));
    assert_eq!(returns(101, 0), Err(RunError::TooLong { bytes: 101, max_bytes: 100 }));
    // It had said of 5 bytes that they are not a message.
    assert_eq!(returns(5, 5), Err(RunError::InOldData { bytes: 5, seen_bytes: 5 }));
    assert_eq!(returns(6, 5), Ok(FramingVerdict::Length(6)));
    assert_eq!(returns(0, 5), Ok(FramingVerdict::NeedMore));
    for (value, seen, errno) in [(i32::MAX, 0, 90), (5, 5, 71), (1, 0, 71), (-5000, 0, 71)] {
        assert_eq!(returns(value, seen).unwrap_err().errno(), errno);
    }
}

#[test]
fn options_are_checked() {
    let with = |change: fn(&mut FramingOptions)| {
        let mut options = FramingOptions::default();
        change(&mut options);
        FramingProgram::from_instructions(&[mov(0, 0), exit()].concat(), &options).map(|_| ())
    };
    with(|_| {}).unwrap();
    for change in [
        (|options| options.message_bytes_min = 0) as fn(&mut FramingOptions),
        |options| options.message_bytes_max = 1 << 31,
        |options| (options.message_bytes_min, options.message_bytes_max) = (5, 4),
        |options| options.instructions_max = 0,
    ] {
        assert!(matches!(with(change), Err(FramingLoadError::BadParameter { .. })));
    }
}

#[test]
fn a_loop_ends_with_the_budget() {
    let forever = [mov(0, 0), op(0x05, 0, 0, -1, 0), exit()];
    assert_eq!(run(&forever, b""), Err(RunError::Budget { limit: 10_000 }));
    // Three instructions in a budget of three, and not in one of two.
    for (limit, verdict) in [(3, Ok(FramingVerdict::Length(2))), (2, Err(RunError::Budget { limit: 2 }))] {
        let mut options = FramingOptions::default();
        options.instructions_max = limit;
        let program = FramingProgram::from_instructions(&[mov(0, 1), add(0, 1), exit()].concat(), &options);
        assert_eq!(program.unwrap().message_len(&[]), verdict);
    }
}

#[test]
fn the_stream_is_read_in_pieces() {
    let be16_at_1 = program(&[
        mov_reg(6, 1),
        load_bytes(1, -8, 2),
        op(0x55, 0, 0, 3, 0), // if r0 != 0 goto +3
        op(0x69, 0, 10, -8, 0),
        op(0xdc, 0, 0, 0, 16),
        exit(),
        mov(0, 0),
        exit(),
    ])
    .unwrap();
    assert_eq!(be16_at_1.message_len(&[&[9], &[1], &[], &[2, 3]]), Ok(FramingVerdict::Length(0x102)));
    assert_eq!(be16_at_1.message_len(&[&[9, 1]]), Ok(FramingVerdict::NeedMore));
    assert_eq!(be16_at_1.message_len(&[]), Ok(FramingVerdict::NeedMore));
}

#[test]
fn a_failed_read_clears_its_target() {
    let program = [
        mov_reg(6, 1),
        op(0x7a, 10, 0, -8, -1), // *(u64 *)(r10 - 8) = -1
        load_bytes(8, -8, 4),
        mov_reg(7, 0),
        op(0x61, 0, 10, -8, 0),
        op(0x0f, 0, 7, 0, 0),
        exit(),
    ];
    assert_eq!(run(&program, b"0123456789"), Ok(FramingVerdict::Error(14)));
    // Offsets beyond an int are never there, also where a sum would wrap.
    let far = [mov_reg(6, 1), load_bytes(-4, -8, 8), exit()];
    assert_eq!(run(&far, b"0123456789"), Ok(FramingVerdict::Error(14)));
}

#[test]
fn legacy_loads_are_big_endian_and_return_0_at_the_end() {
    let stream = [0, 0, 1, 2, 3];
    let at = |code, offset| run(&[mov_reg(6, 1), mov(7, 2), op(code, 0, 0, 0, offset), exit()], &stream);
    assert_eq!(at(0x20, 1), Ok(FramingVerdict::Length(0x0001_0203)));
    assert_eq!(at(0x28, 2), Ok(FramingVerdict::Length(0x0102)));
    assert_eq!(at(0x30, 4), Ok(FramingVerdict::Length(3)));
    // Not there: the program returns 0 whatever follows.
    let or_9 =
        |code, offset| run(&[mov_reg(6, 1), mov(7, 2), op(code, 0, 0x70 >> 4, 0, offset), mov(0, 9), exit()], &stream);
    assert_eq!(or_9(0x40, 0), Ok(FramingVerdict::NeedMore)); // 2 + 0 .. 6
    assert_eq!(or_9(0x48, 1), Ok(FramingVerdict::Length(9))); // 3 .. 5
    assert_eq!(or_9(0x50, 3), Ok(FramingVerdict::NeedMore)); // 5 .. 6
    assert_eq!(or_9(0x50, -3), Ok(FramingVerdict::NeedMore)); // -1
    let no_context = [mov(6, 0), op(0x20, 0, 0, 0, 0), exit()];
    assert_eq!(fault(&no_context), (1, Fault::NotTheContext { register: 6 }));
    // They leave no arguments behind.
    let after = [mov_reg(6, 1), op(0x30, 0, 0, 0, 0), mov_reg(0, 1), exit()];
    assert_eq!(fault(&after), (2, Fault::UninitialisedRegister { register: 1 }));
}

#[test]
fn the_context_has_a_length_and_nothing_else() {
    let field = |code, offset| [op(code, 0, 1, offset, 0), exit()];
    assert_eq!(run(&field(0x61, 0), b"0123456789"), Ok(FramingVerdict::Length(10)));
    assert_eq!(fault(&field(0x61, 4)).1, Fault::ContextField { offset: 4, bytes: 4 });
    assert_eq!(fault(&field(0x79, 0)).1, Fault::ContextField { offset: 0, bytes: 8 });
    assert!(matches!(fault(&field(0x61, -4)).1, Fault::BadAddress { access: Access::Read, .. }));
    let write = [op(0x62, 1, 0, 0, 5), mov(0, 0), exit()];
    assert!(matches!(fault(&write).1, Fault::BadAddress { access: Access::Write, .. }));
}

#[test]
fn values_that_were_never_set_are_not_used() {
    assert_eq!(fault(&[exit()]), (0, Fault::UninitialisedRegister { register: 0 }));
    assert_eq!(fault(&[mov(0, 0), op(0x0f, 0, 5, 0, 0), exit()]).1, Fault::UninitialisedRegister { register: 5 });
    assert_eq!(fault(&[add(3, 1), exit()]).1, Fault::UninitialisedRegister { register: 3 });
    assert_eq!(fault(&[op(0x55, 7, 0, 0, 0), exit()]).1, Fault::UninitialisedRegister { register: 7 });
    let stack = [op(0x72, 10, 0, -7, 1), op(0x79, 0, 10, -8, 0), exit()];
    assert_eq!(fault(&stack), (1, Fault::UninitialisedStack { offset: -8, bytes: 8 }));
    // A helper takes the arguments away.
    let after = [mov_reg(6, 1), load_bytes(0, -8, 4), mov_reg(0, 3), exit()];
    assert_eq!(fault(&after).1, Fault::UninitialisedRegister { register: 3 });
}

#[test]
fn addresses_lead_to_memory_or_nowhere() {
    let store = |offset| fault(&[op(0x7a, 10, 0, offset, 0), mov(0, 0), exit()]).1;
    assert!(matches!(store(0), Fault::BadAddress { bytes: 8, access: Access::Write, .. }));
    assert!(matches!(store(-520), Fault::BadAddress { .. }));
    assert_eq!(store(-12), Fault::Misaligned { offset: -12, bytes: 8 });
    let load = |address| fault(&[mov64(1, address), op(0x71, 0, 1, 0, 0), exit()]).1;
    for address in [0, 1, u64::MAX, 0x7fff_ffff_f000, 0x4b53_4653_0001_0000] {
        assert_eq!(load(address), Fault::BadAddress { address, bytes: 1, access: Access::Read });
    }
    assert_eq!(fault(&[mov_reg(0, 10), exit()]), (1, Fault::ReturnsAddress));
    assert_eq!(fault(&[mov_reg(0, 1), exit()]), (1, Fault::ReturnsAddress));
}

#[test]
fn helpers_check_their_arguments() {
    let with = |offset_of_room, len: Vec<u8>| {
        let load = [mov(2, 0), mov_reg(3, 10), add(3, offset_of_room), len, call(26), exit()].concat();
        fault(&[load])
    };
    assert!(matches!(with(-8, mov(4, 9)), (4, Fault::BadAddress { bytes: 9, .. })));
    assert!(matches!(with(-520, mov(4, 9)).1, Fault::BadAddress { .. }));
    assert!(matches!(with(-512, mov(4, 513)).1, Fault::BadAddress { bytes: 513, .. }));
    assert_eq!(with(-8, mov(4, 0)).1, Fault::BadSize { bytes: 0 });
    assert_eq!(with(-8, mov(4, -1)).1, Fault::BadSize { bytes: -1 });
    let no_context = [mov(1, 0), mov(2, 0), mov_reg(3, 10), add(3, -8), mov(4, 8), call(26), exit()];
    assert_eq!(fault(&no_context).1, Fault::NotTheContext { register: 1 });
    // Kernel memory does not exist: the helper fails as on a bad address, and clears its target.
    let probe = [mov_reg(3, 1), mov_reg(1, 10), add(1, -8), mov(2, 4), call(113)];
    let probed = [probe.concat(), op(0x61, 7, 10, -8, 0), op(0x0f, 0, 7, 0, 0), exit()];
    assert_eq!(run(&probed, b""), Ok(FramingVerdict::Error(14)));
}

#[test]
fn what_does_not_exist_is_refused_by_name() {
    let end = || [mov(0, 0), exit()].concat();
    for (code, words) in [
        (op(0xdb, 10, 1, -8, 0), "instruction 0 (atomic operation 0xdb): atomic operations have no use"),
        (op(0x91, 1, 1, 0, 0), "(sign-extending load 0x91): an instruction of cpu v4"),
        (op(0xbf, 1, 1, 8, 0), "(sign-extending move 0xbf): an instruction of cpu v4"),
        (op(0x3f, 1, 1, 1, 0), "(signed division 0x3f): an instruction of cpu v4"),
        (op(0xd7, 1, 0, 0, 64), "(byte swap 0xd7): an instruction of cpu v4"),
        (op(0x06, 0, 0, 0, 1), "(jump 0x06): an instruction of cpu v4"),
        (op(0x37, 0, 0, 0, 0), "(division 0x37): divides by zero"),
        (op(0x97, 0, 0, 0, 0), "(division 0x97): divides by zero"),
        (op(0x67, 0, 0, 0, 64), "shifts by 64 bits"),
        (op(0x64, 0, 0, 0, 32), "shifts by 32 bits"),
        (op(0xc7, 0, 0, 0, -1), "shifts by -1 bits"),
        (op(0xd4, 0, 0, 0, 8), "no byte swap of 8 bits"),
        (op(0x20, 0, 0, 0, -0x10_0000), "no link or network header"),
        (op(0x38, 0, 0, 0, 0), "no such instruction"),
        (op(0xe7, 0, 0, 0, 0), "no such instruction"),
        (op(0xf5, 0, 0, 0, 0), "no such instruction"),
        (op(0x07, 11, 0, 0, 0), "there is no register r11"),
        (op(0x0f, 0, 12, 0, 0), "there is no register r12"),
        (add(10, 8), "r10 is read-only"),
        (mov64(10, 8), "r10 is read-only"),
        (op(0x07, 0, 3, 0, 0), "unused fields are not zero"),
        (op(0x0f, 0, 3, 0, 1), "unused fields are not zero"),
        (op(0x85, 0, 1, 0, 0), "not a function of the program"),
        (op(0x85, 0, 2, 0, 0), "calls a kernel function"),
        (call(1), "helper 1 (bpf_map_lookup_elem) does not exist"),
        (call(68), "helper 68 (bpf_skb_load_bytes_relative) does not exist"),
        (call(9999), "helper 9999 does not exist"),
        (call(-1), "helper -1 does not exist"),
        (op(0x18, 0, 1, 0, 3).into_iter().chain(op(0, 0, 0, 0, 0)).collect(), "pseudo source 1: maps"),
        (op(0x05, 0, 0, 2, 0), "jumps out of its function"),
        (op(0x05, 0, 0, -2, 0), "jumps out of its function"),
        (op(0x15, 0, 0, i16::MIN, 0), "jumps out of its function"),
    ] {
        let said = refused(&[code, end()]);
        assert!(said.contains(words), "{said}\nlacks {words}");
    }
    let into_middle = refused(&[op(0x05, 0, 0, 1, 0), mov64(0, 0), exit()]);
    assert!(into_middle.contains("into the middle of a 64-bit immediate"), "{into_middle}");
    assert!(refused(&[mov(0, 0)]).contains("ends without exit"));
    assert!(refused(&[op(0x18, 0, 0, 0, 0)]).contains("second half is missing"));
    assert!(matches!(program(&[]), Err(FramingLoadError::Malformed { .. })));
    assert!(matches!(program(&[vec![0x95; 9]]), Err(FramingLoadError::Malformed { .. })));
    assert!(matches!(program(&[exit().repeat(70_000)]), Err(FramingLoadError::TooLarge { .. })));
}

#[test]
fn programs_are_shared_between_threads() {
    fn shared<T: Send + Sync>(_: &T) {}
    let program = program(&[op(0x61, 0, 1, 0, 0), exit()]).unwrap();
    shared(&program);
    std::thread::scope(|scope| {
        for len in 1..5_usize {
            let program = &program;
            scope.spawn(move || {
                let stream = vec![0; len];
                assert_eq!(program.message_len(&[&stream]), Ok(FramingVerdict::Length(len as u32)));
            });
        }
    });
}
