//! The file servers in the demo: rows for procedures that clients call most, on the first engine that runs here. Which one it is
//! makes little difference: the requests are executed by threads of their own.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use anyhow::{Context, Result};

use super::{Demo, IN_FLIGHT, START_TIMEOUT};
use crate::bench::FileProtocol;
use crate::bench::case::{FileLoad, NFS_GETATTR, NFS_READ, NFS_WRITE_STABLE, NINEP_GETATTR};
use crate::load::{Files, Load, LoadResult, Tool};
use crate::process::{Ready, Server, free_port};

/// Engines that run it: no part of it is in the kernel.
pub(super) const ENGINES: [&str; 2] = ["uring", "epoll"];

const ROWS: [(&str, &FileLoad); 4] = [
    ("nfs GETATTR", &NFS_GETATTR),
    ("nfs READ 4 KiB", &NFS_READ),
    // Answered when the data are on the medium.
    ("nfs WRITE 4 KiB", &NFS_WRITE_STABLE),
    ("9p getattr", &NINEP_GETATTR),
];

impl Demo {
    /// The rows of the file servers on this engine.
    pub(super) fn measure_files(&mut self, engine: &'static str) -> Result<Vec<Vec<String>>> {
        let mut rows = self.measure_protocol(FileProtocol::Nfs, engine)?;
        rows.extend(self.measure_protocol(FileProtocol::Ninep, engine)?);
        Ok(rows)
    }

    fn measure_protocol(&mut self, protocol: FileProtocol, engine: &'static str) -> Result<Vec<Vec<String>>> {
        let folder = tempfile::tempdir().context("cannot make a folder to export")?;
        let (export, port) = (folder.path().join("export"), free_port()?);
        std::fs::create_dir(&export).context("cannot make a folder to export")?;
        // Requests of root are those of the anonymous user.
        std::fs::set_permissions(&export, Permissions::from_mode(0o777))
            .context("cannot open the folder for all users")?;
        let mut command = Command::new(&self.ksf);
        command.args([protocol.name(), "--listen", &format!("tcp:127.0.0.1:{port}"), "--engine", engine]);
        command.arg("--export").arg(&export).arg("--state").arg(folder.path().join("state"));
        let server = Server::start(protocol.name(), &mut command, Ready::Lines(1, "ready"), START_TIMEOUT)?;
        self.pids.push(server.pid());
        let mut rows = Vec::new();
        for (name, load) in ROWS.into_iter().filter(|(_, load)| load.protocol == protocol) {
            eprintln!("demo: {name} over tcp on {engine}");
            let run = |in_flight| -> Result<LoadResult> {
                let load = Load {
                    tool: Tool::Files(Files {
                        load,
                        io_bytes: load.io_bytes,
                        export: export.clone(),
                        mount_port: None,
                    }),
                    udp: false,
                    in_flight,
                    polls: false,
                    threads: 1,
                    amount: self.amount,
                    cpus: None,
                    port,
                };
                load.run(&self.ksf).context(name)
            };
            rows.push(super::row([name, "tcp", engine], &run(1)?, &run(IN_FLIGHT)?));
        }
        server.stop()?;
        Ok(rows)
    }
}
