//! Programs nobody changed, joined: nginx, HAProxy and redis, beside `ksf accel hop attach` and under `ksf accel run --hop`.
//! Needs root; each test has a network namespace and a /run of its own.

mod support;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Output, Stdio};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::Signal;
use serde_json::Value;
use support::hop::Attached;
use support::{Folder, PATIENCE, Server, built_folder, ksf, private_network_and_run, run, stderr, stdout, until};

/// A server, killed when dropped.
struct Program(Child);

impl Program {
    /// Starts it, and waits until somebody listens there.
    fn start(mut command: Command, address: &str) -> Self {
        command.stdin(Stdio::null());
        // SAFETY: one system call between fork and exec: it ends with the thread that started it.
        unsafe { command.pre_exec(|| Ok(rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?)) };
        let mut program = Self(command.spawn().expect("the program starts"));
        until("the program serves", || {
            assert_eq!(program.0.try_wait().unwrap(), None, "it ended");
            TcpStream::connect(address).is_ok()
        });
        program
    }

    /// A proxy at port 8080 and its backend at 8081. In one process nginx drops no rights, so it may read the folder.
    fn nginx(mut command: Command, folder: &Folder) -> Self {
        let config = "daemon off; master_process off; pid nginx.pid; error_log stderr crit;\n\
            events {}\n\
            http {\n\
              access_log off; sendfile on; client_body_temp_path body; proxy_temp_path proxy; fastcgi_temp_path f;\n\
              uwsgi_temp_path u; scgi_temp_path s; proxy_max_temp_file_size 0;\n\
              upstream backend { server 127.0.0.1:8081; keepalive 8; }\n\
              server { listen 127.0.0.1:8081; root files; keepalive_requests 100000; }\n\
              server { listen 127.0.0.1:8080; location / { proxy_pass http://backend; proxy_http_version 1.1;\n\
                       proxy_set_header Connection ''; } }\n\
            }\n";
        let config = folder.write("nginx.conf", config);
        command.args(["-e", "stderr", "-p"]).arg(folder.path("")).arg("-c").arg(config);
        Self::start(command, "127.0.0.1:8080")
    }

    fn redis(mut command: Command, folder: &Folder) -> Self {
        command.args(["--save", "", "--bind", "127.0.0.1", "--dir"]).arg(folder.path("")).stdout(Stdio::null());
        Self::start(command, "127.0.0.1:6379")
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// `ksf accel run FLAGS -- NAME`, of the build.
fn accel_run(flags: &[&str], name: &str) -> Command {
    let mut command = ksf();
    command.args(["accel", "run"]).args(flags).args(["--", name]);
    command.env("KSF_LIB_DIR", built_folder());
    command
}

/// What the holder of the only accelerated program says of its companion.
fn companion() -> Value {
    let output = run(&["accel", "status", "--json"]);
    let document: Value = serde_json::from_str(&stdout(&output)).unwrap_or_else(|_| panic!("{}", stderr(&output)));
    document["programs"][0]["companion"].clone()
}

fn fails(output: &Output, status: i32, part: &str) {
    let said = stderr(output);
    assert_eq!(output.status.code(), Some(status), "{said}");
    assert!(said.contains(part), "{said}");
    assert_eq!(said.lines().count(), 1, "{said}");
}

/// Files that are larger, and smaller, than any buffer.
fn files(folder: &Folder) -> Vec<u8> {
    std::fs::create_dir(folder.path("files")).unwrap();
    let large: Vec<u8> = (0..3_000_000u32).map(|place| (place ^ place >> 8 ^ place >> 16) as u8).collect();
    std::fs::write(folder.path("files/large"), &large).unwrap();
    folder.write("files/small", "small");
    large
}

/// Clients of the proxy get both files, whole.
fn files_are_whole(large: &[u8]) {
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let mut stream = client("127.0.0.1:8080");
                for _ in 0..20 {
                    assert_eq!(get(&mut stream, "small"), b"small");
                    assert!(get(&mut stream, "large") == large);
                }
            });
        }
    });
}

/// A proxy and its backend, both unchanged, with files larger than any buffer between them.
#[test]
fn nginx_in_front_of_nginx_loses_nothing() {
    if !private_network_and_run() {
        return;
    }
    let folder = Folder::new();
    let large = files(&folder);
    // nginx asks by FIONREAD: where that does not count all it is not joined, and works. (Joined, it would stall.)
    let output = run(&["accel", "hop", "check", "--no-splice"]);
    let attached = output.status.success().then(|| Attached::start_careful(&["--port", "8081", "--json"]));
    if attached.is_none() {
        fails(&output, 69, "FIONREAD");
        fails(&run(&["accel", "hop", "attach", "--no-splice", "--port", "8081"]), 69, "FIONREAD");
    }
    let nginx = Program::nginx(Command::new("nginx"), &folder);
    files_are_whole(&large);
    if let Some(attached) = attached {
        let json: Value = serde_json::from_str(&attached.interrupt()).unwrap();
        assert!(json["counters"]["messages"].as_u64().unwrap() > 20, "{json}");
    }
    drop(nginx);
}

/// The same under `ksf accel run`: what cannot be joined is told in a line, and the program runs.
#[test]
fn a_program_whose_connections_cannot_be_joined_is_run_and_told_why() {
    if !private_network_and_run() {
        return;
    }
    let folder = Folder::new();
    let large = files(&folder);
    let said = folder.path("said");
    let mut command = accel_run(&["--hop", "8081", "--hop-no-splice"], "nginx");
    command.stderr(std::fs::File::create(&said).unwrap());
    let nginx = Program::nginx(command, &folder);
    files_are_whole(&large);
    let said = std::fs::read_to_string(said).unwrap();
    let companion = companion();
    if run(&["accel", "hop", "check", "--no-splice"]).status.success() {
        assert!(said.contains("joining connections of ports 8081"), "{said}");
        assert!(companion["counters"]["messages"].as_u64().unwrap() > 20, "{companion}");
    } else {
        assert_eq!(said.lines().count(), 1, "{said}");
        assert!(said.contains("connections of ports 8081 go by TCP: ") && said.contains("FIONREAD"), "{said}");
        assert!(said.contains(companion["said"].as_str().unwrap()), "{companion}");
        assert_eq!(companion["counters"], serde_json::json!({}));
    }
    drop(nginx);
}

/// Redis does not ask by FIONREAD, and is joined: values of all sizes, from clients that ask one after the other.
#[test]
fn redis_answers_joined_clients() {
    if !private_network_and_run() {
        return;
    }
    let folder = Folder::new();
    let attached = Attached::start(&["--port", "6379", "--json"]);
    let redis = Program::redis(Command::new("redis-server"), &folder);
    values_come_back("127.0.0.1:6379");
    let json: Value = serde_json::from_str(&attached.interrupt()).unwrap();
    assert!(json["counters"]["messages"].as_u64().unwrap() > 500, "{json}");
    drop(redis);
}

/// One command for program and hop; both end together, however the program ends.
#[test]
fn a_program_is_run_with_its_connections_joined() {
    if !private_network_and_run() {
        return;
    }
    let folder = Folder::new();
    let said = folder.path("said");
    let mut command = accel_run(&["--hop", "6379", "--hop-no-splice", "--hop-no-fionread"], "redis-server");
    command.stderr(std::fs::File::create(&said).unwrap());
    let redis = Program::redis(command, &folder);
    let said = std::fs::read_to_string(said).unwrap();
    let lines: Vec<&str> = said.lines().collect();
    assert!(lines[0].contains("joining connections of ports 6379; nobody looks for splice()"), "{said}");
    assert!(lines[1].contains("redis-server has no queues: one thread of redis"), "{said}");
    assert_eq!(lines.len(), 2, "{said}");
    values_come_back("127.0.0.1:6379");
    let companion = companion();
    assert!(companion["counters"]["messages"].as_u64().unwrap() > 500, "{companion}");
    let text = stdout(&run(&["accel", "status"]));
    assert!(text.contains("joining connections of ports 6379") && text.contains("messages "), "{text}");
    // SIGKILL.
    drop(redis);
    until("the hop ends", || stdout(&run(&["accel", "status"])) == "no program is accelerated\n");
}

#[test]
fn a_program_without_a_holder_is_told_what_joins_its_connections() {
    if !private_network_and_run() {
        return;
    }
    let folder = Folder::new();
    let source = folder.write("main.c", "int main(void) { return 5; }");
    let program = folder.path("static");
    assert!(Command::new("cc").args(["-static", "-o"]).arg(&program).arg(source).status().unwrap().success());
    let output = accel_run(&["--hop", "6379"], program.to_str().unwrap()).output().unwrap();
    fails(&output, 5, "its connections are not joined: ksf accel hop attach does that");
}

/// HAProxy as people have it in front of their backends: streams of bytes to one, requests to others.
#[test]
fn haproxy_in_front_of_joined_backends_loses_nothing() {
    const HAPROXY: &str = "global\n\
        \x20 maxconn 500\n\
        defaults\n\
        \x20 timeout connect 60s\n\
        \x20 timeout client 60s\n\
        \x20 timeout server 60s\n\
        listen streams\n\
        \x20 mode tcp\n\
        \x20 bind 127.0.0.1:8000\n\
        \x20 server redis 127.0.0.1:6379\n\
        listen requests\n\
        \x20 mode http\n\
        \x20 http-reuse always\n\
        \x20 bind 127.0.0.1:8001\n\
        \x20 server pages 127.0.0.1:8081\n\
        \x20 server long 127.0.0.1:8082\n";
    if !private_network_and_run() {
        return;
    }
    let folder = Folder::new();
    let page = |port: &str, bytes: &str| {
        Server::start(&["serve", "demo", "-k", "-a", &format!("127.0.0.1:{port}"), "--body-bytes", bytes], 1)
    };
    let pages = [page("8081", "20000"), page("8082", "300000")];
    let redis = Program::redis(Command::new("redis-server"), &folder);
    let attached = Attached::start(&["--port", "6379,8081,8082", "--json"]);
    let mut command = Command::new("haproxy");
    command.args(["-db", "-f"]).arg(folder.write("haproxy.cfg", HAPROXY));
    let haproxy = Program::start(command, "127.0.0.1:8001");
    values_come_back("127.0.0.1:8000");
    // Asked without HAProxy.
    let direct = ["127.0.0.1:8081", "127.0.0.1:8082"].map(|address| get(&mut client(address), ""));
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let mut stream = client("127.0.0.1:8001");
                // HAProxy takes the backends in turn, over all its clients.
                for _ in 0..200 {
                    let body = get(&mut stream, "");
                    assert!(direct.contains(&body), "a page of {} bytes", body.len());
                }
            });
        }
    });
    let json: Value = serde_json::from_str(&attached.interrupt()).unwrap();
    let counted = |name: &str| json["counters"][name].as_u64().unwrap();
    assert!(counted("messages") > 1000 && counted("joined") > 8, "{json}");
    // Nobody was read by splice(): Debian's HAProxy does so only where its configuration says so.
    assert_eq!((counted("refused"), counted("stuck")), (0, 0), "{json}");
    drop((haproxy, redis, pages));
}

fn client(address: &str) -> BufReader<TcpStream> {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    BufReader::new(stream)
}

/// Clients of redis, which may be behind something: what they have set is what they get.
fn values_come_back(address: &str) {
    let talk = |seed: usize| {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.set_nonblocking(true).unwrap();
        for round in 0..150 {
            let size = 1 + (round * round * 37 + seed) % if round % 10 == 0 { 400_000 } else { 9000 };
            let value: Vec<u8> = (0..size).map(|place| (place ^ place >> 8 ^ seed) as u8).collect();
            let mut request = format!("*3\r\n$3\r\nSET\r\n$1\r\n{}\r\n${size}\r\n", seed % 10).into_bytes();
            request.extend_from_slice(&value);
            request.extend_from_slice(b"\r\n");
            assert_eq!(ask(&mut stream, &request, 5), b"+OK\r\n");
            let mut reply = format!("${size}\r\n").into_bytes();
            reply.extend_from_slice(&value);
            reply.extend_from_slice(b"\r\n");
            let get = format!("*2\r\n$3\r\nGET\r\n$1\r\n{}\r\n", seed % 10);
            assert!(ask(&mut stream, get.as_bytes(), reply.len()) == reply, "round {round}, {size} bytes");
        }
    };
    let talk = &talk;
    std::thread::scope(|scope| (0..4).for_each(|seed| drop(scope.spawn(move || talk(seed)))));
}

/// A file, over a connection that goes on.
fn get(stream: &mut BufReader<TcpStream>, name: &str) -> Vec<u8> {
    write!(stream.get_mut(), "GET /{name} HTTP/1.1\r\nHost: test\r\n\r\n").unwrap();
    let mut length = 0;
    let mut line = String::new();
    while line != "\r\n" {
        line.clear();
        assert!(stream.read_line(&mut line).unwrap() > 0, "the connection ends");
        if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
            length = value.trim().parse().unwrap();
        }
    }
    let mut body = vec![0; length];
    stream.read_exact(&mut body).unwrap();
    body
}

/// Writes all of a request, and reads as many bytes.
fn ask(stream: &mut TcpStream, mut request: &[u8], size: usize) -> Vec<u8> {
    let mut reply = vec![0; size];
    let mut filled = 0;
    while !request.is_empty() || filled < size {
        let done = match request.is_empty() {
            false => stream.write(request).map(|bytes| request = &request[bytes..]),
            true => stream.read(&mut reply[filled..]).map(|bytes| {
                assert!(bytes > 0, "the connection ends");
                filled += bytes;
            }),
        };
        let what = if request.is_empty() { PollFlags::IN } else { PollFlags::OUT };
        match done {
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                let patience = rustix::event::Timespec { tv_sec: PATIENCE.as_secs() as i64, tv_nsec: 0 };
                assert_eq!(poll(&mut [PollFd::new(stream, what)], Some(&patience)), Ok(1), "nothing comes");
            }
            done => done.unwrap(),
        }
    }
    reply
}
