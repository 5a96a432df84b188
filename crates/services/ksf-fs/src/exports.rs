//! What is exported, and to whom.

use std::net::IpAddr;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use ksf::Peer;
use ksf_fs::{Export, ExportError, ExportOptions, Fs, FsOptions};

use crate::clients::Clients;

/// The greatest port that only root may send from.
const RESERVED_PORT_MAX: u16 = 1023;

/// A folder that is to be exported.
#[derive(Clone, Debug)]
pub struct ExportSettings {
    /// The folder.
    pub path: PathBuf,
    /// How the file layer serves it.
    pub options: ExportOptions,
    /// Whom it is for.
    pub clients: Clients,
    /// Whether clients must send from a port below 1024.
    pub secure: bool,
}

/// Where a request comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sender {
    /// `None`: a Unix socket.
    pub(crate) address: Option<(IpAddr, u16)>,
}

impl Sender {
    pub(crate) fn of(peer: Peer) -> Self {
        let address = match peer {
            Peer::Tcp(address) | Peer::Udp(address) => Some((address.ip().to_canonical(), address.port())),
            _ => None,
        };
        Self { address }
    }

    pub(crate) fn ip(self) -> Option<IpAddr> {
        self.address.map(|(ip, _)| ip)
    }
}

/// An export and its rules.
#[derive(Debug)]
pub(crate) struct Exported {
    pub(crate) export: Arc<Export>,
    /// The path that was given, if it is another one than the file layer's: with symbolic links in it.
    given: PathBuf,
    pub(crate) clients: Clients,
    pub(crate) secure: bool,
}

impl Exported {
    pub(crate) fn admits(&self, sender: Sender) -> bool {
        let port_is_right = !self.secure || sender.address.is_some_and(|(_, port)| port <= RESERVED_PORT_MAX);
        port_is_right && self.clients.include(sender.ip())
    }
}

/// All exports of a server.
#[derive(Debug)]
pub(crate) struct Exports {
    pub(crate) all: Vec<Exported>,
}

impl Exports {
    /// Opens the folders. `state`: the folder in which the file layer keeps the keys of handles.
    pub(crate) fn open(
        settings: Vec<ExportSettings>,
        state: &Path,
        options: FsOptions,
    ) -> Result<(Self, Fs), ExportError> {
        let mut fs = Fs::new(options)?;
        let mut all = Vec::new();
        for ExportSettings { path, options, clients, secure } in settings {
            let export = fs.add_export(&path, state, options)?;
            let given = std::path::absolute(&path).unwrap_or(path);
            all.push(Exported { export, given, clients, secure });
        }
        Ok((Self { all }, fs))
    }

    /// The export of an id.
    pub(crate) fn of_id(&self, id: u32) -> Option<&Exported> {
        self.all.iter().find(|exported| exported.export.id() == id)
    }

    /// The export that a path of MNT lies in, and the names below it. `None`: it lies in none.
    pub(crate) fn of_path(&self, path: &Path) -> Option<(&Exported, Vec<PathBuf>)> {
        // Without `..`, whose meaning a client and a server may see differently.
        let is_plain = path.components().all(|part| matches!(part, Component::RootDir | Component::Normal(_)));
        if !is_plain {
            return None;
        }
        self.all.iter().find_map(|exported| {
            let roots = [exported.export.path(), exported.given.as_path()];
            let below = roots.into_iter().find_map(|root| path.strip_prefix(root).ok())?;
            Some((exported, below.components().map(|part| PathBuf::from(part.as_os_str())).collect()))
        })
    }
}
