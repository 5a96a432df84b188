//! The store on persistent memory that QEMU emulates: an NVDIMM whose content is a file of this machine.

use std::fs::File;
use std::path::Path;

use ksf_lab::{Lab, turn};

use super::client::{Client, command};
use crate::support::Folder;

const KEYS: usize = 200;

/// Makes the NVDIMM a block device with DAX. What a namespace without labels needs for that is a place for the kernel's table of
/// its pages (a pfn device), here in the machine's memory. It is written down on the NVDIMM, and the next boot finds it.
const FIRST: &str = r#"
region=/sys/bus/nd/devices/region0
until [ -e /sys/bus/nd/drivers/nd_pmem/namespace0.0 ]; do :; done
echo namespace0.0 > /sys/bus/nd/drivers/nd_pmem/unbind
read seed < $region/pfn_seed
echo 01234567-89ab-cdef-0123-456789abcdef > /sys/bus/nd/devices/$seed/uuid
echo ram > /sys/bus/nd/devices/$seed/mode
echo 4096 > /sys/bus/nd/devices/$seed/align
echo namespace0.0 > /sys/bus/nd/devices/$seed/namespace
echo $seed > /sys/bus/nd/drivers/nd_pmem/bind
mkfs.ext4 -q -b 4096 /dev/pmem0
mkdir -p /mnt
mount -t ext4 /dev/pmem0 /mnt
if ksf store --medium pmem --log-bytes 8m --listen 127.0.0.1:0 --data /mnt/store; then exit 1; fi
umount /mnt
mount -t ext4 -o dax=always /dev/pmem0 /mnt
exec ksf store --medium pmem --log-bytes 8m --listen 0.0.0.0:6379 --data /mnt/store --password-file /password
"#;

const SECOND: &str = r#"
until [ -b /dev/pmem0 ]; do :; done
mkdir -p /mnt
mount -t ext4 -o dax=always /dev/pmem0 /mnt
ksf store check /mnt/store
exec ksf store --medium pmem --listen 0.0.0.0:6379 --data /mnt/store --password-file /password
"#;

fn machine(script: &str, nvdimm: &Path) -> Lab {
    let memory = format!("memory-backend-file,share=on,mem-path={},size=128M,id=m0", nvdimm.display());
    let lab = Lab::script(script).file(env!("CARGO_BIN_EXE_ksf"), "/bin/ksf").text("/password", "secret\n");
    let lab = lab.qemu_arguments(["-machine", "nvdimm=on", "-m", "slots=4,maxmem=2G", "-object", &memory]);
    let lab = lab.device("nvdimm,memdev=m0").forward_tcp(6379).memory_mib(1024);
    let modules = ["nfit", "nd_pmem", "crc32c_generic", "ext4"];
    let lab = modules.into_iter().fold(lab, |lab, module| lab.module(module));
    ["mkdir", "mount", "umount", "mkfs.ext4"].into_iter().fold(lab, |lab, tool| lab.tool(tool))
}

/// QEMU is killed with all that its machine has not flushed from the page cache; what the machine stored in the NVDIMM stays. So this
/// shows that nothing that was acknowledged was only there, and `ksf-store tests/crash.rs` that the caches are flushed.
#[test]
fn what_was_acknowledged_is_on_the_nvdimm_when_its_machine_is_killed() {
    let Some(_turn) = turn() else { return };
    let folder = Folder::new();
    let nvdimm = folder.path("nvdimm");
    File::create(&nvdimm).unwrap().set_len(128 << 20).unwrap();
    let connect = |vm: &ksf_lab::Vm| {
        vm.wait_for("medium=pmem (DAX with MAP_SYNC, cl").unwrap();
        vm.wait_for("tcp 0.0.0.0:6379").unwrap();
        let mut client = Client::connect(vm.address_of_port(6379).unwrap());
        assert_eq!(client.ask("AUTH secret"), "+OK");
        client
    };
    let value = |number: usize| "v".repeat(number * 11);
    let vm = machine(FIRST, &nvdimm).spawn().unwrap();
    vm.wait_for("its file system has no DAX").unwrap();
    let mut client = connect(&vm);
    for number in 0..KEYS {
        let (key, value) = (format!("key{number}"), value(number));
        client.write(&command(&[b"SET", key.as_bytes(), value.as_bytes()])).unwrap();
    }
    (0..KEYS).for_each(|_| assert_eq!(client.read().unwrap(), "+OK"));
    drop(vm);
    let vm = machine(SECOND, &nvdimm).spawn().unwrap();
    let mut client = connect(&vm);
    assert!(client.ask("INFO persistence").contains("ksf_medium:pmem\r\nksf_survives_power_cut:1"));
    assert_eq!(client.ask("DBSIZE"), format!(":{KEYS}"));
    for number in 0..KEYS {
        assert_eq!(client.ask(&format!("GET key{number}")), value(number));
    }
}
