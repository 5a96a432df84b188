//! A service under `ksf accel run`, started by a systemd that runs: Debian's nginx with the drop-in of `ksf accel unit`.
//! systemd is the first process of namespaces of its own (processes, mounts, network, cgroups), and ends with them.

use std::fs;
use std::io::Write as _;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::support::{Folder, built_folder, skip, wait_until};
use ksf_test::{Running, is_alive, root_or_skip};
use rustix::process::Signal;
use serde_json::Value;

/// All steps together, on a machine that is very busy.
const LIMIT: Duration = Duration::from_secs(120);

/// Prepares the namespaces and becomes systemd. `FOLDER` is where the test looks, `KSF` the program; `prepare` makes the unit
/// `SERVICE`.
const BEGIN: &str = r#"
set -e
mount --make-rprivate /
# systemd raises limits of the whole machine (fs.file-max) where it can, and may write files: here it can do neither.
mount -t proc proc /proc
mount --bind -o ro /proc/sys /proc/sys
mount -o remount,bind,ro /proc/sys
mount --bind "$FOLDER" "$FOLDER"
mount -o remount,bind,ro /
umount -R /sys/fs/cgroup || true
mount -t cgroup2 none /sys/fs/cgroup
mount -t tmpfs none /run
mount -t tmpfs none /var/log
mkdir -p /run/lock /run/systemd/system/$SERVICE.d
ip link set lo up
. "$FOLDER/prepare"
cat > /run/systemd/system/probe.service <<END
[Unit]
DefaultDependencies=no
Wants=$SERVICE
After=$SERVICE
[Service]
Type=oneshot
Environment=KSF=$KSF FOLDER=$FOLDER
ExecStart=/bin/bash $FOLDER/probe
StandardOutput=file:$FOLDER/said
StandardError=inherit
END
cat > /run/systemd/system/test.target <<END
[Unit]
DefaultDependencies=no
Wants=probe.service
END
export container=lxc
exec /lib/systemd/systemd --system --unit=test.target --log-target=null
"#;

const PREPARE_NGINX: &str = r#"
mount -t tmpfs none /var/lib/nginx
mount -t tmpfs none /etc/nginx/sites-enabled
mkdir /var/log/nginx
echo 'server { listen 127.0.0.1:80; location / { return 200 served; } }' > /etc/nginx/sites-enabled/test
"$KSF" accel unit nginx.service > /run/systemd/system/nginx.service.d/ksf-accel.conf
cat > /run/systemd/system/nginx.service.d/test.conf <<END
[Unit]
DefaultDependencies=no
[Service]
Environment=KSF_LIB_DIR=$KSF_LIB_DIR
END
"#;

/// What is done with the service. Each step leaves a file; `done` is the last.
const PROBE: &str = r#"
set -exE
cd "$FOLDER"
trap 'touch failed' ERR
serves() { "$KSF" load http -c 50 -n 2 -r 1 --expect-bytes 6 http://127.0.0.1/ > "$1"; }
is_accelerated() {
    for _ in $(seq 600); do
        "$KSF" accel status --json > "$1"
        grep -q '"ready":\["' "$1" && return
        sleep 0.1
    done
    return 1
}
processes() { cat /sys/fs/cgroup/system.slice/nginx.service/cgroup.procs 2> /dev/null | sed 's#.*#/proc/&/comm#' | xargs -r cat | sort -u; }
main() { systemctl show -P MainPID nginx; }

is_accelerated begun
main > main
processes > processes
serves served
"$KSF" accel status --json > counted
"$KSF" accel pause "$(main)"
"$KSF" accel resume "$(main)"
systemctl reload nginx
serves served_after_reload
[ "$(main)" = "$(cat main)" ]

kill -9 "$(main)"
while systemctl is-active --quiet nginx; do sleep 0.1; done
systemctl show -P Result nginx > result_of_kill
systemctl restart nginx
ls /run/ksf/accel > sockets
is_accelerated again
serves served_after_restart
systemctl stop nginx
systemctl show -P ActiveState nginx > stopped
systemctl show -P Result nginx >> stopped
while [ -n "$(processes)" ]; do sleep 0.1; done
"$KSF" accel status > left
ls -A /run/ksf/accel >> left
touch done
"#;

/// systemd with all that it has started; killed when dropped, with its cgroup.
struct Systemd {
    program: Running,
    cgroup: PathBuf,
}

impl Systemd {
    fn boot(folder: &Folder, hierarchy: &Path, service: &str) -> Self {
        let cgroup = hierarchy.join(format!("ksf-test-{}-{service}", std::process::id()));
        fs::create_dir(&cgroup).expect("root may make a cgroup");
        let mut entrance = fs::OpenOptions::new().write(true).open(cgroup.join("cgroup.procs")).unwrap();
        let mut command = Command::new("unshare");
        command.args([
            "--pid",
            "--fork",
            "--kill-child",
            "--mount",
            "--net",
            "--uts",
            "--ipc",
            "--cgroup",
            "bash",
            "-c",
        ]);
        command.arg(BEGIN).env("FOLDER", folder.path("")).env("KSF", env!("CARGO_BIN_EXE_ksf"));
        command.env("KSF_LIB_DIR", built_folder()).env("SERVICE", service);
        command.env_remove("LD_PRELOAD").env_remove("NOTIFY_SOCKET").stdin(Stdio::null());
        command.stdout(Stdio::null()).stderr(fs::File::create(folder.path("begun-badly")).unwrap());
        // SAFETY: one write between fork and exec; the descriptor is open and closes with exec.
        unsafe { command.pre_exec(move || entrance.write_all(b"0")) };
        Self { program: Running::start(&mut command), cgroup }
    }

    fn has_ended(&mut self) -> bool {
        !is_alive(self.program.pid())
    }
}

impl Drop for Systemd {
    fn drop(&mut self) {
        self.program.signal(Signal::KILL);
        self.program.wait();
        let _ = fs::write(self.cgroup.join("cgroup.kill"), "1");
        wait_until("its cgroups are gone", || remove(&self.cgroup));
    }
}

/// A cgroup with those below it. False: there are processes.
fn remove(cgroup: &Path) -> bool {
    for entry in fs::read_dir(cgroup).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) && !remove(&entry.path()) {
            return false;
        }
    }
    fs::remove_dir(cgroup).is_ok()
}

/// Where cgroup2 is mounted whole.
pub(crate) fn cgroup2() -> Option<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    mounts.lines().find_map(|line| {
        let (mount, kind) = line.split_once(" - ")?;
        let mut words = mount.split_ascii_whitespace().skip(3);
        let (root, point) = (words.next()?, words.next()?);
        (kind.starts_with("cgroup2 ") && root == "/").then(|| point.into())
    })
}

/// Boots systemd with a service and runs `probe`, which must come to its end; the folder that it wrote to.
pub(crate) fn probed(service: &str, prepare: &str, probe: &str, hierarchy: &Path) -> Folder {
    let folder = Folder::new();
    folder.write("prepare", prepare);
    folder.write("probe", probe);
    let read = |name: &str| fs::read_to_string(folder.path(name)).unwrap_or_default();
    let mut systemd = Systemd::boot(&folder, hierarchy, service);
    let deadline = Instant::now() + LIMIT;
    while !folder.path("done").exists() && !folder.path("failed").exists() {
        assert!(!systemd.has_ended(), "systemd did not start: {}", read("begun-badly"));
        assert!(Instant::now() < deadline, "it takes too long: {}", read("said"));
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(folder.path("done").exists(), "{}", read("said"));
    drop(systemd);
    folder
}

#[test]
#[ignore = "soak: boots systemd"]
fn a_service_is_started_reloaded_and_ended_by_systemd_as_without_ksf() {
    let Some(()) = root_or_skip("namespaces") else { return };
    if !["/lib/systemd/systemd", "/lib/systemd/system/nginx.service"].iter().all(|file| Path::new(file).is_file()) {
        return skip("needs systemd and nginx");
    }
    let Some(hierarchy) = cgroup2() else { return skip("needs cgroup2") };
    let limit = || fs::read_to_string("/proc/sys/fs/file-max").unwrap();
    let limit_before = limit();
    let folder = probed("nginx.service", PREPARE_NGINX, PROBE, &hierarchy);
    let read = |name: &str| fs::read_to_string(folder.path(name)).unwrap_or_default();
    let said = read("said");

    // The main process is nginx's own, and the holder is of the service, too.
    assert_eq!(read("processes"), "ksf-accel\nnginx\n", "{said}");
    let counted: Value = serde_json::from_str(&read("counted")).expect("JSON");
    let program = &counted["programs"][0];
    let accepted: u64 =
        program["workers"].as_array().unwrap().iter().map(|it| it["counters"]["accepted_own"].as_u64().unwrap()).sum();
    assert!(program["level"] == "sk_lookup" && accepted > 0, "{counted:#}");
    // As without ksf: the service has failed if its main process is killed, and comes again.
    assert_eq!((read("result_of_kill"), read("stopped")), ("signal\n".into(), "inactive\nsuccess\n".into()), "{said}");
    // systemd has killed the holder with the rest of the service: the next one has cleared up.
    assert_eq!(read("sockets").lines().count(), 1, "{}", read("sockets"));
    assert_eq!(read("left"), "no program is accelerated\n");
    assert_eq!(limit(), limit_before, "the machine is as it was");
}
