//! Everything but the kernel engine works without root, and ksf says that this one is missing, why, and what it needs.
//! Root runs these tests as nobody, who has no capability.

use std::ffi::OsStr;
use std::fs;
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use crate::ninep;
use crate::support::export::{Calls, Place};
use crate::support::{Folder, Server, engines, ksf_for_all, private_network_and_run, stderr, stdout};
use ksf_test::stream::{ask, connect, read_rest};

const NOBODY: u32 = 65_534;

const REMEDY: &str = "run as root, or: setcap cap_bpf,cap_net_admin,cap_perfmon+ep";

/// A user who has logged in and has no rights.
struct User {
    ksf: PathBuf,
    /// $XDG_RUNTIME_DIR, where the sockets of a user's servers are.
    runtime: PathBuf,
    is_root: bool,
    _folder: Folder,
}

impl User {
    fn new() -> Self {
        let folder = Folder::new();
        let is_root = rustix::process::geteuid().is_root();
        if is_root {
            private_network_and_run().expect("root may");
        }
        let user = User { ksf: ksf_for_all(&folder), runtime: folder.path("run"), is_root, _folder: folder };
        fs::create_dir(&user.runtime).unwrap();
        if is_root {
            chown(&user.runtime, Some(NOBODY), Some(NOBODY)).unwrap();
        }
        user
    }

    fn ksf(&self, args: &[&str]) -> Command {
        let mut command = Command::new(&self.ksf);
        command.args(args).env("XDG_RUNTIME_DIR", &self.runtime).current_dir("/");
        if self.is_root {
            // Changing the user drops every capability.
            command.uid(NOBODY).gid(NOBODY);
        }
        command
    }

    fn runs(&self, args: &[&str]) -> Output {
        let output = self.ksf(args).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{args:?}: {}{}", stdout(&output), stderr(&output));
        output
    }

    /// Starts a server that has its socket for `ksf stat` where it is by default.
    fn starts(&self, args: &[&str], listeners: usize) -> Server {
        let mut server = Server::start_as_is(self.ksf(args), listeners, PathBuf::new(), Folder::new());
        server.stats = self.runtime.join(format!("ksf/{}.sock", server.pid()));
        server
    }
}

#[test]
fn doctor_says_what_is_missing_and_what_works() {
    let user = User::new();
    let text = stdout(&user.runs(&["doctor"]));
    let first = text.lines().next().unwrap();
    assert!(first.contains("(not root)"), "{first}");
    let line_after = |start: &str| {
        let mut lines = text.lines().skip_while(|line| !line.starts_with(start));
        (lines.next().unwrap_or_else(|| panic!("no line `{start}`:\n{text}")), lines.next().unwrap_or_default())
    };
    for engine in ["  kernel  no ", "  xdp     no "] {
        let (why, remedy) = line_after(engine);
        assert!(why.contains("missing CAP_BPF"), "{why}");
        assert!(remedy.contains(REMEDY), "{remedy}");
    }
    line_after("  epoll   yes ");
}

#[test]
fn auto_serves_without_the_kernel_engine_and_says_why() {
    let user = User::new();
    for (service, test) in [("kecho", "echotest"), ("krpc2", "rpctest")] {
        let mut server = user.starts(&[service, "--engine", "auto", "--listen", "127.0.0.1:0"], 2);
        let note = server.line_with("instead of kernel: ");
        assert!(note.contains("CAP_BPF") && note.contains("; to get it: ") && note.contains(REMEDY), "{note}");
        assert!(!server.seen().iter().any(|line| line.contains("engine=kernel")), "{:#?}", server.seen());
        for (transport, options) in [(" tcp ", &["-i1", "-c2000", "-a16"][..]), (" udp ", &["-i1", "-c2000", "-u"])] {
            let address = server.address(transport).to_string();
            let output = user.runs(&[&[test][..], options, &[&address]].concat());
            assert_eq!(stdout(&output).lines().count(), 2, "a header and a line: {}", stdout(&output));
        }
        let text = stdout(&user.runs(&["stat"]));
        assert!(text.starts_with(&format!("pid {},", server.pid())), "{text}");
        let path = server.stats.clone();
        assert!(path.exists());
        server.stop();
        assert!(!path.exists(), "the socket is left behind");
    }
}

#[test]
fn store_and_demo_server_run_as_an_ordinary_user() {
    let user = User::new();
    for engine in engines() {
        let data = user.runtime.join(engine);
        let data = data.to_str().unwrap();
        let args = ["store", "--engine", engine, "--log-bytes", "8m", "--listen", "127.0.0.1:0", "--data", data];
        let server = user.starts(&args, 1);
        ask(&mut connect(server.address(" tcp ")), b"SET key value\r\nGET key\r\n", b"+OK\r\n$5\r\nvalue\r\n");
        server.stop();
        let server = user.starts(&["serve", "demo", "-e", engine, "-a", "127.0.0.1:0"], 1);
        let mut stream = connect(server.address(" tcp "));
        stream.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
        assert!(read_rest(stream).starts_with(b"HTTP/1.1 200 "), "{engine}");
        server.stop();
    }
}

/// Whoever has the user of a server has all of it, and other users have nothing of it but its listeners.
#[test]
fn only_the_user_of_a_server_can_read_or_stop_it() {
    const STRANGER: u32 = 65_533;
    let user = User::new();
    if !user.is_root {
        return ksf_test::skip("needs root: another user than that of the server");
    }
    let data = user.runtime.join("data");
    let data = data.to_str().unwrap();
    let args = ["store", "--engine", "epoll", "--log-bytes", "8m", "--listen", "127.0.0.1:0", "--data", data];
    let mut server = user.starts(&args, 1);
    ask(&mut connect(server.address(" tcp ")), b"SET key in-clear\r\n", b"+OK\r\n");
    let can = |uid: u32, line: &str| {
        let mut command = Command::new("sh");
        command.args(["-c", line]).uid(uid).gid(uid).current_dir("/").stdout(Stdio::null()).stderr(Stdio::null());
        command.status().unwrap().success()
    };
    let pid = server.pid();
    let look = |path: &str| format!("cat {path} > /dev/null");
    let ways = [
        // ksf does not encrypt what is on the disk. The key is in the log of the shard that its connection has come to.
        format!("grep -q in-clear {data}/log-*"),
        look(&format!("{data}/superblock")),
        // This takes the right to trace it (ptrace(2)), as attaching does.
        format!("ls /proc/{pid}/fd"),
        look(&format!("/proc/{pid}/maps")),
        format!("XDG_RUNTIME_DIR={} {} stat {pid}", user.runtime.display(), user.ksf.display()),
        format!("kill -TERM {pid}"),
    ];
    assert!(can(STRANGER, "true"));
    for way in &ways {
        assert!(!can(STRANGER, way), "another user: {way}");
    }
    for way in &ways {
        assert!(can(NOBODY, way), "its user: {way}");
    }
    assert!(server.wait().success());
}

#[test]
fn file_servers_say_that_all_requests_have_their_own_rights() {
    let user = User::new();
    if !user.is_root {
        return ksf_test::skip("needs root: another user than the one that asks");
    }
    const NOTE: &str = "as the user of this process";
    let ends = |server: Server| {
        let lines = server.stop();
        assert_eq!(lines.iter().filter(|line| line.contains(NOTE)).count(), 1, "{lines:#?}");
    };
    let start = |kind: &str, place: &Place| {
        for (path, mode) in [(place.export(), 0o755), (place.0.path("state"), 0o700)] {
            fs::create_dir_all(&path).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            chown(&path, Some(NOBODY), Some(NOBODY)).unwrap();
        }
        let [export, state] = [place.export(), place.0.path("state")].map(|path| path.to_str().unwrap().to_owned());
        let export = format!("{export},squash=none");
        let args = [kind, "--engine", "epoll", "--listen", "tcp:127.0.0.1:0", "--export", &export, "--state", &state];
        let mut server = user.starts(&args, 1);
        server.line_with(NOTE);
        server
    };
    let is_nobodys = |place: &Place| {
        let made = fs::metadata(place.export().join("made")).unwrap();
        assert_eq!((made.uid(), made.gid()), (NOBODY, NOBODY));
    };

    let place = Place::new();
    let server = start("nfs", &place);
    let calls = Calls(server.address(" tcp "));
    let root = calls.mount(place.export().to_str().unwrap());
    let made = calls.create(&root, "made");
    calls.write(&made, 0, 2, b"12345");
    assert_eq!(fs::read(place.export().join("made")).unwrap(), b"12345");
    is_nobodys(&place);
    ends(server);

    let place = Place::new();
    let server = start("9p", &place);
    let mut client = ninep::Client::attached(&server);
    client.create("made").unwrap();
    client.write_synced(0, b"12345").unwrap();
    assert_eq!(fs::read(place.export().join("made")).unwrap(), b"12345");
    is_nobodys(&place);
    ends(server);
}

#[test]
fn server_without_a_folder_for_its_status_socket_says_so() {
    let user = User::new();
    if !user.is_root {
        return ksf_test::skip("needs root: a /run without a folder of this user");
    }
    let mut command = user.ksf(&["kecho", "--engine", "epoll", "--listen", "tcp:127.0.0.1:0"]);
    command.env_remove("XDG_RUNTIME_DIR");
    let mut server = Server::start_as_is(command, 1, PathBuf::new(), Folder::new());
    let line = server.line_with("ksf stat cannot find this process");
    for part in ["/run/ksf: ", "XDG_RUNTIME_DIR is not set", "--stats-socket PATH"] {
        assert!(line.contains(part), "no `{part}` in {line}");
    }
    server.stop();
}

#[test]
fn the_kernel_engine_is_refused_with_the_remedy() {
    let user = User::new();
    for command in ["kecho", "krpc2"] {
        let output = user.ksf(&[command, "--engine", "kernel", "--listen", "127.0.0.1:0"]).output().unwrap();
        let text = stderr(&output);
        assert_eq!(output.status.code(), Some(77), "{text}");
        assert_eq!(text.lines().count(), 1, "{text}");
        for part in ["engine kernel cannot run here", "CAP_BPF", REMEDY, "--engine=auto"] {
            assert!(text.contains(part), "no `{part}` in {text}");
        }
    }
}

/// Its capabilities are those of its namespace.
#[test]
fn root_of_another_user_namespace_has_no_kernel_engine() {
    let user = User::new();
    let in_namespace = |program: &OsStr, args: &[&str]| {
        let mut command = Command::new("unshare");
        command.args(["--user", "--map-root-user"]).arg(program).args(args).current_dir("/");
        if user.is_root {
            command.uid(NOBODY).gid(NOBODY);
        }
        command.output().unwrap()
    };
    if !in_namespace("true".as_ref(), &[]).status.success() {
        return ksf_test::skip("needs user namespaces for ordinary users (user.max_user_namespaces)");
    }
    let output = in_namespace(user.ksf.as_ref(), &["kecho", "--engine", "kernel", "--listen", "127.0.0.1:0"]);
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(77), "{text}");
    assert!(text.contains("engine kernel cannot run here") && text.contains("initial user namespace"), "{text}");
}

#[test]
fn ports_below_1024_take_a_capability() {
    let user = User::new();
    if !user.is_root {
        return ksf_test::skip("needs root: a network in which low ports are for those with the capability");
    }
    fs::write("/proc/sys/net/ipv4/ip_unprivileged_port_start", "1024").unwrap();
    let output = user.ksf(&["kecho", "--engine", "epoll", "--listen", "127.0.0.1:80"]).output().unwrap();
    let text = stderr(&output);
    assert_eq!((output.status.code(), text.lines().count()), (Some(77), 1), "{text}");
    assert!(text.contains("127.0.0.1:80") && text.contains("cap_net_bind_service"), "{text}");
}

#[test]
fn generators_and_tools_of_the_store_run_as_an_ordinary_user() {
    let user = User::new();
    let data = user.runtime.join("data");
    let data = data.to_str().unwrap();
    let args = ["store", "--engine", "epoll", "--log-bytes", "8m", "--listen", "127.0.0.1:0", "--data", data];
    let server = user.starts(&args, 1);
    let address = server.address(" tcp ").to_string();
    user.runs(&["load", "kv", "--keys", "100", "-n", "1000", &address]);
    user.runs(&["store", "backup", &address, user.runtime.join("backup").to_str().unwrap()]);
    let dump = user.runtime.join("dump");
    let dump = dump.to_str().unwrap();
    server.stop();
    user.runs(&["store", "check", data]);
    user.runs(&["store", "dump", data, "--output", dump]);
    let server = user.starts(&args, 1);
    user.runs(&["store", "load", dump, "--to", &server.address(" tcp ").to_string()]);
    server.stop();
}
