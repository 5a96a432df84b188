//! The socket `ksf stat` connects to: one line of JSON in, one line of JSON out.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::Source;
use crate::output::{Failure, Status};

/// What a client may ask.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "lowercase")]
pub(crate) enum Request {
    /// All counters.
    Stats,
}

/// Folders for sockets named by process id, best first.
pub(crate) fn folders() -> Vec<PathBuf> {
    let mut folders = vec![PathBuf::from("/run/ksf")];
    if let Some(runtime) = std::env::var_os("XDG_RUNTIME_DIR") {
        folders.push(Path::new(&runtime).join("ksf"));
    }
    folders
}

/// A running listener; dropping it removes the socket from the file system.
#[derive(Debug)]
pub(crate) struct StatsSocket {
    path: PathBuf,
    /// The folder, if it was made for this socket.
    made_folder: Option<PathBuf>,
}

impl StatsSocket {
    /// Listens at `wanted`, or in the first usable of [`folders`]. `Ok(None)`: no path was
    /// wanted and no folder is usable, which costs only `ksf stat`.
    pub(crate) fn open(wanted: Option<&Path>, source: Source) -> Result<Option<Self>, Failure> {
        let name = format!("{}.sock", std::process::id());
        let candidates = match wanted {
            Some(path) => vec![path.to_owned()],
            None => {
                folders().iter().for_each(|folder| sweep(folder));
                folders().iter().map(|folder| folder.join(&name)).collect()
            }
        };
        let mut last_error = None;
        for path in candidates {
            match listen(&path) {
                Ok((listener, made_folder)) => {
                    let socket = StatsSocket { path, made_folder };
                    thread::Builder::new()
                        .name("ksf-stats".into())
                        .spawn(move || serve(&listener, &source))
                        .map_err(|error| Failure::os("cannot start a thread", &error))?;
                    return Ok(Some(socket));
                }
                Err(error) => last_error = Some((path, error)),
            }
        }
        match (wanted, last_error) {
            (Some(_), Some((path, error))) => Err(refused(&path, &error)),
            _ => Ok(None),
        }
    }

    /// Where it listens.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for StatsSocket {
    fn drop(&mut self) {
        // Somebody may have removed it already.
        let _ = fs::remove_file(&self.path);
        if let Some(folder) = &self.made_folder {
            // Fails, and should, while another server has a socket there.
            let _ = fs::remove_dir(folder);
        }
    }
}

fn refused(path: &Path, error: &io::Error) -> Failure {
    let what = format!("cannot listen for ksf stat on {}: {error}", path.display());
    let (status, remedy) = match error.kind() {
        io::ErrorKind::AddrInUse => {
            (Status::Unavailable, format!("{}; choose another --stats-socket", crate::busy::describe_unix(path)))
        }
        io::ErrorKind::PermissionDenied => {
            (Status::NoPermission, "choose a --stats-socket in a folder you may write to".to_owned())
        }
        _ => (Status::Os, "choose another --stats-socket; its folder must exist".to_owned()),
    };
    Failure::new(status, what).remedy(remedy)
}

/// Removes the sockets that killed servers have left in a folder.
fn sweep(folder: &Path) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for path in entries.flatten().map(|entry| entry.path()) {
        let is_socket = path.extension().is_some_and(|extension| extension == "sock");
        if is_socket && UnixStream::connect(&path).is_err_and(|e| e.kind() == io::ErrorKind::ConnectionRefused) {
            // Another server that starts now may have been first.
            let _ = fs::remove_file(&path);
        }
    }
}

/// Listens at `path`; also the folder, if it had to be made.
fn listen(path: &Path) -> io::Result<(UnixListener, Option<PathBuf>)> {
    // Only the last part: /run/ksf may be made, a misspelt path may not.
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty() && !folder.exists());
    if let Some(folder) = folder {
        match fs::create_dir(folder) {
            // Another server that starts now was first.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            result => result?,
        }
    }
    // A dead server may have left its socket behind; a live one answers.
    if UnixStream::connect(path).is_err_and(|e| e.kind() == io::ErrorKind::ConnectionRefused) {
        fs::remove_file(path)?;
    }
    let listener = UnixListener::bind(path)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
    Ok((listener, folder.map(Path::to_owned)))
}

fn serve(listener: &UnixListener, source: &Source) {
    for peer in listener.incoming() {
        match peer {
            // A peer that goes away or talks nonsense is its own problem.
            Ok(peer) => drop(answer(peer, source)),
            // No descriptors left: waiting is all there is to do, spinning would take a CPU.
            Err(_) => thread::sleep(Duration::from_millis(100)),
        }
    }
}

fn answer(mut peer: UnixStream, source: &Source) -> io::Result<()> {
    const REQUEST_BYTES_MAX: usize = 4096;
    peer.set_read_timeout(Some(Duration::from_secs(1)))?;
    peer.set_write_timeout(Some(Duration::from_secs(1)))?;
    let request = super::read_request(&mut peer, REQUEST_BYTES_MAX, |bytes| bytes.contains(&b'\n'))?;
    let reply = match serde_json::from_slice::<Request>(&request) {
        Ok(Request::Stats) => serde_json::to_string(&source()),
        Err(error) => serde_json::to_string(&serde_json::json!({ "error": error.to_string() })),
    };
    let mut reply = reply.map_err(io::Error::other)?;
    reply.push('\n');
    peer.write_all(reply.as_bytes())
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::sync::Arc;

    use super::super::{Snapshot, example};
    use super::*;

    fn folder(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("ksf-stats-{}-{name}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        folder
    }

    fn ask(path: &Path, request: &str) -> String {
        let mut stream = UnixStream::connect(path).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        let mut reply = String::new();
        BufReader::new(stream).read_line(&mut reply).unwrap();
        reply
    }

    #[test]
    fn it_answers_and_goes_away() {
        let folder = folder("answers");
        let path = folder.join("x.sock");
        let socket = StatsSocket::open(Some(&path), Arc::new(example)).unwrap().unwrap();
        let reply = ask(&path, "{\"request\":\"stats\"}\n");
        assert_eq!(serde_json::from_str::<Snapshot>(&reply).unwrap(), example());
        assert!(ask(&path, "nonsense\n").contains("\"error\""));
        assert!(ask(&path, "{\"request\":\"halt\"}\n").contains("unknown variant"));
        let second = StatsSocket::open(Some(&path), Arc::new(example)).unwrap_err();
        assert_eq!(second.status, Status::Unavailable);
        drop(socket);
        assert!(!path.exists());
        let nested = folder.join("made").join("x.sock");
        drop(StatsSocket::open(Some(&nested), Arc::new(example)).unwrap());
        assert!(!folder.join("made").exists());
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn a_socket_of_a_dead_server_is_replaced() {
        let folder = folder("stale");
        let path = folder.join("x.sock");
        drop(UnixListener::bind(&path).unwrap());
        assert!(path.exists());
        let socket = StatsSocket::open(Some(&path), Arc::new(example)).unwrap();
        assert!(socket.is_some());
        drop(socket);
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn a_folder_that_does_not_exist_is_an_error_if_it_was_wanted() {
        let path = Path::new("/no/such/folder/x.sock");
        let failure = StatsSocket::open(Some(path), Arc::new(example)).unwrap_err();
        assert!(failure.to_string().contains("/no/such/folder/x.sock"));
    }
}
