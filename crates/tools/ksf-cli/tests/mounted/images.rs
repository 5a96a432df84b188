//! File systems of a test, in images that it mounts. The caller has its own mounts and its own /run.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use ksf_test::{program_or_skip, skip, succeeds};

use crate::support::export::Place;

/// Entries of the cold directory.
const ENTRIES: usize = 100_000;

const COLD: &str = "/run/cold";

/// Makes a file system of this kind in a sparse image, and mounts it.
pub(crate) fn mount_or_skip(kind: &str, options: &[&str], image: &Path, mib: u64, at: &Path) -> Option<()> {
    let mkfs = program_or_skip(&format!("mkfs.{kind}"))?;
    let has_kind = fs::read_to_string("/proc/filesystems").unwrap().lines().any(|line| line.trim() == kind);
    if !has_kind || !Path::new("/dev/loop-control").exists() {
        skip(format_args!("needs a kernel with {kind} and loop devices"));
        return None;
    }
    File::create(image).unwrap().set_len(mib << 20).unwrap();
    succeeds(&[&[mkfs.to_str().unwrap(), "-q"], options, &[image.to_str().unwrap()]].concat());
    mount(image, at);
    Some(())
}

fn mount(image: &Path, at: &Path) {
    succeeds(&["mount", "-o", "loop,nodiscard", image.to_str().unwrap(), at.to_str().unwrap()]);
}

/// Makes a directory with very many entries, none of which the kernel of this machine has in memory: its file system is mounted again
/// when it is filled, so that no cache has to be dropped that other programs use. Writes the sorted names to `names-of-many` in the
/// export.
pub(crate) fn cold_directory_or_skip(place: &Place) -> Option<PathBuf> {
    let (image, at) = (place.0.path("cold"), Path::new(COLD));
    let directory = at.join("many");
    fs::create_dir_all(at).unwrap();
    let inodes = (ENTRIES + 100).to_string();
    let options = ["-F", "-E", "nodiscard", "-O", "^has_journal", "-N", inodes.as_str()];
    mount_or_skip("ext4", &options, &image, 64, at)?;
    fs::create_dir(&directory).unwrap();
    let mut names: Vec<String> = (0..ENTRIES).map(|number| format!("entry-{number}\n")).collect();
    names.iter().for_each(|name| drop(File::create(directory.join(name.trim_end())).unwrap()));
    names.sort_unstable();
    fs::write(place.export().join("names-of-many"), names.concat()).unwrap();
    succeeds(&["umount", COLD]);
    mount(&image, at);
    Some(directory)
}
