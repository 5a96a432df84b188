//! Exports as they are typed: `/srv/data,ro,clients=10.0.0.0/8`, the same as a flag and in the file.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use ksf_fs::{ExportOptions, Squash};
use ksf_nfs::{Clients, ExportSettings};
use serde::Deserialize;

/// What may stand behind the folder.
const OPTIONS: &str = "ro, rw, clients=CIDR, squash=root|all|none, anon=UID:GID, manage-gids, names=sync|async, \
                       secure, exclusive";

/// A folder with its options.
#[derive(Debug, Clone, Deserialize)]
#[serde(try_from = "String")]
pub(super) struct ExportSpec {
    path: PathBuf,
    options: ExportOptions,
    clients: Clients,
    secure: bool,
}

impl ExportSpec {
    /// The export, with a path that begins in `folder` if it is relative.
    pub(super) fn settings(&self, folder: &Path) -> ExportSettings {
        ExportSettings {
            path: folder.join(&self.path),
            options: self.options.clone(),
            clients: self.clients.clone(),
            secure: self.secure,
        }
    }

    /// Its options in words, for the line at the start.
    pub(super) fn words(&self) -> String {
        let ExportOptions { read_only, squash, anonymous: (uid, gid), manage_gids, sync_names, exclusive } =
            self.options;
        let mut words = vec![if read_only { "ro".to_owned() } else { "rw".to_owned() }];
        words.push(format!("squash={}", name_of(squash)));
        if squash != Squash::None {
            words.push(format!("anon={uid}:{gid}"));
        }
        words.extend(self.clients.networks().iter().map(|network| format!("clients={network}")));
        let flags = [
            (manage_gids, "manage-gids"),
            (!sync_names, "names=async"),
            (self.secure, "secure"),
            (exclusive, "exclusive"),
        ];
        words.extend(flags.into_iter().filter(|(is_set, _)| *is_set).map(|(_, name)| name.to_owned()));
        words.join(",")
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
        let mut spec =
            ExportSpec { path, options: ExportOptions::default(), clients: Clients::default(), secure: false };
        for part in parts {
            let options = &mut spec.options;
            match part.split_once('=').unwrap_or((part, "")) {
                ("ro", "") => options.read_only = true,
                ("rw", "") => options.read_only = false,
                ("manage-gids", "") => options.manage_gids = true,
                ("names", "sync") => options.sync_names = true,
                ("names", "async") => options.sync_names = false,
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
            ("/srv,squash=none,names=async,names=sync", "rw,squash=none"),
            (
                "/srv,clients=10.0.0.0/8,clients=::1",
                "rw,squash=root,anon=65534:65534,clients=10.0.0.0/8,clients=::1/128",
            ),
        ] {
            let spec: ExportSpec = text.parse().unwrap();
            assert_eq!(spec.words(), words, "{text}");
            assert_eq!(spec.settings(Path::new("/etc")).path, Path::new("/srv"));
        }
        let relative: ExportSpec = "data".parse().unwrap();
        assert_eq!(relative.settings(Path::new("/etc/ksf")).path, Path::new("/etc/ksf/data"));
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
