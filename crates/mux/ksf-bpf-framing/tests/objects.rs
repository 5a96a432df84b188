//! Object files: what clang writes is linked and run, and no damage does more than an error.

use crate::common::{THRIFT, compile};
use ksf_bpf_framing::{Fault, FramingLoadError, FramingOptions, FramingProgram, FramingVerdict, RunError};
use ksf_test::Random;

const INCLUDE: &str = "#include \"ksf_framing_program.h\"\n";

fn load(object: &[u8]) -> Result<FramingProgram, FramingLoadError> {
    FramingProgram::from_object(object, &FramingOptions::default())
}

fn source(name: &str, body: &str) -> FramingProgram {
    let object = compile(name, &format!("{INCLUDE}{body}"), &[]);
    load(&object).unwrap_or_else(|error| panic!("{name}: {error}"))
}

fn refused(name: &str, body: &str) -> String {
    let object = compile(name, &format!("{INCLUDE}{body}"), &[]);
    load(&object).expect_err("it must be refused").to_string()
}

#[test]
fn the_example_runs_for_every_cpu_version_and_for_af_kcm() {
    for (name, flags) in [
        ("thrift_v1", &["-mcpu=v1"][..]),
        ("thrift_v2", &["-mcpu=v2"]),
        ("thrift_v3", &["-mcpu=v3"]),
        ("thrift_kcm", &["-DKSF_AF_KCM"]),
        ("thrift_kcm_v1", &["-DKSF_AF_KCM", "-mcpu=v1"]),
        ("thrift_o1", &["-O1"]),
    ] {
        let program = load(&compile(name, THRIFT, flags)).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(program.name(), "thrift");
        for (stream, verdict) in [
            (&[0, 0, 0, 10, 1, 2][..], FramingVerdict::Length(14)),
            (&[0, 0, 0, 0], FramingVerdict::Length(4)),
            (&[0, 0, 0], FramingVerdict::NeedMore),
            (&[0x7f, 0xff, 0xff, 0xff], FramingVerdict::Error(90)),
            (&[0xff, 0xff, 0xff, 0xff], FramingVerdict::Error(90)),
        ] {
            assert_eq!(program.message_len(&[stream]), Ok(verdict), "{name} {stream:?}");
        }
    }
}

#[test]
fn the_documentation_shows_the_example() {
    let manual = include_str!("../../../../docs/framing-programs.md");
    let from = THRIFT.find("KSF_FRAMING_PROGRAM").unwrap();
    assert!(manual.contains(&THRIFT[from..]), "docs/framing-programs.md and bpf/thrift.bpf.c differ");
}

#[test]
fn the_header_is_the_one_that_is_published() {
    assert!(ksf_bpf_framing::SDK[0].1.contains("#define KSF_FRAMING_PROGRAM(name)"));
    // Next to the kernel's own header, where that is found.
    let arch = format!("-I/usr/include/{}-linux-gnu", std::env::consts::ARCH);
    if std::path::Path::new("/usr/include/linux/bpf.h").exists() {
        let both = format!("#include <linux/bpf.h>\n{THRIFT}");
        assert!(load(&compile("thrift_uapi", &both, &[&arch])).is_ok());
    }
}

#[test]
fn functions_call_each_other() {
    let program = source(
        "calls",
        r#"
        static __attribute__((noinline)) int twice(int value) { return value * 2; }
        static __attribute__((noinline)) int four_times(int value) { return twice(value) + twice(value); }
        __attribute__((noinline)) int read_u8(struct __sk_buff *skb, __u32 offset, __u8 *to)
        {
            return bpf_skb_load_bytes(skb, offset, to, 1);
        }
        KSF_FRAMING_PROGRAM(calls)
        {
            __u8 here = 0, next = 0;
            if (read_u8(stream->skb, 0, &here) || read_u8(stream->skb, 1, &next))
                return 0;
            return four_times(here) + next;
        }
        "#,
    );
    assert_eq!(program.message_len(&[&[10], &[3]]), Ok(FramingVerdict::Length(43)));
    assert_eq!(program.message_len(&[&[10]]), Ok(FramingVerdict::NeedMore));
}

#[test]
fn calls_have_a_depth() {
    let program = source(
        "depth",
        r#"
        __attribute__((noinline)) int down(int depth)
        {
            volatile char kept[64];
            kept[0] = 1;
            return depth ? down(depth - 1) + kept[0] : 0;
        }
        KSF_FRAMING_PROGRAM(depth)
        {
            __u8 depth;
            return ksf_load_u8(stream, 0, &depth) ? down(depth) : 0;
        }
        "#,
    );
    // The program and seven calls.
    assert_eq!(program.message_len(&[&[6]]), Ok(FramingVerdict::Length(6)));
    let Err(RunError::Fault { at, fault: Fault::CallDepth { limit: 8 } }) = program.message_len(&[&[7]]) else {
        panic!("eight calls within a program are too many")
    };
    assert_eq!(program.place(at).0, "down");
    assert_eq!(program.place(0), ("depth", 0));
}

#[test]
fn constants_are_read_only_data() {
    let program = source(
        "constants",
        r#"
        static const volatile __u8 lengths[5] = {9, 8, 7, 6, 5};
        const volatile __u32 base = 1000;
        KSF_FRAMING_PROGRAM(constants)
        {
            __u8 kind;
            if (!ksf_load_u8(stream, 0, &kind))
                return 0;
            return kind < 8 ? base + lengths[kind] : -EPROTO;
        }
        "#,
    );
    assert_eq!(program.message_len(&[&[0]]), Ok(FramingVerdict::Length(1009)));
    assert_eq!(program.message_len(&[&[4]]), Ok(FramingVerdict::Length(1005)));
    assert_eq!(program.message_len(&[&[8]]), Ok(FramingVerdict::Error(71)));
    // The program does not check at all.
    let beyond = source(
        "beyond",
        r#"
        static const volatile __u8 few[3] = {1, 2, 3};
        KSF_FRAMING_PROGRAM(beyond)
        {
            __u8 kind;
            return ksf_load_u8(stream, 0, &kind) ? few[kind] : 0;
        }
        "#,
    );
    assert_eq!(beyond.message_len(&[&[0]]), Ok(FramingVerdict::Length(1)));
    assert!(matches!(
        beyond.message_len(&[&[3]]),
        Err(RunError::Fault { fault: Fault::BadAddress { bytes: 1, .. }, .. })
    ));
}

#[test]
fn one_of_several_programs_is_named() {
    let object = compile(
        "several",
        &format!(
            r#"{INCLUDE}
            KSF_FRAMING_PROGRAM(first) {{ return 1; }}
            KSF_FRAMING_PROGRAM(second) {{ return 2; }}
            __attribute__((section("socket/third"), used)) int other(struct __sk_buff *skb) {{ return 3; }}
            __attribute__((section("xdp"), used)) int stranger(void *xdp)
            {{
                return ((int (*)(void))8)();
            }}"#
        ),
        &[],
    );
    let named = |name: Option<&str>| {
        let mut options = FramingOptions::default();
        options.program = name.map(str::to_owned);
        FramingProgram::from_object(&object, &options)
    };
    for (name, length) in [("first", 1), ("second", 2), ("other", 3), ("socket/third", 3)] {
        assert_eq!(named(Some(name)).unwrap().message_len(&[]), Ok(FramingVerdict::Length(length)), "{name}");
    }
    let Err(FramingLoadError::SeveralPrograms { found }) = named(None) else { panic!("there are three") };
    assert_eq!(found, ["first", "second", "other"]);
    // Two in one section.
    assert!(matches!(named(Some("socket")), Err(FramingLoadError::SeveralPrograms { found }) if found.len() == 2));
    assert!(named(Some("stranger")).unwrap_err().to_string().contains("there is: first, second, other"));
}

#[test]
fn maps_variables_and_foreign_functions_are_refused_by_name() {
    let counter = r#"
        static __u32 counter;
        KSF_FRAMING_PROGRAM(counts) { return ++*(volatile __u32 *)&counter; }
    "#;
    let said = refused("variable", counter);
    assert!(said.contains("function counts") && said.contains(".bss") && said.contains("code and constants"), "{said}");
    let map = r#"
        struct { int (*type)[2]; } lengths __attribute__((section(".maps"), used));
        static void *(*const lookup)(void *, const void *) = (void *)1;
        KSF_FRAMING_PROGRAM(looks_up)
        {
            __u32 key = 0, *value = lookup(&lengths, &key);
            return value ? *value : 0;
        }
    "#;
    let said = refused("map", map);
    assert!(said.contains("refers to lengths, a map"), "{said}");
    let said = refused("undefined", "extern int elsewhere(void); KSF_FRAMING_PROGRAM(calls) { return elsewhere(); }");
    assert!(said.contains("refers to elsewhere, which is not in the object"), "{said}");
    let said = refused("none", "int plain(struct __sk_buff *skb) { return 1; }");
    assert!(said.contains("no framing program") && said.contains("section \"socket\""), "{said}");
}

#[test]
fn other_files_are_told_apart() {
    let said = |bytes: &[u8]| load(bytes).unwrap_err().to_string();
    assert!(said(b"").contains("no ELF header"));
    assert!(said(b"#include \"x.h\"\n").contains("no ELF header"));
    let object = compile("thrift_damaged", THRIFT, &[]);
    let changed = |at: usize, value: u8| {
        let mut object = object.clone();
        object[at] = value;
        said(&object)
    };
    assert!(changed(4, 1).contains("not a 64-bit object"));
    assert!(changed(5, 3 - object[5]).contains("other byte order"));
    assert!(changed(18, 62).contains("for machine"), "{}", changed(18, 62));
    let missing = FramingProgram::load("/nonexistent/framing.o", &FramingOptions::default()).unwrap_err();
    assert!(missing.to_string().contains("/nonexistent/framing.o"));
}

/// What `include_bytes!` embeds, or a file mapped behind something else, begins at any address.
#[test]
fn an_object_may_lie_at_any_address() {
    let object = compile("thrift_anywhere", THRIFT, &["-DKSF_AF_KCM"]);
    let mut memory = vec![0; object.len() + 8];
    for offset in 0..8 {
        memory[offset..offset + object.len()].copy_from_slice(&object);
        let program = load(&memory[offset..offset + object.len()]).unwrap_or_else(|error| panic!("{offset}: {error}"));
        assert_eq!(program.message_len(&[&[0, 0, 0, 10]]), Ok(FramingVerdict::Length(14)));
    }
}

#[test]
fn a_damaged_object_is_an_error_or_a_program() {
    let object = compile("thrift_cut", THRIFT, &["-DKSF_AF_KCM"]);
    for len in 0..object.len() {
        // The section headers are at the end.
        assert!(load(&object[..len]).is_err(), "the first {len} bytes pass as an object");
    }
    let mut random = Random::of_test(1);
    let mut loaded = 0;
    for _ in 0..20_000 {
        let mut damaged = object.clone();
        for _ in 0..=random.below(3) {
            let at = random.below(damaged.len() as u64) as usize;
            let any = random.bits() as u8;
            damaged[at] = random.pick(&[0, 1, 0x7f, 0x80, 0xff, any]);
        }
        if let Ok(program) = load(&damaged) {
            loaded += 1;
            // Whatever it says, it says something.
            let _ = program.message_len(&[&[0, 0, 0, 10], &[1]]);
        }
    }
    assert!(loaded > 1000, "only {loaded} damaged objects loaded: the interpreter was hardly reached");
}
