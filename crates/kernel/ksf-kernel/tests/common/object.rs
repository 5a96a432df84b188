//! Objects that a test compiles against the SDK.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use ksf_kernel::SDK;
use ksf_test::compile::bpf;

/// A copy of the SDK, as it is installed; tests run side by side.
fn sdk() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("sdk-{}", std::process::id()));
        ksf_bpf::write_sdk(&folder, &[SDK]).unwrap();
        folder
    })
}

/// Compiles a file of this crate.
pub(crate) fn compile(source: &str, flags: &[&str]) -> PathBuf {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let object = sdk().join(format!("{}.bpf.o", COUNT.fetch_add(1, Ordering::Relaxed)));
    bpf(Path::new(env!("CARGO_MANIFEST_DIR")).join(source), &object, sdk(), flags);
    object
}
