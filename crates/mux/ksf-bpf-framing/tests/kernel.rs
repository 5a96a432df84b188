//! The kernel as the judge: it takes the same objects, and its interpreter or JIT gives the same results.

use crate::common;
use crate::common::{THRIFT, compile};
use ksf_bpf_framing::{BuiltinFraming, FramingOptions, FramingProgram, FramingVerdict, VerifyError};
use ksf_test::{Random, skip};

/// `None`: the test is skipped. Some kernels let everybody load socket filters.
fn may_load() -> Option<()> {
    match FramingProgram::builtin(&BuiltinFraming::RecordMark, &FramingOptions::default()).unwrap().verify_with_kernel()
    {
        Err(VerifyError::NotPermitted { .. }) => {
            skip("needs root (loads socket filters)");
            None
        }
        Err(error) => panic!("{error}"),
        Ok(_) => Some(()),
    }
}

/// What the program returned in the kernel for the verdict of the interpreter.
fn returned(verdict: FramingVerdict) -> i32 {
    match verdict {
        FramingVerdict::Length(bytes) => bytes as i32,
        FramingVerdict::NeedMore => 0,
        FramingVerdict::Error(errno) => -errno,
    }
}

fn builtins() -> Vec<BuiltinFraming<'static>> {
    let mut builtins = vec![BuiltinFraming::RecordMark];
    builtins.extend([b"\n".as_slice(), b"\r\n", b"aba", b"\0\0", b"12345678"].map(BuiltinFraming::Delimiter));
    for width in [1, 2, 4, 8] {
        for (offset, big_endian, adjust) in [(0, true, i32::from(width)), (3, false, 0), (255, true, 300)] {
            builtins.push(BuiltinFraming::LengthPrefix { offset, width, big_endian, adjust });
        }
    }
    builtins
}

#[test]
fn builtins_run_alike_in_the_kernel() {
    let Some(()) = may_load() else { return };
    let mut random = Random::of_test(7);
    for builtin in builtins() {
        let program = FramingProgram::builtin(&builtin, &FramingOptions::default()).unwrap();
        let mut kernel = program.verify_with_kernel().unwrap_or_else(|error| panic!("{builtin:?}: {error}"));
        let mut lengths = 0;
        for round in 0..300 {
            let len = 1 + random.below(if round % 10 == 0 { 1500 } else { 40 }) as usize;
            let byte = |_| random.pick(&[0, 0, 1, 2, 0x80, b'a', b'b', b'\r', b'\n', (round % 256) as u8]);
            let stream: Vec<u8> = (0..len).map(byte).collect();
            let here = program.message_len(&[&stream]).unwrap_or_else(|error| panic!("{builtin:?}: {error}"));
            let there = kernel.test_run(&stream).expect("the kernel runs it");
            assert_eq!(returned(here), there, "{builtin:?} on {stream:?}");
            lengths += u32::from(matches!(here, FramingVerdict::Length(_)));
        }
        let rare = matches!(builtin, BuiltinFraming::Delimiter(delimiter) if delimiter.len() == 8)
            || matches!(builtin, BuiltinFraming::LengthPrefix { width: 8, .. });
        assert!(lengths > 0 || rare, "{builtin:?} never found a message");
    }
}

#[test]
fn authors_programs_load_with_and_without_the_offset() {
    let Some(()) = may_load() else { return };
    for (name, flags) in [("thrift_plain", &[][..]), ("thrift_offset", &["-DKSF_AF_KCM"])] {
        let program = FramingProgram::from_object(&compile(name, THRIFT, flags), &FramingOptions::default()).unwrap();
        let mut kernel = program.verify_with_kernel().unwrap_or_else(|error| panic!("{name}: {error}"));
        for stream in [&[0, 0, 0, 10, 1, 2][..], &[0, 0, 0], &[0xff; 4]] {
            assert_eq!(kernel.test_run(stream).unwrap(), returned(program.message_len(&[stream]).unwrap()));
        }
    }
}

#[test]
fn a_program_in_a_named_section_loads_too() {
    let Some(()) = may_load() else { return };
    let source = r#"
        #include "ksf_framing_program.h"
        KSF_FRAMING_PROGRAM(first) { return 1; }
        __attribute__((section("socket/second"), used)) int second(struct __sk_buff *skb) { return 2; }
        KSF_LICENSE("Dual MIT/GPL");
    "#;
    let mut options = FramingOptions::default();
    options.program = Some("socket/second".into());
    let program = FramingProgram::from_object(&compile("named", source, &[]), &options).unwrap();
    assert_eq!(program.verify_with_kernel().unwrap().test_run(b"x").unwrap(), 2);
}

#[test]
fn the_verifiers_words_come_back() {
    let Some(()) = may_load() else { return };
    // The interpreter takes it and stops it at run time; the verifier sees that it reads beyond its constants.
    let source = r#"
        #include "ksf_framing_program.h"
        static const volatile __u8 few[3] = {1, 2, 3};
        KSF_FRAMING_PROGRAM(beyond)
        {
            __u8 kind;
            return ksf_load_u8(stream, 0, &kind) ? few[kind] : 0;
        }
        KSF_LICENSE("Dual MIT/GPL");
    "#;
    let program = FramingProgram::from_object(&compile("verifier", source, &[]), &FramingOptions::default()).unwrap();
    let error = program.verify_with_kernel().expect_err("the verifier refuses it");
    assert!(matches!(&error, VerifyError::Refused { summary, .. } if summary.contains("invalid access")), "{error}");
    let raw = FramingProgram::from_instructions(&common::asm::exit(), &FramingOptions::default()).unwrap();
    assert!(matches!(raw.verify_with_kernel(), Err(VerifyError::NoObject)));
}
