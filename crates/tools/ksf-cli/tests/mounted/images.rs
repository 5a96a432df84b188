//! A directory of a test in a file system of its own. The caller has its own mounts and its own /run.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use ksf_test::{image_or_skip, mount_image, succeeds};

use crate::support::export::Place;

/// Entries of the cold directory.
const ENTRIES: usize = 100_000;

const COLD: &str = "/run/cold";

/// Makes a directory with very many entries, none of which the kernel of this machine has in memory: its file system is mounted again
/// when it is filled, so that no cache has to be dropped that other programs use. Writes the sorted names to `names-of-many` in the
/// export.
pub(crate) fn cold_directory_or_skip(place: &Place) -> Option<PathBuf> {
    let (image, at) = (place.0.path("cold"), Path::new(COLD));
    let directory = at.join("many");
    fs::create_dir_all(at).unwrap();
    let inodes = (ENTRIES + 100).to_string();
    let options = ["-F", "-E", "nodiscard", "-O", "^has_journal", "-N", inodes.as_str()];
    image_or_skip("ext4", &options, &image, 64, at)?;
    fs::create_dir(&directory).unwrap();
    let mut names: Vec<String> = (0..ENTRIES).map(|number| format!("entry-{number}\n")).collect();
    names.iter().for_each(|name| drop(File::create(directory.join(name.trim_end())).unwrap()));
    names.sort_unstable();
    fs::write(place.export().join("names-of-many"), names.concat()).unwrap();
    succeeds(&["umount", COLD]);
    mount_image(&image, at);
    Some(directory)
}
