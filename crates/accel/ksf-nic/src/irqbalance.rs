//! A policy script that has irqbalance(1) leave the interrupts of one device alone. ksf never stops irqbalance, nor
//! changes its configuration.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use crate::error::NicError;
use crate::files::SystemFiles;

/// The script for an interface's device. irqbalance 1.0.5 and later calls it, as told by `--policyscript`, with the
/// path of a device in /sys and the number of an interrupt, and reads `ban=true`. It goes by the path, because numbers
/// are others after the next boot. `None`: the interface has no device with interrupts.
pub fn policy_script(files: &dyn SystemFiles, iface: &str) -> Option<String> {
    let device = files.canonical(&format!("sys/class/net/{iface}/device")).ok()?;
    // The address of the PCI device, on which a virtio device sits.
    let is_pci = |part: &&str| {
        let bytes = part.as_bytes();
        part.len() == 12 && bytes[4] == b':' && bytes[7] == b':' && bytes[10] == b'.'
    };
    let name = device.split('/').rfind(is_pci).or_else(|| device.rsplit('/').next())?;
    let plain = name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b":.-_".contains(&byte));
    plain.then(|| {
        format!(
            "#!/bin/sh\n\
             # For irqbalance --policyscript: leaves the interrupts of {iface} ({name}) alone.\n\
             case \"$1/\" in\n\
             */{name}/*) echo ban=true ;;\n\
             esac\n"
        )
    })
}

/// Writes the script, executable. A file that is there already is left as it is; that is an error unless it is the
/// same.
///
/// # Errors
///
/// [`NicError::PolicyExists`], [`NicError::Policy`].
pub fn write_policy(path: &Path, script: &str) -> Result<(), NicError> {
    let fail = |error: io::Error| NicError::Policy { path: path.to_owned(), error };
    match fs::OpenOptions::new().write(true).create_new(true).mode(0o755).open(path) {
        Ok(mut file) => file.write_all(script.as_bytes()).map_err(fail),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => match fs::read_to_string(path) {
            Ok(text) if text == script => Ok(()),
            Ok(_) => Err(NicError::PolicyExists { path: path.to_owned() }),
            Err(error) => Err(fail(error)),
        },
        Err(error) => Err(fail(error)),
    }
}
