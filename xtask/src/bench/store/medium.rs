//! What the data of the servers lie on.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// The file system and the disk of a folder, and whether that disk has a volatile cache: "ext4 on vda, write back".
pub(crate) fn medium(folder: &Path) -> String {
    let Ok(device) = fs::metadata(folder).map(|metadata| metadata.dev()) else { return "an unknown disk".to_owned() };
    let number = format!("{}:{}", rustix::fs::major(device), rustix::fs::minor(device));
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let system = file_system(&mounts, &number).unwrap_or("an unknown file system");
    let path = format!("/sys/dev/block/{number}");
    let Ok(disk) = fs::canonicalize(path) else { return format!("{system}, on no disk of its own") };
    let name = disk.file_name().unwrap_or_default().to_string_lossy().into_owned();
    // That of a partition is its disk's.
    let cache = [disk.as_path()].into_iter().chain(disk.parent()).find_map(|dir| {
        let text = fs::read_to_string(dir.join("queue/write_cache")).ok()?;
        Some(text.trim().to_owned())
    });
    let cache = match cache.as_deref() {
        Some("write back") => "with a volatile cache (write back)",
        Some("write through") => "without a volatile cache (write through)",
        _ => "of whose cache nothing is known",
    };
    format!("{system} on {name}, a disk {cache}")
}

/// "25 1 254:0 / / rw,relatime - ext4 /dev/vda rw": the type after the dash, of the device.
fn file_system<'a>(mounts: &'a str, number: &str) -> Option<&'a str> {
    let line = mounts.lines().find(|line| line.split(' ').nth(2) == Some(number))?;
    line.split_once(" - ")?.1.split(' ').next()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_system_of_a_device_is_found() {
        let mounts = "22 1 0:21 / /proc rw - proc proc rw\n25 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw\n";
        assert_eq!(file_system(mounts, "254:0"), Some("ext4"));
        assert_eq!(file_system(mounts, "254:1"), None);
    }

    #[test]
    fn a_folder_has_a_medium() {
        assert!(!medium(&crate::target_dir().unwrap()).contains("unknown"));
        assert!(medium(Path::new("/nowhere")).contains("unknown"));
    }
}
