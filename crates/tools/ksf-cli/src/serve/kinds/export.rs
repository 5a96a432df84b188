//! Exports of file servers as they are typed: `/srv/data,ro,clients=10.0.0.0/8`, the same as a flag and in the file.

use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use ksf_fs::{Clients, ExportOptions, ExportSettings, Squash};
use serde::Deserialize;

use crate::output::{Failure, Status};

/// Threads that carry requests out, where nothing is said.
pub(super) const LANES: u64 = 16;
pub(super) const LANES_MAX: u64 = 1024;

/// How long the requests that were begun may take when a server ends.
pub(super) const CLOSE_WITHIN: Duration = Duration::from_secs(5);

/// What may stand behind the folder.
const OPTIONS: &str = "ro, rw, clients=CIDR, squash=root|all|none, anon=UID:GID, manage-gids, names=sync|async, \
                       secure, exclusive";

/// A folder with its options.
#[derive(Debug, Clone, Deserialize)]
#[serde(try_from = "String")]
pub(super) struct ExportSpec {
    path: PathBuf,
    options: ExportOptions,
    /// `names=`; `None`: nothing is said.
    sync_names: Option<bool>,
    clients: Clients,
    secure: bool,
}

impl ExportSpec {
    /// The export, with a path that begins in `folder` if it is relative. `sync_names`: where nothing is said.
    pub(super) fn settings(&self, folder: &Path, sync_names: bool) -> ExportSettings {
        let sync_names = self.sync_names.unwrap_or(sync_names);
        ExportSettings {
            path: folder.join(&self.path),
            options: ExportOptions { sync_names, ..self.options.clone() },
            clients: self.clients.clone(),
            secure: self.secure,
        }
    }

    /// Its options in words, for the line at the start.
    pub(super) fn words(&self) -> String {
        let ExportOptions { read_only, squash, anonymous: (uid, gid), manage_gids, sync_names: _, exclusive } =
            self.options;
        let mut words = vec![if read_only { "ro".to_owned() } else { "rw".to_owned() }];
        words.push(format!("squash={}", name_of(squash)));
        if squash != Squash::None {
            words.push(format!("anon={uid}:{gid}"));
        }
        words.extend(self.clients.networks().iter().map(|network| format!("clients={network}")));
        let flags = [
            (manage_gids, "manage-gids"),
            (self.sync_names == Some(true), "names=sync"),
            (self.sync_names == Some(false), "names=async"),
            (self.secure, "secure"),
            (exclusive, "exclusive"),
        ];
        words.extend(flags.into_iter().filter(|(is_set, _)| *is_set).map(|(_, name)| name.to_owned()));
        words.join(",")
    }
}

/// Where the keys of a file server of this kind are kept where nothing is said.
pub(super) fn default_state(kind: &str) -> Result<PathBuf, Failure> {
    if rustix::process::geteuid().is_root() {
        return Ok(Path::new("/var/lib/ksf").join(kind));
    }
    let folder = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let below = folder("XDG_STATE_HOME").or_else(|| folder("HOME").map(|home| home.join(".local/state")));
    below.map(|below| below.join("ksf").join(kind)).ok_or_else(|| {
        Failure::new(
            Status::Usage,
            "there is no folder for the keys of handles: neither XDG_STATE_HOME nor HOME is set",
        )
        .remedy("choose one with --state DIR")
    })
}

/// What is said at the start where requests do not have the rights of their own users.
pub(super) fn own_identity_note(name: &str) -> String {
    format!(
        "{name}: all requests are carried out as the user of this process, whoever sends them; for the rights of their own \
         users run it as root"
    )
}

/// What is said when requests hang at the end.
pub(super) fn check_closed(left: usize) -> std::io::Result<()> {
    match left {
        0 => Ok(()),
        left => Err(std::io::Error::other(format!("{left} requests did not end within 5 s: a file system hangs"))),
    }
}

fn name_of(squash: Squash) -> &'static str {
    match squash {
        Squash::None => "none",
        Squash::Root => "root",
        Squash::All => "all",
    }
}

fn anonymous(text: &str) -> Option<(u32, u32)> {
    let (uid, gid) = text.split_once(':')?;
    // The last number means nobody in system calls.
    let id = |text: &str| text.parse().ok().filter(|id| *id != u32::MAX);
    Some((id(uid)?, id(gid)?))
}

impl FromStr for ExportSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut parts = text.split(',');
        let path = PathBuf::from(parts.next().unwrap_or_default());
        if path.as_os_str().is_empty() {
            return Err(format!("\"{text}\" names no folder; write DIR, or DIR with options: {OPTIONS}"));
        }
        let mut spec = ExportSpec {
            path,
            options: ExportOptions::default(),
            sync_names: None,
            clients: Clients::default(),
            secure: false,
        };
        for part in parts {
            let options = &mut spec.options;
            match part.split_once('=').unwrap_or((part, "")) {
                ("ro", "") => options.read_only = true,
                ("rw", "") => options.read_only = false,
                ("manage-gids", "") => options.manage_gids = true,
                ("names", "sync") => spec.sync_names = Some(true),
                ("names", "async") => spec.sync_names = Some(false),
                ("exclusive", "") => options.exclusive = true,
                ("secure", "") => spec.secure = true,
                ("squash", "root") => options.squash = Squash::Root,
                ("squash", "all") => options.squash = Squash::All,
                ("squash", "none") => options.squash = Squash::None,
                ("anon", ids) => {
                    options.anonymous = anonymous(ids).ok_or_else(|| {
                        format!("\"{part}\" of export {text}: write anon=UID:GID, as in anon=65534:65534")
                    })?;
                }
                ("clients", network) => {
                    spec.clients.add(network.parse().map_err(|error| format!("clients of export {text}: {error}"))?);
                }
                _ => {
                    return Err(format!(
                        "\"{part}\" is no option of an export; they are {OPTIONS} (a folder with a comma in its name is exported \
                         by a symbolic link)"
                    ));
                }
            }
        }
        Ok(spec)
    }
}

impl TryFrom<String> for ExportSpec {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exports_are_read_and_said() {
        for (text, words) in [
            ("/srv", "rw,squash=root,anon=65534:65534"),
            ("/srv,ro,squash=all,anon=7:8", "ro,squash=all,anon=7:8"),
            ("/srv,squash=none,manage-gids,secure,exclusive", "rw,squash=none,manage-gids,secure,exclusive"),
            ("/srv,squash=none,names=async", "rw,squash=none,names=async"),
            ("/srv,squash=none,names=async,names=sync", "rw,squash=none,names=sync"),
            (
                "/srv,clients=10.0.0.0/8,clients=::1",
                "rw,squash=root,anon=65534:65534,clients=10.0.0.0/8,clients=::1/128",
            ),
        ] {
            let spec: ExportSpec = text.parse().unwrap();
            assert_eq!(spec.words(), words, "{text}");
            assert_eq!(spec.settings(Path::new("/etc"), true).path, Path::new("/srv"));
            for unless_said in [true, false] {
                let wanted = if text.contains("names=") { text.ends_with("names=sync") } else { unless_said };
                assert_eq!(spec.settings(Path::new("/etc"), unless_said).options.sync_names, wanted, "{text}");
            }
        }
        let relative: ExportSpec = "data".parse().unwrap();
        assert_eq!(relative.settings(Path::new("/etc/ksf"), true).path, Path::new("/etc/ksf/data"));
    }

    #[test]
    fn mistakes_are_named() {
        for (text, part) in [
            ("", "names no folder"),
            (",ro", "names no folder"),
            ("/srv,readonly", "\"readonly\" is no option"),
            ("/srv,ro=1", "\"ro=1\" is no option"),
            ("/srv,squash=some", "squash=root|all|none"),
            ("/srv,names=fast", "names=sync|async"),
            ("/srv,anon=7", "anon=UID:GID"),
            ("/srv,anon=4294967295:1", "anon=UID:GID"),
            ("/srv,clients=10.0.0.0/33", "32 bits"),
            ("/srv,clients=here", "\"here\" is no network"),
        ] {
            let error = text.parse::<ExportSpec>().unwrap_err();
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}
