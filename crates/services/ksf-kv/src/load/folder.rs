//! Files loaded into a store that is not served, which is there whole or not at all.
//!
//! A server that nobody else reaches takes them: it listens on a socket in the folder that the store is made in, `DIR.partial`,
//! which gets its name when all is loaded.

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ksf::Server;
use ksf::limits::Limits;
use ksf::listener::ListenAddr;

use super::{LoadError, Loaded, load};
use crate::ask::Socket;
use crate::disk::{Disk, DiskError, DiskOptions};
use crate::service::Kv;
use crate::settings::Settings;
use crate::whole::{parent, with_suffix};

/// Why nothing was loaded into a folder. It is as it was.
#[derive(Debug, thiserror::Error)]
pub enum IntoFolderError {
    /// There is something in it.
    #[error("{} is not empty: load into a store that is there while it is served", .0.display())]
    NotEmpty(PathBuf),
    /// Another load is under way, or was killed.
    #[error("{} is there: another load is under way, or was killed; then remove it", .0.display())]
    LeftOver(PathBuf),
    /// No store can be made.
    #[error(transparent)]
    Disk(#[from] DiskError),
    /// The file system says no.
    #[error("{action} {}: {source}", .path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// With what.
        path: PathBuf,
        /// What it says.
        source: io::Error,
    },
    /// The server does not start.
    #[error(transparent)]
    Server(#[from] ksf::error::Error),
    /// What is loaded cannot be taken.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The store does not take some of it.
    #[error(
        "{errors} of {commands} commands were answered with an error, so nothing was loaded; the first error: {first}"
    )]
    Refused {
        /// Commands that were sent.
        commands: u64,
        /// Errors.
        errors: u64,
        /// The first one.
        first: String,
    },
}

fn io_error<'p>(action: &'static str, path: &'p Path) -> impl FnOnce(io::Error) -> IntoFolderError + use<'p> {
    move |source| IntoFolderError::Io { action, path: path.to_owned(), source }
}

/// Makes a store in a folder that is empty or not there, and [loads](load) files into it. The store has one log, into which
/// all of them must fit; it gets more with its first start on more shards. `failed` is told when a write of the store fails, and
/// does not return.
///
/// # Errors
///
/// [`IntoFolderError`]: there is no store.
pub fn into_folder(
    files: &[PathBuf],
    now_ms: u64,
    folder: &Path,
    (options, limits, settings): (DiskOptions, Limits, Settings),
    failed: impl Fn(&str) + Send + Sync + 'static,
    answered: impl FnMut(u64),
) -> Result<Loaded, IntoFolderError> {
    match fs::read_dir(folder).map(|mut entries| entries.next().is_some()) {
        Ok(true) => return Err(IntoFolderError::NotEmpty(folder.to_owned())),
        Ok(false) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(io_error("reading", folder)(error)),
    }
    let partial = with_suffix(folder, ".partial");
    match DirBuilder::new().mode(0o700).create(&partial) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Err(IntoFolderError::LeftOver(partial)),
        Err(error) => return Err(io_error("making", &partial)(error)),
    }
    let loaded = load_into(files, now_ms, &partial, (options, limits, settings), failed, answered).and_then(|loaded| {
        if let Some(first) = &loaded.first_error {
            let (commands, errors, first) = (loaded.commands, loaded.errors, first.clone());
            return Err(IntoFolderError::Refused { commands, errors, first });
        }
        fs::rename(&partial, folder).map_err(io_error("renaming to", folder))?;
        let around = parent(folder);
        File::open(around).and_then(|around| around.sync_all()).map_err(io_error("syncing", around))?;
        Ok(loaded)
    });
    if loaded.is_err() {
        // It is of no use to anybody; the next load names what is left of it.
        let _ = fs::remove_dir_all(&partial);
    }
    loaded
}

fn load_into(
    files: &[PathBuf],
    now_ms: u64,
    folder: &Path,
    (options, limits, settings): (DiskOptions, Limits, Settings),
    failed: impl Fn(&str) + Send + Sync + 'static,
    answered: impl FnMut(u64),
) -> Result<Loaded, IntoFolderError> {
    let disk = Disk::open(folder, DiskOptions { logs: 1, ..options })?;
    let service = Arc::new(Kv::new(disk, settings, failed)?);
    let cpus = ksf::cpus::allowed().map_err(io_error("choosing a CPU for", folder))?;
    let address = ListenAddr::Unix(folder.join("load.sock"));
    let server = Server::builder().cpus(Some(cpus.into_iter().take(1).collect())).limits(limits);
    let server = server.listen(address.clone(), Arc::clone(&service), None).start()?;
    let socket = Socket::connect(&address).map_err(io_error("connecting to", folder))?;
    let loaded = load(files, now_ms, &socket, &socket, answered);
    socket.end();
    drop(socket);
    let ended = server.drain().and_then(|_| service.ended().map_err(|error| error.source));
    ended.map_err(io_error("ending the store in", folder))?;
    // The lock goes with it.
    drop(service);
    Ok(loaded?)
}
