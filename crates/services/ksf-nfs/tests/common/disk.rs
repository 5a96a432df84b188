//! File systems of a test: small ones on loop devices, in a mount namespace of their own. `ksf-ninep` has this file, too.

use std::fs::{self, File};
use std::io::Write;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use ksf_test::{image_or_skip, mount_image, own_run_or_skip, program_or_skip, skip, succeeds, wait_until};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

pub(crate) const IMAGE_BYTES: u64 = 16 << 20;
/// Where the file system of the test is mounted.
pub(crate) const DISK: &str = "/run/disk";
pub(crate) const BLOCK: usize = 4096;

/// Runs a test on a thread that may mount what it likes, if there are loop devices.
pub(crate) fn with_mounts(test: impl FnOnce() + Send) {
    let inside = || {
        let Some(()) = own_run_or_skip("a file system of its own") else { return };
        let Some(_) = program_or_skip("mkfs.ext4") else { return };
        if !Path::new("/dev/loop-control").exists() {
            return skip("needs loop devices");
        }
        test();
    };
    std::thread::scope(|scope| scope.spawn(inside).join()).unwrap_or_else(|panic| std::panic::resume_unwind(panic));
}

/// A file system in an image.
pub(crate) struct Disk {
    pub(crate) image: String,
}

impl Disk {
    /// In a tmpfs that has 2 MiB more than the image.
    pub(crate) fn new() -> Self {
        fs::create_dir("/run/media").unwrap();
        succeeds(&["mount", "-t", "tmpfs", "-o", "size=18m", "tmpfs", "/run/media"]);
        let image = "/run/media/image";
        File::create(image).unwrap().set_len(IMAGE_BYTES).unwrap();
        let disk = Self::of(image.to_owned());
        // mkfs leaves holes, which would be those that a test makes.
        succeeds(&["fallocate", "-l", &IMAGE_BYTES.to_string(), image]);
        disk.mount();
        disk
    }

    fn of(image: String) -> Self {
        succeeds(&["mkfs.ext4", "-q", "-F", "-E", "nodiscard", "-b", "4096", "-m", "0", "-N", "64", &image]);
        fs::create_dir(DISK).unwrap();
        Self { image }
    }

    pub(crate) fn mount(&self) {
        mount_image(self.image.as_ref(), DISK.as_ref());
    }

    /// Drops all that is in memory alone.
    pub(crate) fn mount_again(&self) {
        unmount();
        self.mount();
    }
}

/// A freeze of the disk, until the drop.
pub(crate) struct Frozen;

impl Frozen {
    pub(crate) fn new() -> Self {
        succeeds(&["fsfreeze", "-f", DISK]);
        Self
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        succeeds(&["fsfreeze", "-u", DISK]);
    }
}

/// Unmounts the disk of a server that was stopped, which may have a file open for a moment more.
pub(crate) fn unmount() {
    wait_until("nothing holds the disk", || Command::new("umount").arg(DISK).output().unwrap().status.success());
}

pub(crate) fn data(name: &str) -> PathBuf {
    Path::new(DISK).join("export").join(name)
}

/// Mounts a new file system of 512 MiB, which takes the memory of what is written; `None`: the test is skipped, because there is no
/// program to make it or no such file system in the kernel.
pub(crate) fn other_disk(kind: &str, options: &[&str]) -> Option<Disk> {
    let image = format!("/run/{kind}");
    fs::create_dir_all(DISK).unwrap();
    image_or_skip(kind, options, image.as_ref(), 512, DISK.as_ref())?;
    Some(Disk { image })
}

/// A file system whose medium takes nothing more once the image is sealed.
pub(crate) fn stoppable_disk() -> (OwnedFd, Disk) {
    let image = memfd_create("image", MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&image, IMAGE_BYTES).unwrap();
    let disk = Disk::of(format!("/proc/{}/fd/{}", std::process::id(), image.as_raw_fd()));
    disk.mount();
    fs::create_dir_all(data("")).unwrap();
    (image, disk)
}

/// Writes to a file until nothing more has room.
pub(crate) fn fill(path: &str) {
    let mut file = File::create(path).unwrap();
    while file.write_all(&[1; BLOCK]).is_ok() {}
}

/// Damages the second leaf of the tree of extents of a file on the disk, and mounts the disk again. Returns the first byte of the
/// file that cannot be read from then on; all before it can.
pub(crate) fn damage(disk: &Disk, name: &str) -> u64 {
    // A leaf has room for 340 extents.
    let file = File::create(data(name)).unwrap();
    (0..400).for_each(|at| file.write_all_at(&[b'f'; BLOCK], 2 * at * BLOCK as u64).unwrap());
    drop(file);
    unmount();
    let image = File::options().read(true).write(true).open(&disk.image).unwrap();
    let mut block = [0; BLOCK];
    let mut first = None;
    for at in (0..IMAGE_BYTES).step_by(BLOCK) {
        image.read_exact_at(&mut block, at).unwrap();
        // `struct ext4_extent_header`: the magic number, counts, depth 0. Then the number of the first block. The journal has copies.
        let start = u32::from_le_bytes(block[12..16].try_into().unwrap());
        if block[..2] == [0x0a, 0xf3] && block[6..8] == [0, 0] && start > 0 {
            image.write_all_at(&[0; 16], at).unwrap();
            assert_eq!(*first.get_or_insert(start), start);
        }
    }
    disk.mount();
    u64::from(first.expect("a leaf that is not the first")) * BLOCK as u64
}
