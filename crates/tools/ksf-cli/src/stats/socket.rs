//! The socket `ksf stat` connects to: one line of JSON in, one line of JSON out.

use std::io;
use std::path::{Path, PathBuf};

use ksf::status_socket::{Served, StatusSocket};
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

/// Answers at `wanted`, or in the first usable of [`folders`]. The inner error: no path was wanted and no folder is usable,
/// and why, in words; this costs only `ksf stat`.
pub(crate) fn open(wanted: Option<&Path>, source: Source) -> Result<Result<Served, String>, Failure> {
    let socket = match wanted {
        Some(path) => Ok(StatusSocket::at(path).map_err(|error| refused(path, &error))?),
        None => in_first(&folders()),
    };
    let served = socket.map(|socket| socket.spawn("ksf-stats", move |line| answer(line, &source)));
    match served {
        Ok(Err(error)) => Err(Failure::os("cannot start a thread", &error)),
        Ok(Ok(served)) => Ok(Ok(served)),
        Err(why) => Ok(Err(why)),
    }
}

fn in_first(folders: &[PathBuf]) -> Result<StatusSocket, String> {
    let mut why = Vec::new();
    for folder in folders {
        match StatusSocket::in_folder(folder) {
            Ok(socket) => return Ok(socket),
            Err(error) => why.push(format!("{}: {error}", folder.display())),
        }
    }
    if folders.len() == 1 {
        why.push("XDG_RUNTIME_DIR is not set".to_owned());
    }
    Err(why.join(", "))
}

fn answer(line: &str, source: &Source) -> String {
    let reply = match serde_json::from_str::<Request>(line) {
        Ok(Request::Stats) => serde_json::to_string(&source()),
        Err(error) => serde_json::to_string(&serde_json::json!({ "error": error.to_string() })),
    };
    reply.expect("maps have names for keys")
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use ksf::status_socket::ask;

    use super::super::{Snapshot, example};
    use super::*;

    #[test]
    fn it_answers_and_goes_away() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.sock");
        let served = open(Some(&path), Arc::new(example)).unwrap().unwrap();
        let reply = ask(&path, "{\"request\":\"stats\"}").unwrap();
        assert_eq!(serde_json::from_str::<Snapshot>(&reply).unwrap(), example());
        assert!(ask(&path, "nonsense").unwrap().contains("\"error\""));
        assert!(ask(&path, "{\"request\":\"halt\"}").unwrap().contains("unknown variant"));
        let second = open(Some(&path), Arc::new(example)).unwrap_err();
        assert_eq!(second.status, Status::Unavailable);
        drop(served);
        assert!(!path.exists());
    }

    #[test]
    fn a_folder_that_does_not_exist_is_an_error_if_it_was_wanted() {
        let path = Path::new("/no/such/folder/x.sock");
        let failure = open(Some(path), Arc::new(example)).unwrap_err();
        assert!(failure.to_string().contains("/no/such/folder/x.sock"));
    }
}
