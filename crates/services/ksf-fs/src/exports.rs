//! What is exported, and to whom.

use std::net::{IpAddr, SocketAddr};
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use crate::clients::Clients;
use crate::export::{Export, ExportError, ExportOptions};
use crate::layer::{Fs, FsOptions};

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
pub struct Sender {
    /// `None`: a Unix socket.
    address: Option<(IpAddr, u16)>,
}

impl Sender {
    /// A sender with this address; `None`: a Unix socket. An IPv4 address in the form of IPv6 is one of IPv4.
    pub fn new(address: Option<SocketAddr>) -> Self {
        Self { address: address.map(|address| (address.ip().to_canonical(), address.port())) }
    }

    /// Its address; `None`: a Unix socket.
    pub fn ip(self) -> Option<IpAddr> {
        self.address.map(|(ip, _)| ip)
    }
}

/// An export and its rules.
#[derive(Debug)]
pub struct Exported {
    /// What the file layer knows of it.
    pub export: Arc<Export>,
    /// The path that was given, if it is another one than the file layer's: with symbolic links in it.
    given: PathBuf,
    /// Whom it is for.
    pub clients: Clients,
    secure: bool,
}

impl Exported {
    /// Whether it is for this sender.
    pub fn admits(&self, sender: Sender) -> bool {
        let port_is_right = !self.secure || sender.address.is_some_and(|(_, port)| port <= RESERVED_PORT_MAX);
        port_is_right && self.clients.include(sender.ip())
    }
}

/// All exports of a server.
#[derive(Debug)]
pub struct Exports {
    /// In the order in which they were given.
    pub all: Vec<Exported>,
}

impl Exports {
    /// Opens the folders. `state`: the folder in which the file layer keeps the keys of handles.
    ///
    /// # Errors
    ///
    /// [`ExportError`]: a folder cannot be served, with the remedy.
    pub fn open(settings: Vec<ExportSettings>, state: &Path, options: FsOptions) -> Result<(Self, Fs), ExportError> {
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
    pub fn of_id(&self, id: u32) -> Option<&Exported> {
        self.all.iter().find(|exported| exported.export.id() == id)
    }

    /// The export that a path lies in, and the names below it. `None`: it lies in none.
    pub fn of_path(&self, path: &Path) -> Option<(&Exported, Vec<PathBuf>)> {
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
