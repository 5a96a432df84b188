//! The whole machine of the server fails: its page cache is lost, and what it wrote to its disks stays.

use std::fs::File;
use std::net::SocketAddr;

use ksf_lab::{Lab, Vm};
use ksf_proto::p9::{Data, NO_UID, Names, Reply, Request, SetStat, open_flag, set_bit};

use crate::ninep::Client;
use crate::support::Folder;
use crate::support::export::Calls;

const FILES: usize = 30;

/// Disks of the machine, each with an export. A sync of one file brings all names of its file system to the disk, so that one
/// server, or one setting, would hide the omissions of another on a common disk.
const DISKS: [&str; 3] = ["vda", "vdb", "vdc"];
const NFS: &str = "/mnt/vda/export";
/// 9P with the default, `names=async`.
const NINEP: &str = "/mnt/vdb/export";
/// 9P with `names=sync`.
const NINEP_NAMES: &str = "/mnt/vdc/export";

const FIRST: &str = "for disk in vda vdb vdc; do mkfs.ext4 -q /dev/$disk; done";
/// The journals are replayed by the mounts.
const AGAIN: &str = ":";

const SERVE: &str = r#"
# Nothing gets to a disk by itself while the test runs.
echo 0 >/proc/sys/vm/dirty_writeback_centisecs
for disk in vda vdb vdc; do
    mkdir -p /mnt/$disk
    mount -t ext4 -o commit=900,noinit_itable /dev/$disk /mnt/$disk
    mkdir -p /mnt/$disk/export
done
exec ksf serve /ksf.toml
"#;

const SERVICES: &str = r#"
[[service]]
name = "nfs"
kind = "nfs"
listen = ["0.0.0.0:2049"]
exports = ["/mnt/vda/export,squash=all,anon=0:0"]
state = "/mnt/vda/state"

[[service]]
name = "9p"
kind = "9p"
listen = ["0.0.0.0:5640"]
exports = ["/mnt/vdb/export,squash=none", "/mnt/vdc/export,squash=none,names=sync"]
state = "/run/9p"
"#;

struct Machine {
    nfs: Calls,
    ninep: SocketAddr,
    _vm: Vm,
}

impl Machine {
    fn start(before: &str, folder: &Folder) -> Self {
        let lab = Lab::script(format!("{before}{SERVE}")).file(env!("CARGO_BIN_EXE_ksf"), "/bin/ksf");
        let lab = DISKS.into_iter().fold(lab.text("/ksf.toml", SERVICES), |lab, disk| {
            let drive = format!("file={},if=none,id={disk},format=raw", folder.path(disk).display());
            lab.qemu_arguments(["-drive", &drive]).device(format!("virtio-blk-pci,drive={disk}"))
        });
        let modules = ["virtio_pci", "virtio_blk", "crc32c_generic", "ext4"];
        let lab = modules.into_iter().fold(lab, Lab::module);
        let lab = ["mkdir", "mount", "mkfs.ext4"].into_iter().fold(lab, Lab::tool);
        let vm = lab.forward_tcp(2049).forward_tcp(5640).memory_mib(1024).spawn().unwrap();
        vm.wait_for(" ready\n").unwrap();
        let address = |port| vm.address_of_port(port).unwrap();
        Self { nfs: Calls(address(2049)), ninep: address(5640), _vm: vm }
    }

    /// A client of 9P whose fid 0 is this object of an export.
    fn at(&self, export: &str, names: &[&str]) -> Client {
        let mut client = Client::attached_to(self.ninep, export);
        let names: Vec<&[u8]> = names.iter().map(|name| name.as_bytes()).collect();
        let mut buffer = Vec::new();
        client.ask(Request::Walk { fid: 0, newfid: 0, names: Names::of(&names, &mut buffer).unwrap() }).unwrap();
        client
    }
}

/// What these tests ask of the object of fid 0.
impl Client {
    fn create_as(&mut self, name: &str, flags: u32) {
        let name = name.as_bytes();
        self.ask(Request::Lcreate { fid: 0, name, flags, mode: 0o644, gid: NO_UID }).unwrap();
    }

    fn mkdir(&mut self, name: &str) {
        self.ask(Request::Mkdir { dfid: 0, name: name.as_bytes(), mode: 0o755, gid: NO_UID }).unwrap();
    }

    fn set_mode(&mut self, mode: u32) {
        self.ask(Request::Setattr { fid: 0, to: SetStat { valid: set_bit::MODE, mode, ..SetStat::default() } })
            .unwrap();
    }

    fn mode(&mut self) -> u32 {
        let reply = self.ask(Request::Getattr { fid: 0, mask: u64::MAX }).unwrap();
        let Reply::Getattr { stat } = Reply::parse(&reply).unwrap().1 else { unreachable!("its kind was compared") };
        stat.mode & 0o7777
    }

    fn open(&mut self, flags: u32) {
        self.ask(Request::Lopen { fid: 0, flags }).unwrap();
    }

    fn write(&mut self, data: &[u8]) {
        self.ask(Request::Write { fid: 0, offset: 0, data: Data(data) }).unwrap();
    }

    fn sync(&mut self, data_only: bool) {
        self.ask(Request::Fsync { fid: 0, datasync: data_only.into() }).unwrap();
    }

    /// Up to 64 KiB.
    fn read(&mut self) -> Vec<u8> {
        self.open(0);
        let reply = self.ask(Request::Read { fid: 0, offset: 0, count: 65_536 }).unwrap();
        let Reply::Read { data } = Reply::parse(&reply).unwrap().1 else { unreachable!("its kind was compared") };
        data.0.to_vec()
    }
}

fn data(number: usize) -> Vec<u8> {
    format!("file {number} ").into_bytes().repeat(number * 37 + 1)
}

fn name(number: usize) -> String {
    format!("file{number}")
}

/// New files and a new name of 9P.
fn change_first(machine: &Machine) {
    for number in 0..FILES {
        let mut file = machine.at(NINEP, &[]);
        let flags = if number % 3 == 0 { open_flag::DATA_SYNC } else { 0 };
        file.create_as(&name(number), open_flag::READ_WRITE | flags);
        file.write(&data(number));
        if number % 3 != 0 {
            file.sync(number % 3 == 1);
        }
    }
    // The last request, so that no other one brings the name to the disk.
    machine.at(NINEP, &[]).mkdir("folder");
    let mut export = machine.at(NINEP, &[]);
    export.open(open_flag::DIRECTORY);
    export.sync(false);
    machine.at(NINEP_NAMES, &[]).mkdir("folder");
}

/// Data in blocks that are there already, and attributes.
fn change_again(machine: &Machine) {
    for number in 0..FILES {
        assert!(machine.at(NINEP, &[&name(number)]).read() == data(number), "file {number} of 9P is another one");
    }
    assert_eq!(machine.at(NINEP, &["folder"]).mode(), 0o755);
    assert_eq!(machine.at(NINEP_NAMES, &["folder"]).mode(), 0o755);
    for number in [6, 7, 8] {
        let mut file = machine.at(NINEP, &[&name(number)]);
        file.open(open_flag::WRITE);
        file.write(&data(number).to_ascii_uppercase());
        file.sync(number % 2 == 1);
    }
    let mut file = machine.at(NINEP, &["file9"]);
    file.open(open_flag::WRITE);
    file.set_mode(0o600);
    file.sync(false);
    machine.at(NINEP_NAMES, &["folder"]).set_mode(0o700);
}

fn has_changed(machine: &Machine) {
    for number in [6, 7, 8] {
        let content = machine.at(NINEP, &[&name(number)]).read();
        assert!(content == data(number).to_ascii_uppercase(), "file {number} of 9P is another one");
    }
    assert_eq!(machine.at(NINEP, &["file9"]).mode(), 0o600);
    assert_eq!(machine.at(NINEP_NAMES, &["folder"]).mode(), 0o700);
}

#[test]
fn what_was_acknowledged_is_there_when_the_machine_fails() {
    let Some(_turn) = super::may_run() else { return };
    let disks = Folder::new();
    DISKS.iter().for_each(|disk| File::create(disks.path(disk)).unwrap().set_len(64 << 20).unwrap());
    let machine = Machine::start(FIRST, &disks);
    change_first(&machine);
    let calls = &machine.nfs;
    let root = calls.mount(NFS);
    let files: Vec<Vec<u8>> = (0..FILES)
        .map(|number| {
            let file = calls.create(&root, &name(number));
            // UNSTABLE with a COMMIT, DATA_SYNC, FILE_SYNC.
            calls.write(&file, 0, number as u32 % 3, &data(number));
            if number % 3 == 0 {
                calls.commit(&file);
            }
            file
        })
        .collect();
    // After this nothing brings it to the disk in passing.
    let folder = calls.mkdir(&root, "folder");
    drop(machine);
    let machine = Machine::start(AGAIN, &disks);
    change_again(&machine);
    let calls = &machine.nfs;
    for (number, file) in files.iter().enumerate() {
        assert!(calls.read(file) == data(number), "file {number} is another one");
    }
    assert_eq!(calls.lookup(&root, "folder").as_ref(), Some(&folder));
    let (one, two) = (&files[1], &files[2]);
    calls.create(&folder, "empty");
    calls.set_mode(two, 0o600);
    calls.link(one, &folder, "linked");
    calls.remove(&root, "file3");
    calls.rename((&root, "file4"), (&folder, "moved"));
    drop(machine);
    let machine = Machine::start(AGAIN, &disks);
    has_changed(&machine);
    let calls = &machine.nfs;
    assert!(calls.lookup(&folder, "empty").is_some());
    assert_eq!(calls.mode_and_links(two), (0o600, 1));
    assert_eq!(calls.mode_and_links(one), (0o644, 2));
    assert_eq!(calls.lookup(&root, "file3"), None);
    assert_eq!((calls.lookup(&root, "file4"), calls.lookup(&folder, "moved").as_ref()), (None, Some(&files[4])));
}
