//! The store in a machine whose disk loses what was not flushed when the power goes, and fails writes when it is told to.
//!
//! ```text
//!  QEMU ── ext4 on virtio-blk ── nbdkit: error (fails writes) ── cache (lost with the process) ── a file
//! ```

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Command, Stdio};

use ksf_lab::{Lab, Vm, turn};
use ksf_test::{Running, program_or_skip};

use super::client::{Client, command};
use crate::support::{Folder, wait_until};

const KEYS: usize = 200;

/// The disk is the same file for each machine; what nbdkit keeps of it goes with nbdkit.
struct Disk {
    folder: Folder,
    server: Option<Running>,
}

impl Disk {
    fn new() -> Self {
        let folder = Folder::new();
        File::create(folder.path("disk")).unwrap().set_len(96 << 20).unwrap();
        let mut disk = Self { folder, server: None };
        disk.power_cut();
        disk
    }

    /// While this file is there, writes fail.
    fn trigger(&self) -> PathBuf {
        self.folder.path("fail")
    }

    /// What was not flushed is lost. The disk is there again.
    fn power_cut(&mut self) {
        // `Running` kills it.
        self.server = None;
        let socket = self.folder.path("socket");
        let _: std::io::Result<()> = fs::remove_file(&socket);
        let mut command = Command::new("nbdkit");
        command.args(["--foreground", "--filter=error", "--filter=cache", "--unix"]).arg(&socket);
        command.arg("file").arg(self.folder.path("disk")).args(["cache=writeback", "error-pwrite=EIO"]);
        command.arg("error-pwrite-rate=100%").arg(format!("error-pwrite-file={}", self.trigger().display()));
        let server = Running::start(command.env("TMPDIR", self.folder.path("")).stdout(Stdio::null()));
        self.server = Some(server);
        wait_until("nbdkit listens", || socket.exists());
    }

    /// Boots a machine that has this disk, and a store on it. The file system does not flush the disk by itself: each of its
    /// commits, every 5 s by default, and the thread that fills the tables of inodes after the first mount (fs/ext4/ialloc.c,
    /// `ext4_init_inode_table`), makes durable what the store has written without waiting.
    fn boot(&self, before: &str, options: &str) -> (Vm, Client) {
        let script = format!(
            "mkdir -p /mnt\n{before}\nmount -t ext4 -o commit=600,noinit_itable /dev/vda /mnt\n[ ! -e /mnt/store ] || ksf store check /mnt/store\n\
             exec ksf store --log-bytes 8m --listen 0.0.0.0:6379 --data /mnt/store --password-file /password {options}\n"
        );
        let drive = format!("file=nbd:unix:{},if=none,id=disk,format=raw", self.folder.path("socket").display());
        let lab = Lab::script(script).file(env!("CARGO_BIN_EXE_ksf"), "/bin/ksf").text("/password", "secret\n");
        let lab = lab.qemu_arguments(["-drive", &drive]).device("virtio-blk-pci,drive=disk");
        let lab = ["virtio_pci", "virtio_blk", "crc32c_generic", "ext4"].into_iter().fold(lab, Lab::module);
        let lab = ["mkdir", "mount", "mkfs.ext4"].into_iter().fold(lab, Lab::tool);
        let vm = lab.forward_tcp(6379).memory_mib(1024).spawn().unwrap();
        vm.wait_for("tcp 0.0.0.0:6379").unwrap();
        let mut client = Client::connect(vm.address_of_port(6379).unwrap());
        assert_eq!(client.ask("AUTH secret"), "+OK");
        (vm, client)
    }
}

const NEW: &str = "mkfs.ext4 -q /dev/vda";

fn value(number: usize) -> String {
    "v".repeat(number * 11)
}

fn set_all(client: &mut Client) {
    for number in 0..KEYS {
        let (key, value) = (format!("key{number}"), value(number));
        client.write(&command(&[b"SET", key.as_bytes(), value.as_bytes()])).unwrap();
    }
    (0..KEYS).for_each(|_| assert_eq!(client.read().unwrap(), "+OK"));
}

fn all_is_there(client: &mut Client) {
    assert_eq!(client.ask("DBSIZE"), format!(":{KEYS}"));
    for number in 0..KEYS {
        assert_eq!(client.ask(&format!("GET key{number}")), value(number));
    }
}

#[test]
fn what_was_acknowledged_is_on_the_disk_when_the_power_goes_and_when_writes_fail() {
    let Some(_) = program_or_skip("nbdkit") else { return };
    let Some(_turn) = turn() else { return };
    let mut disk = Disk::new();
    let (vm, mut client) = disk.boot(NEW, "");
    set_all(&mut client);
    drop(vm);
    disk.power_cut();
    let (vm, mut client) = disk.boot("", "");
    all_is_there(&mut client);
    // From here on the disk takes no write. This one is not acknowledged, and ends the process.
    fs::write(disk.trigger(), "").unwrap();
    client.write(&command(&[b"SET", b"key0", b"not on the disk"])).unwrap();
    assert!(client.read().is_err(), "a write that failed was acknowledged");
    let outcome = vm.wait().unwrap();
    assert!(!outcome.success() && outcome.output.contains("a write to /mnt/store failed"), "{}", outcome.output);
    disk.power_cut();
    fs::remove_file(disk.trigger()).unwrap();
    let (_vm, mut client) = disk.boot("", "");
    all_is_there(&mut client);
}

/// The disk above does lose: a store that was told not to wait for it has lost something after the same power cut.
#[test]
fn a_store_without_durability_loses_what_it_acknowledged_on_that_disk() {
    let Some(_) = program_or_skip("nbdkit") else { return };
    let Some(_turn) = turn() else { return };
    let mut disk = Disk::new();
    let (vm, mut client) = disk.boot(NEW, "--durability none");
    set_all(&mut client);
    drop(vm);
    disk.power_cut();
    let (_vm, mut client) = disk.boot("", "");
    let left: usize = client.ask("DBSIZE").trim_start_matches(':').parse().unwrap();
    assert!(left < KEYS, "nothing was lost");
}
