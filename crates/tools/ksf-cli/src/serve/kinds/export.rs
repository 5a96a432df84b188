//! Exports of file servers, as a flag or in the file: `/srv/data,ro,clients=10.0.0.0/8`.

use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::{Duration, Instant};

use clap::{Args, ValueHint};
use ksf_fs::{
    Clients, Export, ExportOptions, ExportSettings, FileSettings, Files, FsOptions, Identities, LaneOptions, OpenError,
    Squash,
};
use serde::Deserialize;

use crate::number::{Number, number};
use crate::output::{Failure, Status};
use crate::serve::running::Running;
use crate::stats::Value;
use crate::toml_file::{Mistake, Table};

/// Default of `--lanes`.
const LANES: u64 = 16;
const LANES_MAX: u64 = 1024;

/// Time for requests in progress when a server ends.
const CLOSE_WITHIN: Duration = Duration::from_secs(5);

/// Settings of all file servers, as flags and, by [`FileServer::read`], as keys of a table.
#[derive(Debug, Args)]
pub(super) struct FileServer {
    /// Directory to export, with options behind commas; repeatable
    ///
    /// ro: read only. clients=CIDR: only these clients, repeatable. squash=root|all|none: maps these users to the anonymous
    /// user [default: root]. anon=UID:GID: that user [default: 65534:65534]. manage-gids: looks groups up here, because a
    /// request has at most 16 [9P: always]. names=sync: answers changes of names and attributes when they are durable [default
    /// of NFS]; names=async: before [default of 9P, whose clients ask for durability by fsync]. secure: only ports below 1024.
    /// exclusive: only this server changes the directory, so it caches attributes.
    #[arg(long = "export", value_name = "DIR[,OPTION...]", required = true)]
    exports: Vec<ExportSpec>,
    /// Base of relative paths.
    #[arg(skip)]
    folder: PathBuf,
    /// Directory of the keys that verify handles; NFS clients with a mount need them after a restart [default: /var/lib/ksf/nfs
    /// or 9p; without root ksf/nfs or 9p below $XDG_STATE_HOME or ~/.local/state]
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    state: Option<PathBuf>,
    /// Threads that execute requests; more than CPUs, because they wait for disks
    #[arg(long, value_name = "N", default_value_t = LANES, value_parser = number::<1, LANES_MAX>)]
    lanes: u64,
}

/// [`FileServer`] as the keys of a table.
#[derive(Debug, Deserialize)]
struct FileServerTable {
    /// Directories with their options, relative to the file.
    exports: Vec<ExportSpec>,
    /// Directory of keys, relative to the file.
    state: Option<PathBuf>,
    /// Number of threads.
    lanes: Option<Number<1, LANES_MAX>>,
}

impl FileServer {
    pub(super) fn read(table: &mut Table<'_>) -> Result<Self, Mistake> {
        let FileServerTable { exports, state, lanes } = table.take()?;
        if exports.is_empty() {
            return Err(table.mistake("exports has no folder; write exports = [\"/srv/data\"]"));
        }
        let folder = table.folder().to_owned();
        let state = state.map(|state| folder.join(state));
        Ok(Self { exports, folder, state, lanes: lanes.map_or(LANES, |number| number.0) })
    }

    /// Settings for a server of this kind. `sync_names`: default of exports without `names=`. `open_max`: descriptors for files.
    pub(super) fn settings(&self, kind: &str, sync_names: bool, open_max: usize) -> Result<FileSettings, Failure> {
        Ok(FileSettings {
            exports: self.exports.iter().map(|spec| spec.settings(&self.folder, sync_names)).collect(),
            state: self.state.clone().map_or_else(|| default_state(kind), Ok)?,
            lanes: LaneOptions { threads: self.lanes as usize },
            fs: FsOptions { open_max, ..FsOptions::default() },
        })
    }

    /// Reports each export with its options and `more`, and the identity of requests if it is not the caller's.
    pub(super) fn tell<'a>(
        &self,
        running: &mut Running,
        exports: impl Iterator<Item = &'a Export>,
        identities: Identities,
        more: impl Fn(&Export) -> String,
    ) {
        let line = |(export, spec): (&Export, &ExportSpec)| {
            format!("{}: export {} {}{}", running.name, export.path().display(), spec.words(), more(export))
        };
        let lines: Vec<String> = exports.zip(&self.exports).map(line).collect();
        running.ready.splice(0..0, lines);
        if identities == Identities::Own {
            running.notes.push(own_identity_note(&running.name));
        }
    }
}

/// Failure of a server's start, with its status; the error names the remedy.
pub(super) fn explain(error: OpenError) -> Failure {
    let status = match &error {
        OpenError::Export(_) => Status::NoInput,
        OpenError::Lanes(_) | OpenError::Thread(_) => Status::Os,
    };
    Failure::new(status, error.to_string())
}

/// Counters of a file layer for `ksf stat`.
pub(super) fn counters(files: &Files) -> impl Iterator<Item = Value> {
    let (fs, lanes) = (files.fs_counters(), files.lane_counters());
    [
        ("descriptors", "Descriptors that are kept between requests now.", fs.descriptors as u64),
        ("descriptor_hits", "Requests that found a descriptor.", fs.hits),
        ("descriptor_misses", "Requests that had to open one.", fs.misses),
        (
            "attributes_known",
            "Attributes of exclusive exports that were answered without asking the kernel.",
            fs.attr_hits,
        ),
        ("answered_at_once", "Requests that were answered without a thread that may block.", fs.warm),
        ("descriptors_evicted", "Descriptors that were closed for others.", fs.evicted),
        ("handles_stale", "Requests for objects that were gone.", fs.stale),
        ("lane_jobs_queued", "Requests that wait for a thread now.", lanes.queued_jobs as u64),
        ("syncs_queued", "Requests that wait for a sync now.", lanes.queued_syncs as u64),
        ("lane_jobs_panicked", "Requests that were given up because of a defect of ksf.", lanes.panicked),
    ]
    .into_iter()
    .map(|(name, help, value)| Value::new(name, help, value))
}

/// Options behind the directory.
const OPTIONS: &str = "ro, rw, clients=CIDR, squash=root|all|none, anon=UID:GID, manage-gids, names=sync|async, \
                       secure, exclusive";

/// A directory with its options.
#[derive(Debug, Clone, Deserialize)]
#[serde(try_from = "String")]
struct ExportSpec {
    path: PathBuf,
    options: ExportOptions,
    /// `names=`; `None`: not given.
    sync_names: Option<bool>,
    clients: Clients,
    secure: bool,
}

impl ExportSpec {
    /// The export, with a relative path below `folder`. `sync_names`: default without `names=`.
    fn settings(&self, folder: &Path, sync_names: bool) -> ExportSettings {
        let sync_names = self.sync_names.unwrap_or(sync_names);
        ExportSettings {
            path: folder.join(&self.path),
            options: ExportOptions { sync_names, ..self.options.clone() },
            clients: self.clients.clone(),
            secure: self.secure,
        }
    }

    /// Its options as text, for the line at the start.
    fn words(&self) -> String {
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

/// Default directory for the keys of a file server of this kind.
fn default_state(kind: &str) -> Result<PathBuf, Failure> {
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

/// Note at the start if requests do not have the rights of their own users.
fn own_identity_note(name: &str) -> String {
    format!(
        "{name}: all requests are carried out as the user of this process, whoever sends them; for the rights of their own \
         users run it as root"
    )
}

/// Ends a file layer; fails if requests hang.
pub(super) fn close(files: &Files) -> std::io::Result<()> {
    match files.close(Instant::now() + CLOSE_WITHIN) {
        0 => Ok(()),
        left => Err(std::io::Error::other(format!("{left} requests did not end within 5 s: a disk is slow or hangs"))),
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
    // System calls take the last number for "no change".
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
