//! Where the libraries are that ksf has other programs load.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use crate::output::{Failure, Status};

/// The first of these files that is there: in KSF_LIB_DIR if that is set, else beside ksf and in ../lib/ksf. A library
/// may have one name where it is installed and another where it is built.
pub(crate) fn find(names: &[&str]) -> Result<PathBuf, Failure> {
    let folders = folders(std::env::var_os("KSF_LIB_DIR"), std::env::current_exe().ok().as_deref());
    let files = folders.iter().flat_map(|folder| names.iter().map(|name| folder.join(name)));
    files.into_iter().find(|file| file.is_file()).ok_or_else(|| {
        let folders: Vec<_> = folders.iter().map(|folder| folder.display().to_string()).collect();
        Failure::new(Status::Unavailable, format!("{} is not in {}", names[0], folders.join(" or ")))
            .remedy("install ksf with make install, or set KSF_LIB_DIR to its folder")
    })
}

/// Where the library may be: as told, else beside the binary, or where it is installed.
fn folders(told: Option<OsString>, binary: Option<&Path>) -> Vec<PathBuf> {
    if let Some(told) = told.filter(|told| !told.is_empty()) {
        return vec![told.into()];
    }
    let own = binary.and_then(Path::parent);
    own.map(|own| vec![own.to_owned(), own.join("../lib/ksf")]).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_library_is_looked_for_where_it_was_told() {
        let binary = Path::new("/opt/ksf/bin/ksf");
        assert_eq!(folders(Some("/elsewhere".into()), Some(binary)), [Path::new("/elsewhere")]);
        let beside = [PathBuf::from("/opt/ksf/bin"), PathBuf::from("/opt/ksf/bin/../lib/ksf")];
        assert_eq!(folders(Some("".into()), Some(binary)), beside);
        assert_eq!(folders(None, Some(binary)), beside);
    }
}
