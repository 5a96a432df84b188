//! The whole machine of the server fails: its page cache is lost, and what it wrote to its disk stays.

use std::fs::File;
use std::path::Path;

use ksf_lab::{Lab, Vm};

use crate::support::Folder;
use crate::support::export::Calls;

const FILES: usize = 30;

const FIRST: &str = "mkfs.ext4 -q /dev/vda";
/// The journal is replayed by the mount.
const AGAIN: &str = ":";

const SERVE: &str = r#"
mkdir -p /mnt
# Nothing gets to the disk by itself while the test runs.
mount -t ext4 -o commit=900,noinit_itable /dev/vda /mnt
echo 0 >/proc/sys/vm/dirty_writeback_centisecs
mkdir -p /mnt/export
exec ksf nfs --listen tcp:0.0.0.0:2049 --export /mnt/export,squash=all,anon=0:0 --state /mnt/state
"#;

fn machine(before: &str, disk: &Path) -> (Vm, Calls) {
    let drive = format!("file={},if=none,id=disk,format=raw", disk.display());
    let lab = Lab::script(format!("{before}{SERVE}")).file(env!("CARGO_BIN_EXE_ksf"), "/bin/ksf");
    let lab = lab.qemu_arguments(["-drive", &drive]).device("virtio-blk-pci,drive=disk").forward_tcp(2049);
    let modules = ["virtio_pci", "virtio_blk", "crc32c_generic", "ext4"];
    let lab = modules.into_iter().fold(lab, Lab::module);
    let lab = ["mkdir", "mount", "mkfs.ext4"].into_iter().fold(lab, Lab::tool);
    let vm = lab.memory_mib(1024).spawn().unwrap();
    vm.wait_for(" ready\n").unwrap();
    let calls = Calls(vm.address_of_port(2049).unwrap());
    (vm, calls)
}

fn data(number: usize) -> Vec<u8> {
    format!("file {number} ").into_bytes().repeat(number * 37 + 1)
}

#[test]
fn what_was_acknowledged_is_there_when_the_machine_fails() {
    let Some(_turn) = super::may_run() else { return };
    let folder = Folder::new();
    let disk = folder.path("disk");
    File::create(&disk).unwrap().set_len(64 << 20).unwrap();
    let (vm, calls) = machine(FIRST, &disk);
    let root = calls.mount("/mnt/export");
    let files: Vec<Vec<u8>> = (0..FILES)
        .map(|number| {
            let file = calls.create(&root, &format!("file{number}"));
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
    drop(vm);
    let (vm, calls) = machine(AGAIN, &disk);
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
    drop(vm);
    let (_vm, calls) = machine(AGAIN, &disk);
    assert!(calls.lookup(&folder, "empty").is_some());
    assert_eq!(calls.mode_and_links(two), (0o600, 1));
    assert_eq!(calls.mode_and_links(one), (0o644, 2));
    assert_eq!(calls.lookup(&root, "file3"), None);
    assert_eq!((calls.lookup(&root, "file4"), calls.lookup(&folder, "moved").as_ref()), (None, Some(&files[4])));
}
