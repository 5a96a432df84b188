//! The port layout is written twice, in C and in Rust. Here the two are compared, for every port.

use std::path::{Path, PathBuf};
use std::process::Command;

use ksf_accel::flow::{CpuMask, Layout, PortRange};

fn twin() -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("twin-{}", std::process::id()));
    let output = Command::new(std::env::var("CC").unwrap_or_else(|_| "cc".into()))
        .args(["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-I"])
        .arg(folder.join("bpf/flow"))
        .arg(folder.join("tests/flow/twin.c"))
        .arg("-o")
        .arg(&program)
        .output()
        .expect("a C compiler");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    program
}

#[test]
fn c_and_rust_cut_the_same_chunks() {
    let program = twin();
    let ranges = [(32768, 60999), (1024, 65535), (10000, 10999), (49152, 65535), (40000, 40031)];
    let sets = ["0", "0-1", "1,3", "0-2", "0-6", "5,64-80", "0-63"];
    let mut compared = 0;
    for (low, high) in ranges {
        for cpus in sets {
            let cpus: CpuMask = cpus.parse().unwrap();
            let Ok(layout) = Layout::new(PortRange { low, high }, &cpus) else { continue };
            let output = Command::new(&program)
                .args([layout.chunk_bits(), layout.first_chunk(), cpus.len() as u32].map(|number| number.to_string()))
                .output()
                .unwrap();
            assert!(output.status.success());
            let text = String::from_utf8(output.stdout).unwrap();
            let mut numbers = text.lines().map(|line| line.parse::<u32>().unwrap());
            for cpu in cpus.iter() {
                assert_eq!(numbers.next(), layout.option_of(cpu), "{layout}: CPU {cpu}");
            }
            for port in 0..=u16::MAX {
                let index = layout.index_of_port(port).unwrap_or(cpus.len());
                assert_eq!(numbers.next(), Some(index as u32), "{layout}: port {port}");
            }
            assert_eq!(numbers.next(), None);
            compared += 1;
        }
    }
    std::fs::remove_file(program).unwrap();
    assert!(compared > 25, "{compared} layouts");
}
