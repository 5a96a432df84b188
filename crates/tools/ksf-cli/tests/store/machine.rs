//! Stores in a machine whose disks lose what was not flushed when the power goes, and fail writes when they are told to.
//!
//! ```text
//!  QEMU ── ext4 on virtio-blk ── nbdkit: error (fails writes) ── cache (lost with the process) ── a file
//! ```

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Command, Stdio};

use ksf_lab::{Lab, Vm, turn};
use ksf_test::{PATIENCE, Running, program_or_skip};

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

    fn socket(&self) -> PathBuf {
        self.folder.path("socket")
    }

    /// What was not flushed is lost. The disk is there again.
    fn power_cut(&mut self) {
        // `Running` kills it.
        self.server = None;
        let socket = self.socket();
        let _: std::io::Result<()> = fs::remove_file(&socket);
        let mut command = Command::new("nbdkit");
        command.args(["--foreground", "--filter=error", "--filter=cache", "--unix"]).arg(&socket);
        command.arg("file").arg(self.folder.path("disk")).args(["cache=writeback", "error-pwrite=EIO"]);
        command.arg("error-pwrite-rate=100%").arg(format!("error-pwrite-file={}", self.trigger().display()));
        let server = Running::start(command.env("TMPDIR", self.folder.path("")).stdout(Stdio::null()));
        self.server = Some(server);
        wait_until("nbdkit listens", || socket.exists());
    }
}

/// Two stores, each on a disk of its own: a flush of one disk makes nothing durable on the other.
struct Disks {
    durable: Disk,
    /// Of a store that does not wait for its disk.
    hasty: Disk,
}

impl Disks {
    fn power_cut(&mut self) {
        self.durable.power_cut();
        self.hasty.power_cut();
    }

    /// Boots a machine with both disks and the stores on them; the machine ends with the durable one. The file systems do not
    /// flush the disks by themselves: each of their commits, every 5 s by default, and the thread that fills the tables of
    /// inodes after the first mount (fs/ext4/ialloc.c, `ext4_init_inode_table`), makes durable what the store has written
    /// without waiting.
    fn boot(&self, before: &str) -> (Vm, Client, Client) {
        let script = format!(
            "{before}
             start() {{
                 mkdir -p /$1
                 mount -t ext4 -o commit=600,noinit_itable /dev/$2 /$1
                 [ ! -e /$1/store ] || ksf store check /$1/store
                 exec ksf store --log-bytes 8m --listen 0.0.0.0:$3 --data /$1/store --password-file /password --durability $4
             }}
             start hasty vdb 6380 none &
             start durable vda 6379 always\n"
        );
        let lab = Lab::script(script).file(env!("CARGO_BIN_EXE_ksf"), "/bin/ksf").text("/password", "secret\n");
        let lab = [&self.durable, &self.hasty].into_iter().enumerate().fold(lab, |lab, (number, disk)| {
            let drive = format!("file=nbd:unix:{},if=none,id=disk{number},format=raw", disk.socket().display());
            lab.qemu_arguments(["-drive", &drive]).device(format!("virtio-blk-pci,drive=disk{number}"))
        });
        let lab = ["virtio_pci", "virtio_blk", "crc32c_generic", "ext4"].into_iter().fold(lab, Lab::module);
        let lab = ["mkdir", "mount", "mkfs.ext4"].into_iter().fold(lab, Lab::tool);
        let vm = lab.forward_tcp(6379).forward_tcp(6380).memory_mib(1024).time_limit(PATIENCE).spawn().unwrap();
        let connect = |port| {
            vm.wait_for(&format!("tcp 0.0.0.0:{port}")).unwrap();
            let mut client = Client::connect(vm.address_of_port(port).unwrap());
            assert_eq!(client.ask("AUTH secret"), "+OK");
            client
        };
        let (durable, hasty) = (connect(6379), connect(6380));
        (vm, durable, hasty)
    }
}

const NEW: &str = "mkfs.ext4 -q /dev/vda; mkfs.ext4 -q /dev/vdb";

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

/// The disks do lose: a store that was told not to wait for its disk has lost something after the same power cut.
#[test]
fn what_was_acknowledged_is_on_the_disk_when_the_power_goes_and_when_writes_fail() {
    let Some(_) = program_or_skip("nbdkit") else { return };
    let Some(_turn) = turn() else { return };
    let mut disks = Disks { durable: Disk::new(), hasty: Disk::new() };
    let (vm, mut client, mut hasty) = disks.boot(NEW);
    set_all(&mut client);
    set_all(&mut hasty);
    drop(vm);
    disks.power_cut();
    let (vm, mut client, mut hasty) = disks.boot("");
    all_is_there(&mut client);
    let left: usize = hasty.ask("DBSIZE").trim_start_matches(':').parse().unwrap();
    assert!(left < KEYS, "the store without durability has lost nothing");
    // From here on the disk takes no write. This one is not acknowledged, and ends the process.
    fs::write(disks.durable.trigger(), "").unwrap();
    client.write(&command(&[b"SET", b"key0", b"not on the disk"])).unwrap();
    assert!(client.read().is_err(), "a write that failed was acknowledged");
    let outcome = vm.wait().unwrap();
    assert!(!outcome.success() && outcome.output.contains("a write to /durable/store failed"), "{}", outcome.output);
    disks.power_cut();
    fs::remove_file(disks.durable.trigger()).unwrap();
    let (_vm, mut client, _) = disks.boot("");
    all_is_there(&mut client);
}
