//! `ksf kcm-run` finds its library, and becomes the program.

use std::process::Command;

fn kcm_run() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ksf"));
    command.arg("kcm-run");
    command
}

#[test]
fn it_becomes_the_program_with_the_library_preloaded() {
    let folder = std::env::temp_dir().join(format!("ksf-kcm-run-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    // Any library will do: what it does is tested where it is made.
    let source = folder.join("mark.c");
    std::fs::write(&source, "int ksf_mark = 1;\n").unwrap();
    let library = folder.join("libksf_kcm_preload.so");
    let compiled = Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&library).arg(&source).status().unwrap();
    assert!(compiled.success());

    let mut command = kcm_run();
    command.env("KSF_LIB_DIR", &folder).env_remove("LD_PRELOAD");
    let output = command.args(["--", "sh", "-c", "printf %s \"$LD_PRELOAD\"; exit 7"]).output().unwrap();
    assert_eq!(output.status.code(), Some(7), "{output:?}");
    assert_eq!(String::from_utf8(output.stdout).unwrap(), library.to_str().unwrap());

    let missing = kcm_run().env("KSF_LIB_DIR", &folder).arg("/does/not/exist").output().unwrap();
    assert_eq!(missing.status.code(), Some(66), "{missing:?}");
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn without_its_library_it_says_where_it_looked() {
    let output = kcm_run().env("KSF_LIB_DIR", "/does/not/exist").arg("true").output().unwrap();
    assert_eq!(output.status.code(), Some(69));
    let line = String::from_utf8(output.stderr).unwrap();
    assert!(line.contains("libksf_kcm_preload.so is not in /does/not/exist") && line.lines().count() == 1, "{line}");
}
