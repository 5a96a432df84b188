//! Objects that a test compiles against the SDK.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use ksf_kernel::SDK;

/// A copy of the SDK, as it is installed; tests run side by side.
fn sdk() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("sdk-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        for (name, text) in SDK {
            std::fs::write(folder.join(name), text).unwrap();
        }
        folder
    })
}

/// Compiles as the example's Makefile does.
pub(crate) fn compile(source: &str, flags: &[&str]) -> PathBuf {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(source);
    let object = sdk().join(format!("{}.bpf.o", COUNT.fetch_add(1, Ordering::Relaxed)));
    let output = Command::new(std::env::var("CLANG").unwrap_or_else(|_| "clang".into()))
        .args(["-O2", "-g", "-target", "bpf", "-mcpu=v3", "-std=gnu11", "-Wall", "-Werror", "-Wno-unused-function"])
        .arg("-I")
        .arg(sdk())
        .args(flags)
        .arg("-c")
        .arg(&source)
        .arg("-o")
        .arg(&object)
        .output()
        .expect("clang runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    object
}
