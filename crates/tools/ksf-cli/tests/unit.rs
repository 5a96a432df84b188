//! packaging/ksf.service and packaging/ksf.toml together: the store and the NFS server of the file run with no more than the
//! unit lets them write and do.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::accel_systemd::{cgroup2, probed};
use crate::ninep;
use crate::support::export::Calls;
use crate::support::{Folder, Server, ksf, stderr, stdout};
use ksf_test::{own_network_or_skip, program_or_skip, stream};

const UNIT: &str = include_str!("../../../../packaging/ksf.service");
const FILE: &str = include_str!("../../../../packaging/ksf.toml");
const MAKEFILE: &str = include_str!("../../../../Makefile");

/// The unit with its settings for NFS in force.
fn unit_with_nfs() -> String {
    let line = |line: &str| match line.strip_prefix('#') {
        Some(setting) if setting.starts_with(|first: char| first.is_ascii_uppercase()) => setting.to_owned(),
        _ => line.to_owned(),
    };
    UNIT.lines().map(line).collect::<Vec<_>>().join("\n") + "\n"
}

/// The values of a setting, of all lines that have it.
fn values<'a>(unit: &'a str, setting: &str) -> Vec<&'a str> {
    let lines = unit.lines().filter_map(|line| line.strip_prefix(setting)?.strip_prefix('='));
    lines.flat_map(str::split_whitespace).collect()
}

#[test]
fn no_program_is_installed_set_user_id_or_with_capabilities() {
    let rights = ["setcap", "chmod", "chown"];
    assert!(rights.iter().all(|right| !MAKEFILE.contains(right)), "installing gives no other rights");
    let files: Vec<&str> = MAKEFILE.lines().filter(|line| line.contains("install ") && line.contains(" -m")).collect();
    assert!(files.iter().any(|line| line.ends_with("/bin/ksf")), "{files:#?}");
    let plain = |line: &&str| line.contains(" -m 755 ") || line.contains(" -m 644 ");
    assert!(files.iter().all(plain), "{files:#?}");
    // Neither is what cargo leaves, which `install` copies.
    let mode = fs::metadata(env!("CARGO_BIN_EXE_ksf")).unwrap().permissions().mode();
    assert_eq!(mode & 0o7000, 0, "{mode:o}");
}

#[test]
fn systemd_takes_the_unit() {
    let Some(_) = program_or_skip("systemd-analyze") else { return };
    for text in [UNIT.to_owned(), unit_with_nfs()] {
        let folder = Folder::new();
        // Not installed: verify looks for the program.
        let unit = folder.write("ksf.service", text.replace("/usr/local/bin/ksf", env!("CARGO_BIN_EXE_ksf")));
        let verify = || Command::new("systemd-analyze").args(["verify", "--man=no"]).arg(&unit).output().unwrap();
        let output = verify();
        assert!(output.status.success() && stderr(&output).is_empty(), "{}", stderr(&output));
        // The judge is one.
        folder.write("ksf.service", text.replace("StateDirectoryMode=0700", "StateDirectoryMood=0700"));
        assert!(stderr(&verify()).contains("StateDirectoryMood"));
    }
    assert_eq!(values(UNIT, "RuntimeDirectoryPreserve"), ["yes"], "others have sockets in /run/ksf");
}

/// Makes all read-only but /var/lib/ksf, /run/ksf and `EXPORT`, as `ProtectSystem=strict` and the folders of the unit do, and
/// becomes the program. A mount that is hidden by another one cannot be changed, and need not be.
const ENTER: &str = r#"
mount -t tmpfs -o mode=755 tmpfs /var/lib
mount -t tmpfs -o mode=755 tmpfs /run
mkdir /var/lib/ksf /run/ksf
mount --bind "$STATE" /var/lib/ksf
mount --bind "$RUNTIME" /run/ksf
mount --bind "$EXPORT" "$EXPORT"
awk '{ print $5 }' /proc/self/mountinfo | sort -u | while read -r point; do
    case $point in /proc | /proc/* | /sys | /sys/* | /dev | /dev/* | /var/lib/ksf | /run/ksf | "$EXPORT") continue ;; esac
    mount -o remount,bind,ro "$point" 2> /dev/null || true
done
for file in /var/lib/x /run/x "$EXPORT/../x"; do
    if touch "$file" 2> /dev/null; then echo "$file can be written"; exit 99; fi
done >&2
exec "$@"
"#;

/// What the unit leaves of the machine. Each program has mounts of its own; the folders stay.
struct Sandbox {
    folder: Folder,
    export: PathBuf,
}

impl Sandbox {
    fn new_or_skip() -> Option<Self> {
        own_network_or_skip("mounts")?;
        program_or_skip("setpriv")?;
        let folder = Folder::new();
        let export = folder.path("export");
        for (name, mode) in [("state", 0o700), ("runtime", 0o755), ("export", 0o777)] {
            fs::create_dir(folder.path(name)).unwrap();
            fs::set_permissions(folder.path(name), fs::Permissions::from_mode(mode)).unwrap();
        }
        Some(Sandbox { folder, export })
    }

    /// `ksf serve` of a file, as root with the capabilities of the unit.
    fn serve(&self, unit: &str, file: &str) -> Command {
        let capabilities = values(unit, "CapabilityBoundingSet").into_iter();
        let capabilities: Vec<String> =
            capabilities.map(|name| format!("+{}", name.trim_start_matches("CAP_").to_lowercase())).collect();
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-ec", ENTER, "sh"]);
        command.args(["setpriv", "--no-new-privs", "--inh-caps=-all", "--bounding-set"]);
        command.arg(format!("-all,{}", capabilities.join(",")));
        command.arg(env!("CARGO_BIN_EXE_ksf")).arg("serve").arg(self.folder.write("ksf.toml", file));
        command.env("STATE", self.folder.path("state")).env("RUNTIME", self.folder.path("runtime"));
        command.env("EXPORT", &self.export).env_remove("XDG_RUNTIME_DIR");
        command
    }

    /// Starts it, with its status socket where it is by default.
    fn start(&self, unit: &str, file: &str) -> Server {
        let mut server = Server::start_as_is(self.serve(unit, file), 1, PathBuf::new(), Folder::new());
        server.stats = self.folder.path(&format!("runtime/{}.sock", server.pid()));
        server
    }

    fn mode(&self, name: &str) -> u32 {
        fs::metadata(self.folder.path(name)).unwrap().permissions().mode() & 0o7777
    }
}

/// The table of a service in the shipped file, with all its keys but those that need other files.
fn shipped(name: &str) -> String {
    let start = FILE.find(&format!("#[[service]]\n#name = \"{name}\"")).expect("the file has it");
    let lines = FILE[start..].lines().take_while(|line| line.starts_with('#'));
    let keys = lines.filter_map(|line| line.strip_prefix('#')).take_while(|line| !line.starts_with(' '));
    let keys = keys.filter(|line| !line.starts_with("password_file") && !line.starts_with("rpcbind"));
    keys.collect::<Vec<_>>().join("\n") + "\n"
}

#[test]
fn shipped_store_runs_in_the_sandbox_of_the_shipped_unit() {
    let Some(sandbox) = Sandbox::new_or_skip() else { return };
    // 1 GiB for each CPU is not what the test is about.
    let file = shipped("store").replace("\"1g\"", "\"8m\"");
    let data = "/var/lib/ksf/store";
    assert!(file.contains(&format!("data = \"{data}\"")), "{file}");
    let ask = |server: &Server, line: &[u8], reply: &[u8]| {
        stream::ask(&mut stream::connect(server.address(" tcp ")), line, reply);
    };
    let server = sandbox.start(UNIT, &file);
    ask(&server, b"SET a b\r\n", b"+OK\r\n");
    assert_eq!(server.stat()["services"][0]["name"], "store");
    assert_eq!(sandbox.mode("state/store/superblock"), 0o600);
    server.stop();
    let server = sandbox.start(UNIT, &file);
    ask(&server, b"GET a\r\n", b"$1\r\nb\r\n");
    server.stop();

    let elsewhere = file.replace(data, "/var/lib/elsewhere");
    let output = sandbox.serve(UNIT, &elsewhere).output().unwrap();
    assert_eq!(output.status.code(), Some(77), "{}", stderr(&output));
    assert!(stderr(&output).contains("ReadWritePaths="), "{}", stderr(&output));
}

/// Starts a file server of the shipped file with the export of the sandbox, in the unit for it.
fn start_file_server(sandbox: &Sandbox, kind: &str) -> Server {
    let exports = format!("exports = [\"{},squash=none\"]", sandbox.export.display());
    let shipped = shipped(kind);
    let key = |key: &str| if key.starts_with("exports") { exports.clone() } else { key.to_owned() };
    let file = shipped.lines().map(key).collect::<Vec<_>>().join("\n");
    let server = sandbox.start(&unit_with_nfs(), &file);
    // As callers, who are nobody here, and with handles that outlive it.
    assert!(!server.seen().iter().any(|line| line.contains("as the user of this process")), "{:?}", server.seen());
    assert!(!server.seen().iter().any(|line| line.contains("handles=")), "{:?}", server.seen());
    server
}

#[test]
fn shipped_nfs_server_runs_in_the_sandbox_of_the_unit_for_it() {
    let Some(sandbox) = Sandbox::new_or_skip() else { return };
    let export = &sandbox.export;
    let server = start_file_server(&sandbox, "nfs");
    let calls = Calls(server.address(" tcp "));
    let root = calls.mount(export.to_str().unwrap());
    let made = calls.create(&root, "made");
    calls.write(&made, 0, 2, b"12345");
    assert_eq!(fs::read(export.join("made")).unwrap(), b"12345");
    assert_eq!(fs::metadata(export.join("made")).unwrap().uid(), 65_534);
    assert_eq!(sandbox.mode("state/nfs"), 0o700);
    server.stop();
}

#[test]
fn shipped_9p_server_runs_in_the_sandbox_of_the_unit_for_it() {
    let Some(sandbox) = Sandbox::new_or_skip() else { return };
    let server = start_file_server(&sandbox, "9p");
    let mut client = ninep::Client::attached(&server);
    client.create("made").unwrap();
    client.write_synced(0, b"12345").unwrap();
    assert_eq!(fs::read(sandbox.export.join("made")).unwrap(), b"12345");
    assert_eq!(fs::metadata(sandbox.export.join("made")).unwrap().uid(), 0);
    assert_eq!(sandbox.mode("state/9p"), 0o700);
    assert!(sandbox.folder.path("runtime/9p").exists(), "the socket is elsewhere");
    server.stop();
}

/// Installs unit and file where nothing is hidden from the service, with all services of the file. systemd makes folders in
/// /tmp and /var/tmp, so these are new; /etc is read-only here.
const PREPARE: &str = r#"
mount -t tmpfs none /var/lib
mount -t tmpfs none /srv
mkdir -m 777 /srv/data /srv/pub
mkdir /run/shipped /run/folder
mount --bind "$FOLDER" /run/folder
cp "$KSF" "$FOLDER/ksf.toml" /run/shipped/
sed 's,^ExecStart=.*,ExecStart=/run/shipped/ksf serve /run/shipped/ksf.toml,' "$FOLDER/unit" > /run/systemd/system/ksf.service
cat > /run/systemd/system/ksf.service.d/test.conf <<END
[Unit]
DefaultDependencies=no
[Service]
ConfigurationDirectory=
StandardError=append:/run/shipped/said
END
mount -t tmpfs -o mode=1777 none /tmp
mount -t tmpfs -o mode=1777 none /var/tmp
mkdir -p "$FOLDER"
mount --bind /run/folder "$FOLDER"
"#;

const PROBE: &str = r#"
set -exE
cd "$FOLDER"
KSF=/run/shipped/ksf
trap 'cat /run/shipped/said || true; systemctl status ksf || true; touch failed' ERR
ask() {
    exec 3<> /dev/tcp/127.0.0.1/6379
    printf '%s\r\n' "$1" >&3
    read -r -t 60 reply <&3
    [ "$reply" = "$2"$'\r' ]
}
ask 'SET a b' +OK
touch /run/ksf/other
systemctl reload ksf
systemctl restart ksf
ask 'GET a' '$1'
"$KSF" stat > counters
"$KSF" load nfs -c 200 nfs://127.0.0.1/srv/data > load
systemctl stop ksf
systemctl show -P Result ksf > result
test -e /run/ksf/other
stat -c '%a %n' /var/lib/ksf /run/ksf > left
cp /run/shipped/said lines
touch done
"#;

#[test]
#[ignore = "soak: boots systemd"]
fn shipped_unit_and_file_are_run_by_systemd() {
    let Some(()) = ksf_test::root_or_skip("namespaces") else { return };
    if !Path::new("/lib/systemd/systemd").is_file() {
        return ksf_test::skip("needs systemd");
    }
    let Some(hierarchy) = cgroup2() else { return ksf_test::skip("needs cgroup2") };
    let file = FILE.to_owned() + &shipped("store").replace("\"1g\"", "\"8m\"") + &shipped("nfs");
    let quoted = |text: &str| format!("cat > \"$FOLDER/{{}}\" <<'END OF FILE'\n{text}\nEND OF FILE\n");
    let prepare =
        quoted(&file).replacen("{}", "ksf.toml", 1) + &quoted(&unit_with_nfs()).replacen("{}", "unit", 1) + PREPARE;
    let folder = probed("ksf.service", &prepare, PROBE, &hierarchy);
    let read = |name: &str| fs::read_to_string(folder.path(name)).unwrap_or_default();
    let lines = read("lines");
    assert_eq!(read("result"), "success\n", "{lines}");
    assert_eq!(read("left"), "700 /var/lib/ksf\n755 /run/ksf\n", "{lines}");
    for part in ["echo tcp 127.0.0.1:60007 engine=kernel", "store tcp ", "nfs tcp ", "limits reloaded"] {
        assert!(lines.contains(part), "no {part} in {lines}");
    }
    assert!(!lines.contains("as the user of this process") && !lines.contains("handles="), "{lines}");
}

#[test]
fn busy_port_is_found_before_a_store_is_made() {
    let folder = Folder::new();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let data = folder.path("store");
    let listen = taken.local_addr().unwrap().to_string();
    let output = ksf().args(["store", "--listen", &listen, "--data"]).arg(&data).output().unwrap();
    assert_eq!(output.status.code(), Some(69), "{}{}", stdout(&output), stderr(&output));
    assert!(stderr(&output).contains(&listen) && !Path::new(&data).exists(), "{}", stderr(&output));
}
