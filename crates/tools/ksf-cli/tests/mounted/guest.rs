//! A machine that mounts an export of this one.

use std::path::{Path, PathBuf};
use std::time::Duration;

use ksf_lab::Lab;

use crate::support::Server;
use crate::support::export::Place;

/// Files from which libtirpc and the C library have the number of TCP, for mount.nfs.
const RESOLVING: [&str; 2] = ["/etc/netconfig", "/etc/protocols"];

/// Where the programs of a guest see their root.
const ROOT: &str = "/r";

/// Serves the folder, and /usr for the guests.
pub(crate) fn server(place: &Place, engine: &str) -> Server {
    server_at(0, place, engine)
}

/// The same on this port.
pub(crate) fn server_at(port: u16, place: &Place, engine: &str) -> Server {
    place.start_at(port, engine, ",squash=none", &["--export", "/usr,ro,squash=none"])
}

/// [`server_at`] that serves another directory as well, read-only.
pub(crate) fn server_with(port: u16, place: &Place, engine: &str, other: &Path) -> Server {
    let other = format!("{},ro,squash=none", other.display());
    place.start_at(port, engine, ",squash=none", &["--export", "/usr,ro,squash=none", "--export", &other])
}

/// A machine with Debian's kernel and no disk. It mounts /usr, and the export at /mnt, and runs a script there.
pub(crate) struct Guest {
    work: &'static str,
    options: &'static str,
    env: Vec<(&'static str, String)>,
    files: Vec<(PathBuf, String)>,
    texts: Vec<(String, String)>,
}

impl Guest {
    pub(crate) fn new(work: &'static str) -> Self {
        Self { work, options: "hard", env: Vec::new(), files: Vec::new(), texts: Vec::new() }
    }

    /// Options of the mount, as after `-o`.
    pub(crate) fn options(mut self, options: &'static str) -> Self {
        self.options = options;
        self
    }

    pub(crate) fn env(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.env.push((name, value.into()));
        self
    }

    /// Copies a file of this machine to where the script sees this path.
    pub(crate) fn file(mut self, from: impl Into<PathBuf>, to: &str) -> Self {
        self.files.push((from.into(), format!("{ROOT}{to}")));
        self
    }

    /// Lets the script itself run mount.nfs.
    pub(crate) fn resolving(self) -> Self {
        RESOLVING.into_iter().fold(self, |guest, file| guest.file(file, file))
    }

    pub(crate) fn text(mut self, path: &str, text: impl Into<String>) -> Self {
        self.texts.push((format!("{ROOT}{path}"), text.into()));
        self
    }

    /// The description of the machine.
    pub(crate) fn lab(self, server: &Server, place: &Place) -> Lab {
        let lab = Lab::script(include_str!("enter.sh")).text(format!("{ROOT}/work"), self.work);
        let lab = self.texts.iter().fold(lab, |lab, (path, text)| lab.text(path, text));
        let lab = self.files.iter().fold(lab, |lab, (from, to)| lab.file(from, to));
        self.mounting(lab, server, place, &["ln", "chroot"])
    }

    /// The same without /usr of this machine, so with these programs alone: the script goes on when the server is gone.
    pub(crate) fn alone(self, server: &Server, place: &Place, tools: &[&str]) -> Lab {
        let lab = Lab::script(format!("{}{}", include_str!("alone.sh"), self.work));
        self.mounting(lab, server, place, tools)
    }

    fn mounting(self, lab: Lab, server: &Server, place: &Place, tools: &[&str]) -> Lab {
        let port = server.address(" tcp ").port().to_string();
        let lab = lab.reach_host().memory_mib(1024).time_limit(Duration::from_secs(300)).env("PORT", port);
        let lab = lab.env("EXPORT", place.export().to_str().expect("a plain path")).env("MORE", self.options);
        let lab = self.env.into_iter().fold(lab, |lab, (name, value)| lab.env(name, value));
        let lab = RESOLVING.into_iter().fold(lab, |lab, file| lab.file(file, file));
        let lab = ["mount.nfs", "mount", "mkdir"].iter().chain(tools).fold(lab, |lab, tool| lab.tool(*tool));
        ["nfs", "nfsv3", "lockd"].into_iter().fold(lab, Lab::module)
    }
}
