//! How much memory the machine has for this process.

use std::fs;
use std::path::{Path, PathBuf};

/// Half of the memory of the machine, or of what the control groups of the process may take if that is less.
pub(super) fn half_of_the_machine() -> u64 {
    let info = rustix::system::sysinfo();
    let all = (info.totalram as u64).saturating_mul(u64::from(info.mem_unit.max(1)));
    let group = fs::read_to_string("/proc/self/cgroup").ok().and_then(|text| group(&text));
    let limit = group.and_then(|group| limit(Path::new("/sys/fs/cgroup"), &group));
    limit.map_or(all, |limit| limit.min(all)) / 2
}

/// The group in the unified hierarchy, as /proc/PID/cgroup names it.
fn group(text: &str) -> Option<PathBuf> {
    let path = text.lines().find_map(|line| line.strip_prefix("0::/"))?;
    Some(PathBuf::from(path))
}

/// The least `memory.max` of a group and of those that it is in; `None` if there is none.
fn limit(root: &Path, group: &Path) -> Option<u64> {
    let files = group.ancestors().map(|group| root.join(group).join("memory.max"));
    files.filter_map(|file| fs::read_to_string(file).ok()?.trim().parse().ok()).min()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_narrowest_group_counts() {
        let folder = ksf_test::Folder::new();
        fs::create_dir_all(folder.path("a/b")).unwrap();
        folder.write("a/memory.max", "1000\n");
        folder.write("a/b/memory.max", "max\n");
        let group = group("1:cpu:/x\n0::/a/b\n").unwrap();
        let root = folder.path("");
        assert_eq!(limit(&root, &group), Some(1000));
        folder.write("a/b/memory.max", "500\n");
        assert_eq!(limit(&root, &group), Some(500));
        assert_eq!(limit(&root, Path::new("c")), None);
        assert!(half_of_the_machine() > 0);
    }
}
