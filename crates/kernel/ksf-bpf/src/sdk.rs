//! The headers that programs of ksf's users include.

use std::fs;
use std::io;
use std::path::Path;

/// The headers that those of every SDK include: name and text of each. The name may have a folder in it.
///
/// `bpf/` is libbpf's (LGPL-2.1 OR BSD-2-Clause).
pub const SDK: &[(&str, &str)] = &[
    ("ksf_kernel.h", include_str!("../bpf/ksf_kernel.h")),
    ("bpf/bpf_core_read.h", include_str!(concat!(env!("KSF_LIBBPF_HEADERS"), "/bpf_core_read.h"))),
    ("bpf/bpf_endian.h", include_str!(concat!(env!("KSF_LIBBPF_HEADERS"), "/bpf_endian.h"))),
    ("bpf/bpf_helper_defs.h", include_str!(concat!(env!("KSF_LIBBPF_HEADERS"), "/bpf_helper_defs.h"))),
    ("bpf/bpf_helpers.h", include_str!(concat!(env!("KSF_LIBBPF_HEADERS"), "/bpf_helpers.h"))),
];

/// Writes [`SDK`] and other headers into a folder, which is made where there is none. `clang -I FOLDER` finds them.
///
/// # Errors
///
/// Of the file system.
pub fn write_sdk(folder: &Path, others: &[&[(&str, &str)]]) -> io::Result<()> {
    for (name, text) in std::iter::once(&SDK).chain(others).copied().flatten() {
        let file = folder.join(name);
        if let Some(parent) = file.parent() {
            fs::create_dir_all(parent)?;
        }
        fs::write(file, text)?;
    }
    Ok(())
}
