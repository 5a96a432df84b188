//! A network of its own for the measurements.
//!
//! As root the bench moves into new network and mount namespaces before it starts anything: its
//! loopback carries nothing else, eBPF programs attach to that one, rpcbind (without which
//! nfs-ganesha does not start) can have port 111 and /run, and it all ends with the last process.

use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use crate::process::{Ready, Server, output};

const INSIDE: &str = "KSF_BENCH_INSIDE";
const TIMEOUT: Duration = Duration::from_secs(20);

/// Restarts this program inside of new namespaces; comes back inside of them, or without root.
pub(crate) fn enter() -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        return Ok(());
    }
    if std::env::var_os(INSIDE).is_none() {
        let mut command = Command::new("unshare");
        command.args(["--net", "--mount", "--propagation", "private", "--"]);
        command.arg(std::env::current_exe()?).args(std::env::args_os().skip(1));
        return Err(command.env(INSIDE, "1").exec()).context("cannot run unshare (util-linux)");
    }
    for words in [["ip", "link", "set", "lo", "up"], ["mount", "-t", "tmpfs", "tmpfs", "/run"]] {
        let mut command = Command::new(words[0]);
        output(command.args(&words[1..]), TIMEOUT).context("cannot set the namespaces up")?;
    }
    Ok(())
}

/// Starts rpcbind in the namespaces.
pub(crate) fn rpcbind() -> Result<Server> {
    Server::start("rpcbind", Command::new("rpcbind").arg("-f"), Ready::Port(111), TIMEOUT)
}
