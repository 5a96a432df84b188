//! What lies below a folder. The tests of `ksf-ninep` have this file, too.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Path, mode, links, and content or target of everything below a folder.
pub(crate) fn tree(folder: &Path) -> BTreeMap<PathBuf, (u32, u64, Vec<u8>)> {
    let mut all = BTreeMap::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(dir) = folders.pop() {
        for entry in fs::read_dir(&dir).unwrap() {
            let path = entry.unwrap().path();
            let metadata = fs::symlink_metadata(&path).unwrap();
            let content = if metadata.is_dir() {
                folders.push(path.clone());
                Vec::new()
            } else if metadata.is_symlink() {
                fs::read_link(&path).unwrap().into_os_string().into_encoded_bytes()
            } else {
                fs::read(&path).unwrap()
            };
            let name = path.strip_prefix(folder).unwrap().to_owned();
            all.insert(name, (metadata.mode(), metadata.nlink(), content));
        }
    }
    all
}
