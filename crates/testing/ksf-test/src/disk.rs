//! File systems in images. The caller has mounts of its own ([`crate::own_run_or_skip`]).

use std::fs::{self, File};
use std::path::Path;

use crate::{program_or_skip, skip, succeeds};

/// Makes a file system in a sparse image, and mounts it on a directory. `kind`: as mkfs(8) and the kernel call it; `options`: those of
/// its mkfs. `None`: the test is skipped, because the machine has no program to make it, no such file system, or no loop devices.
pub fn image_or_skip(kind: &str, options: &[&str], image: &Path, mib: u64, at: &Path) -> Option<()> {
    let mkfs = program_or_skip(&format!("mkfs.{kind}"))?;
    let has_kind = fs::read_to_string("/proc/filesystems").unwrap().lines().any(|line| line.trim() == kind);
    if !has_kind || !Path::new("/dev/loop-control").exists() {
        skip(format_args!("needs a kernel with {kind} and loop devices"));
        return None;
    }
    File::create(image).unwrap().set_len(mib << 20).unwrap();
    succeeds(&[&[mkfs.to_str().unwrap(), "-q"], options, &[image.to_str().unwrap()]].concat());
    mount_image(image, at);
    Some(())
}

/// Mounts the file system of an image.
pub fn mount_image(image: &Path, at: &Path) {
    succeeds(&["mount", "-o", "loop,nodiscard", image.to_str().unwrap(), at.to_str().unwrap()]);
}
