//! `ksf accel unit`: a drop-in that has systemd start a service under `ksf accel run`.
//!
//! Only `ExecStart` changes: the rest of its line, quotes and variables included, is taken over as it is written. What
//! the unit forbids and the queues need is allowed where that is harmless, and told where it is not.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, ValueHint};

use super::run::LIBRARY;
use crate::output::{Failure, Status, print};

/// Where units are, the first wins (systemd.unit(5)).
const FOLDERS: [&str; 5] = [
    "/etc/systemd/system",
    "/run/systemd/system",
    "/usr/local/lib/systemd/system",
    "/usr/lib/systemd/system",
    "/lib/systemd/system",
];

/// Print a systemd drop-in that starts a service under ksf accel run
///
/// The unit is read, with its drop-ins; nothing is changed. The first lines say where the drop-in belongs.
#[derive(Debug, Args)]
pub(crate) struct UnitArgs {
    /// The service, such as nginx.service, or a file with its unit
    #[arg(value_name = "UNIT", value_hint = ValueHint::FilePath)]
    unit: PathBuf,
}

/// Runs the command.
pub(super) fn run(args: &UnitArgs) -> Result<ExitCode, Failure> {
    let unit = Unit::find(&args.unit)?;
    let ksf = std::env::current_exe().map_err(|error| Failure::os("cannot find out where ksf is", &error))?;
    print(drop_in(&unit, &ksf)?.as_bytes())?;
    Ok(ExitCode::SUCCESS)
}

/// A unit with its drop-ins.
#[derive(Debug)]
struct Unit {
    name: String,
    /// Where it was found.
    file: PathBuf,
    service: Service,
}

/// What a unit says in `[Service]`: each assignment in order, of those that can be given several times, since the last
/// that took the earlier ones back.
#[derive(Debug, Default, PartialEq)]
struct Service(BTreeMap<String, Vec<String>>);

impl Unit {
    fn find(wish: &Path) -> Result<Self, Failure> {
        if wish.components().count() > 1 {
            let name = wish.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let mut service = Service::default();
            service.read(&text(wish)?);
            let folder = wish.with_file_name(format!("{name}.d"));
            service.read_drop_ins(&[folder])?;
            return Ok(Self { name, file: wish.to_owned(), service });
        }
        let mut name = wish.to_string_lossy().into_owned();
        if !name.contains('.') {
            name.push_str(".service");
        }
        // An instance has the unit of its template, and drop-ins of both.
        let template = name.split_once('@').map(|(prefix, _)| format!("{prefix}@.service"));
        let names: Vec<&str> = [Some(&*name), template.as_deref()].into_iter().flatten().collect();
        let files = names.iter().flat_map(|name| FOLDERS.map(|folder| Path::new(folder).join(name)));
        let file = files.into_iter().find(|file| file.is_file()).ok_or_else(|| {
            Failure::new(Status::NoInput, format!("there is no unit {name} in {}", FOLDERS.join(", ")))
                .remedy("see systemctl list-unit-files --type=service, or give the path of a file")
        })?;
        let mut service = Service::default();
        service.read(&text(&file)?);
        let folders = names.iter().flat_map(|name| FOLDERS.map(|folder| Path::new(folder).join(format!("{name}.d"))));
        service.read_drop_ins(&folders.collect::<Vec<_>>())?;
        Ok(Self { name, file, service })
    }
}

fn text(file: &Path) -> Result<String, Failure> {
    std::fs::read_to_string(file).map_err(|error| match error.kind() {
        io::ErrorKind::PermissionDenied => Failure::os(format!("cannot read {}", file.display()), &error),
        _ => Failure::new(Status::NoInput, format!("cannot read {}: {error}", file.display())),
    })
}

impl Service {
    /// Drop-ins are read in the order of their names; of two with the same name the one in the earlier folder counts.
    fn read_drop_ins(&mut self, folders: &[PathBuf]) -> Result<(), Failure> {
        let mut files = BTreeMap::new();
        for folder in folders {
            let Ok(entries) = std::fs::read_dir(folder) else { continue };
            for path in entries.flatten().map(|entry| entry.path()) {
                if path.extension().is_some_and(|extension| extension == "conf") {
                    files.entry(path.file_name().map(OsString::from)).or_insert(path);
                }
            }
        }
        // The own one, written earlier, would have its command started under itself.
        let own = files.into_iter().filter(|(name, _)| name.as_deref() != Some(FILE.as_ref()));
        own.map(|(_, path)| path).try_for_each(|path| {
            self.read(&text(&path)?);
            Ok(())
        })
    }

    /// Adds the assignments of a text (systemd.syntax(7)).
    fn read(&mut self, text: &str) {
        let mut in_service = false;
        let mut lines = text.lines();
        while let Some(line) = lines.next() {
            let mut line = line.trim_start().to_owned();
            if line.is_empty() || line.starts_with(['#', ';']) {
                continue;
            }
            // A backslash at the end goes on with the next line that is no comment, and is a space.
            while line.ends_with('\\') {
                line.pop();
                line.push(' ');
                match lines.by_ref().find(|line| !line.trim_start().starts_with(['#', ';'])) {
                    Some(next) => line.push_str(next.trim_start()),
                    None => break,
                }
            }
            if line.starts_with('[') {
                in_service = line.trim_end() == "[Service]";
            } else if in_service && let Some((key, value)) = line.split_once('=') {
                let values = self.0.entry(key.trim_end().to_owned()).or_default();
                match value.trim() {
                    "" => values.clear(),
                    value => values.push(value.to_owned()),
                }
            }
        }
    }

    fn all(&self, key: &str) -> &[String] {
        self.0.get(key).map_or(&[], Vec::as_slice)
    }

    fn last(&self, key: &str) -> Option<&str> {
        self.all(key).last().map(String::as_str)
    }

    /// Of a list of words that may begin with `~` (all but these): is this one allowed? Lists add up.
    fn allows(&self, key: &str, word: &str) -> bool {
        let mut allowed: Option<bool> = None;
        for list in self.all(key) {
            let (but, words) = match list.strip_prefix('~') {
                Some(words) => (true, words),
                None => (false, list.as_str()),
            };
            // The first list says what holds for those that are never named.
            let default = allowed.unwrap_or(but);
            allowed = Some(if words.split_whitespace().any(|one| one == word) { !but } else { default });
        }
        allowed.unwrap_or(true)
    }
}

/// The file's name in the folder of drop-ins.
const FILE: &str = "ksf-accel.conf";

/// Letters in front of a command that say how it is started (systemd.service(5)); `@` is not among them.
const PREFIXES: [char; 5] = ['-', ':', '+', '!', '|'];

fn drop_in(unit: &Unit, ksf: &Path) -> Result<String, Failure> {
    let Unit { name, file, service } = unit;
    let refuse = |why: String| Failure::new(Status::Unavailable, format!("{name} cannot be accelerated: {why}"));
    let command = match service.all("ExecStart") {
        [command] => command,
        [] => return Err(refuse(format!("{} has no ExecStart", file.display()))),
        several => return Err(refuse(format!("it has {} commands to start", several.len()))),
    };
    let bare = command.trim_start_matches(PREFIXES);
    let prefix = &command[..command.len() - bare.len()];
    let program = bare.split_whitespace().next().unwrap_or_default();
    if bare.starts_with('@') {
        return Err(refuse("its ExecStart gives the program another name (@), which ksf accel run cannot do".into()));
    }
    if program.starts_with(['"', '\'']) || program.contains(['$', '\\']) {
        return Err(refuse(format!("the program of its ExecStart is not written plainly: {program}")));
    }
    if program == ksf.to_string_lossy() || bare.contains(" accel run ") {
        return Err(refuse("it is started under ksf accel run already".into()));
    }
    let folder = format!("/etc/systemd/system/{name}.d");
    let mut out = format!(
        "# {name} under ksf accel run. Made by ksf accel unit from {}.\n\
         #   mkdir -p {folder}\n\
         #   ksf accel unit {name} > {folder}/{FILE}\n\
         #   systemctl daemon-reload && systemctl restart {name}\n\
         # To take it back, remove the file and repeat the last line.\n",
        file.display()
    );
    for note in notes(service) {
        let _ = writeln!(out, "# {note}");
    }
    let _ = write!(out, "[Service]\nExecStart=\nExecStart={prefix}{} accel run -- {bare}\n", quoted(ksf));
    for line in allowances(service, ksf) {
        let _ = writeln!(out, "{line}");
    }
    Ok(out)
}

/// A path as one word.
fn quoted(path: &Path) -> String {
    let path = path.to_string_lossy().replace('%', "%%");
    if path.contains([' ', '"', '\'', '\\']) {
        format!("\"{}\"", path.replace('\\', "\\\\").replace('"', "\\\""))
    } else {
        path
    }
}

/// True if the service is started with the rights of root.
fn is_root(service: &Service) -> bool {
    service.last("User").is_none_or(|user| user == "root" || user == "0")
}

/// What makes connections be steered by weaker means, for the administrator to weigh.
fn notes(service: &Service) -> Vec<&'static str> {
    let mut notes = Vec::new();
    let rights = ["CAP_BPF", "CAP_NET_ADMIN"];
    let ambient = service.all("AmbientCapabilities").join(" ");
    if !is_root(service) && !rights.iter().all(|right| ambient.contains(right)) {
        notes.push("It runs without the rights of root, so connections are steered by weaker means (docs/accel.md).");
        notes.push("AmbientCapabilities=CAP_BPF CAP_NET_ADMIN would change that, and give the program these rights.");
    } else if !rights.iter().all(|right| service.allows("CapabilityBoundingSet", right)) {
        notes.push(
            "Its CapabilityBoundingSet lacks CAP_BPF or CAP_NET_ADMIN, so connections are steered by weaker means.",
        );
    }
    // bpf() is in no group but @privileged.
    if !service.allows("SystemCallFilter", "bpf") || !service.allows("SystemCallFilter", "@privileged") {
        notes.push("Its SystemCallFilter may refuse bpf(), so connections are steered by weaker means.");
    }
    notes
}

/// Lines that let the library be loaded, reach the holder, and tell of it; nothing else.
fn allowances(service: &Service, ksf: &Path) -> Vec<String> {
    let mut lines = Vec::new();
    if !service.allows("RestrictAddressFamilies", "AF_UNIX") {
        lines.push("RestrictAddressFamilies=AF_UNIX".to_owned());
    }
    if !service.all("NoExecPaths").is_empty() {
        let library = crate::library::find(&LIBRARY).ok();
        let folder = library.as_deref().and_then(Path::parent).map(|folder| format!(" {}", quoted(folder)));
        lines.push(format!("ExecPaths={}{}", quoted(ksf), folder.unwrap_or_default()));
    }
    // The socket of ksf accel status is in /run/ksf/accel.
    if is_root(service) && service.last("ProtectSystem") == Some("strict") {
        lines.extend(["RuntimeDirectory=ksf".to_owned(), "RuntimeDirectoryPreserve=yes".to_owned()]);
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    fn service(text: &str) -> Service {
        let mut service = Service::default();
        service.read(&format!("[Service]\n{text}"));
        service
    }

    fn made(text: &str) -> Result<String, String> {
        let unit = Unit { name: "x.service".into(), file: "/lib/x.service".into(), service: service(text) };
        drop_in(&unit, Path::new("/usr/local/bin/ksf")).map_err(|failure| failure.what)
    }

    /// The lines behind the head.
    fn lines(text: &str) -> Vec<String> {
        let made = made(text).unwrap();
        made.lines().skip_while(|line| *line != "[Service]").skip(1).map(str::to_owned).collect()
    }

    #[test]
    fn units_are_read_as_systemd_reads_them() {
        let mut service = Service::default();
        service.read(
            "ExecStart=nobody\n[Unit]\nExecStart=nobody\n[Service]\n# ExecStart=no\n;ExecStart=no\nExecStart = /a \\\n\
             # between\n   -b \\\n   -c\nUser=me\nX=1\nX=2\n[Install]\nX=9\n",
        );
        assert_eq!(service.all("ExecStart"), ["/a  -b  -c"]);
        assert_eq!((service.last("User"), service.all("X")), (Some("me"), &["1".to_owned(), "2".to_owned()][..]));
        // A drop-in takes back and begins anew.
        service.read("[Service]\nExecStart=\nExecStart=/d\n");
        assert_eq!(service.all("ExecStart"), ["/d"]);
    }

    #[test]
    fn lists_of_what_is_allowed_add_up() {
        let allows = |lists: &str| service(lists).allows("L", "a");
        assert!(allows("") && allows("L=a b") && allows("L=~b") && allows("L=b\nL=a") && allows("L=~a\nL=a"));
        assert!(!allows("L=b") && !allows("L=~a b") && !allows("L=a\nL=~a"));
        assert!(allows("L=b\nL="), "taken back");
    }

    #[test]
    fn the_command_is_taken_over_as_it_is_written() {
        let text = "ExecStart=!-/usr/sbin/nginx -g 'daemon on;' $OPTS %i \"a b\"";
        let expected = "ExecStart=!-/usr/local/bin/ksf accel run -- /usr/sbin/nginx -g 'daemon on;' $OPTS %i \"a b\"";
        assert_eq!(lines(text), ["ExecStart=", expected]);
        assert_eq!(quoted(Path::new("/opt/my ksf/50%")), "\"/opt/my ksf/50%%\"");
    }

    #[test]
    fn what_the_queues_need_is_allowed_and_the_rest_is_told() {
        let strict =
            "ExecStart=/x\nProtectSystem=strict\nRestrictAddressFamilies=AF_INET\nRestrictAddressFamilies=AF_INET6";
        let allowed = ["RestrictAddressFamilies=AF_UNIX", "RuntimeDirectory=ksf", "RuntimeDirectoryPreserve=yes"];
        assert_eq!(lines(strict)[2..], allowed);
        let told = |text: &str| notes(&service(text)).len();
        assert_eq!(told("User=root\nSystemCallFilter=~@reboot"), 0);
        assert_eq!(told("User=www-data"), 2);
        assert_eq!(told("User=www-data\nAmbientCapabilities=CAP_BPF CAP_NET_ADMIN"), 0);
        assert_eq!(told("CapabilityBoundingSet=CAP_NET_BIND_SERVICE"), 1);
        assert_eq!((told("SystemCallFilter=@system-service"), told("SystemCallFilter=~@privileged")), (1, 1));
        // A user's runtime folder would be the user's.
        assert_eq!(lines(&format!("User=me\n{strict}")).len(), 3);
    }

    #[test]
    fn what_cannot_be_started_under_it_is_refused_with_the_reason() {
        for (text, why) in [
            ("", "has no ExecStart"),
            ("ExecStart=/a\nExecStart=/b", "2 commands"),
            ("ExecStart=@/a b", "another name"),
            ("ExecStart=$PROGRAM -x", "not written plainly"),
            ("ExecStart=\"/a b\"", "not written plainly"),
            ("ExecStart=/usr/local/bin/ksf accel run -- /a", "already"),
        ] {
            let error = made(text).unwrap_err();
            assert!(error.contains(why), "{text}: {error}");
        }
    }
}
