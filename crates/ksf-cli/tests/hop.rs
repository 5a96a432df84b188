//! `ksf accel hop`, as a user runs it: connections of a network namespace of the test's own.

mod support;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, ChildStderr, Output, Stdio};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, Signal, kill_process};
use support::{Folder, PATIENCE, ksf, ksf_for_all, private_network, run, stderr, stdout};

/// `ksf accel hop attach ARGS` that has begun; killed when dropped.
struct Attached {
    child: Child,
    errors: BufReader<ChildStderr>,
    said: String,
}

impl Attached {
    fn start(args: &[&str]) -> Self {
        Self::start_careful(&[&["--no-fionread"], args].concat())
    }

    fn start_careful(args: &[&str]) -> Self {
        let mut command = ksf();
        command.args(["accel", "hop", "attach", "--no-splice"]).args(args);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("ksf starts");
        let errors = BufReader::new(child.stderr.take().unwrap());
        let mut attached = Self { child, errors, said: String::new() };
        while !attached.said.contains("joining connections ") {
            let bytes = attached.errors.read_line(&mut attached.said).unwrap();
            assert!(bytes > 0, "it ended: {}", attached.said);
        }
        attached
    }

    /// Interrupts it as Ctrl-C does; what it printed.
    fn interrupt(mut self) -> String {
        kill_process(Pid::from_child(&self.child), Signal::INT).unwrap();
        let mut out = String::new();
        self.child.stdout.take().unwrap().read_to_string(&mut out).unwrap();
        assert_eq!(self.child.wait().unwrap().code(), Some(0), "{}", self.said);
        out
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn fails(output: &Output, status: i32, part: &str) {
    let said = stderr(output);
    assert_eq!(output.status.code(), Some(status), "{said}");
    assert!(said.contains(part), "{said}");
    assert_eq!(said.lines().count(), 1, "{said}");
}

/// As many exchanges of a message in each direction.
fn talk(listener: &TcpListener, exchanges: usize) {
    let mut ends = [TcpStream::connect(listener.local_addr().unwrap()).unwrap(), listener.accept().unwrap().0];
    for end in &ends {
        end.set_nonblocking(true).unwrap();
    }
    for number in 0..2 * exchanges {
        let message = format!("message {number}");
        let [one, other] = &mut ends;
        let (from, to) = if number % 2 == 0 { (one, other) } else { (other, one) };
        from.write_all(message.as_bytes()).unwrap();
        poll(&mut [PollFd::new(to, PollFlags::IN)], None).unwrap();
        let mut bytes = [0; 100];
        let count = to.read(&mut bytes).unwrap();
        assert_eq!(&bytes[..count], message.as_bytes());
    }
}

#[test]
fn connections_of_a_port_are_joined_until_interrupted() {
    if !private_network() {
        return;
    }
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port().to_string();
    let attached = Attached::start(&["--port", &format!("1,{port}"), "--json"]);
    assert!(attached.said.contains(&format!("of ports 1, {port}")), "{}", attached.said);
    talk(&listener, 10);
    talk(&TcpListener::bind("127.0.0.1:0").unwrap(), 10);
    let json: serde_json::Value = serde_json::from_str(&attached.interrupt()).unwrap();
    assert_eq!(json["schema"], "ksf-hop/1");
    let counters = &json["counters"];
    assert_eq!((&counters["watched"], &counters["joined"]), (&2.into(), &2.into()), "{json}");
    // The first of each direction went by TCP.
    assert_eq!((&counters["messages"], &counters["tcp_young"]), (&18.into(), &2.into()), "{json}");
    talk(&listener, 3);
    let text = Attached::start(&["--port", &port, "--warm-up", "5"]).interrupt();
    assert_eq!(text, "no connection was seen\n");
}

/// A server, killed when dropped.
struct Program(Child);

impl Program {
    fn nginx(folder: &Folder) -> Self {
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
        let folder = folder.path("").display().to_string();
        let mut nginx = std::process::Command::new("nginx");
        nginx.args(["-e", "stderr", "-p", &folder, "-c"]).arg(config).stdin(Stdio::null());
        // SAFETY: one system call between fork and exec: nginx ends with the thread that started it.
        unsafe {
            std::os::unix::process::CommandExt::pre_exec(&mut nginx, || {
                Ok(rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?)
            })
        };
        let nginx = Self(nginx.spawn().expect("nginx starts"));
        support::until("nginx serves", || TcpStream::connect("127.0.0.1:8080").is_ok());
        nginx
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
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

/// A proxy and its backend, both unchanged, with files larger than any buffer between them.
#[test]
fn nginx_in_front_of_nginx_loses_nothing() {
    if !private_network() {
        return;
    }
    let folder = Folder::new();
    std::fs::create_dir(folder.path("files")).unwrap();
    let large: Vec<u8> = (0..3_000_000u32).map(|place| (place ^ place >> 8 ^ place >> 16) as u8).collect();
    std::fs::write(folder.path("files/large"), &large).unwrap();
    folder.write("files/small", "small");
    // nginx asks by FIONREAD: where that does not count all it is not joined, and works. (Joined, it would stall.)
    let output = run(&["accel", "hop", "check", "--no-splice"]);
    let attached = output.status.success().then(|| Attached::start_careful(&["--port", "8081", "--json"]));
    if attached.is_none() {
        fails(&output, 69, "FIONREAD");
        fails(&run(&["accel", "hop", "attach", "--no-splice", "--port", "8081"]), 69, "FIONREAD");
    }
    // In one process nginx drops no rights, so it may read the folder.
    let nginx = Program::nginx(&folder);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let stream = TcpStream::connect("127.0.0.1:8080").unwrap();
                stream.set_read_timeout(Some(PATIENCE)).unwrap();
                let mut stream = BufReader::new(stream);
                for _ in 0..20 {
                    assert_eq!(get(&mut stream, "small"), b"small");
                    assert!(get(&mut stream, "large") == large);
                }
            });
        }
    });
    if let Some(attached) = attached {
        let json: serde_json::Value = serde_json::from_str(&attached.interrupt()).unwrap();
        assert!(json["counters"]["messages"].as_u64().unwrap() > 20, "{json}");
    }
    drop(nginx);
}

/// Redis does not ask by FIONREAD, and is joined: values of all sizes, from clients that ask one after the other.
#[test]
fn redis_answers_joined_clients() {
    if !private_network() {
        return;
    }
    let folder = Folder::new();
    let attached = Attached::start(&["--port", "6379", "--json"]);
    let mut redis = std::process::Command::new("redis-server");
    redis.args(["--save", "", "--bind", "127.0.0.1", "--dir"]).arg(folder.path(""));
    redis.stdin(Stdio::null()).stdout(Stdio::null());
    // SAFETY: one system call between fork and exec: it ends with the thread that started it.
    unsafe {
        std::os::unix::process::CommandExt::pre_exec(&mut redis, || {
            Ok(rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?)
        })
    };
    let redis = Program(redis.spawn().expect("redis-server starts"));
    support::until("redis serves", || TcpStream::connect("127.0.0.1:6379").is_ok());
    let talk = |seed: usize| {
        let mut stream = TcpStream::connect("127.0.0.1:6379").unwrap();
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
    std::thread::scope(|scope| (0..4).for_each(|seed| drop(scope.spawn(move || talk(seed)))));
    let json: serde_json::Value = serde_json::from_str(&attached.interrupt()).unwrap();
    assert!(json["counters"]["messages"].as_u64().unwrap() > 500, "{json}");
    drop(redis);
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

#[test]
fn a_check_says_whether_this_kernel_can() {
    if !private_network() {
        return;
    }
    let output = run(&["accel", "hop", "check", "--no-splice", "--no-fionread"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(stdout(&output).contains("the self-test passed"), "{}", stdout(&output));
}

#[test]
fn mistakes_are_one_line() {
    if !private_network() {
        return;
    }
    let attach = |args: &[&str]| run(&[&["accel", "hop", "attach", "--no-splice", "--no-fionread"], args].concat());
    fails(&attach(&[]), 64, "--port");
    fails(&attach(&["--cgroup", "/nonexistent"]), 66, "/nonexistent");
    fails(&attach(&["--cgroup", "/tmp"]), 66, "not a folder of cgroup2");
    fails(&attach(&["--port", "0"]), 65, "65535");
    // The self-test decides: here nobody can connect to anybody.
    let output = std::process::Command::new("ip").args(["link", "set", "lo", "down"]).output().unwrap();
    assert!(output.status.success());
    fails(&attach(&["--port", "80"]), 69, "the self-test failed, so nothing is joined: cannot connect on loopback");
}

#[test]
fn without_rights_the_missing_ones_are_named() {
    use std::os::unix::process::CommandExt;
    if !private_network() {
        return;
    }
    let folder = Folder::new();
    let binary = ksf_for_all(&folder);
    let mut command = std::process::Command::new(binary);
    let output = command.args(["accel", "hop", "attach", "--port", "80"]).uid(65534).gid(65534).output().unwrap();
    fails(&output, 77, "CAP_BPF");
}

/// Debian's kernel 6.1 permits tracing, so the guard is tested; but it counts joined bytes no more than others of its time
/// do, and event loops that ask by FIONREAD would wait for ever: there the hop is refused.
#[test]
fn a_kernel_that_does_not_count_joined_bytes_is_refused() {
    let Some(_turn) = ksf_lab::turn() else { return };
    let script = "ksf accel hop check && exit 1\nksf accel hop attach --port 80 && exit 1\nexit 0\n";
    let lab = ksf_lab::Lab::script(script).file(env!("CARGO_BIN_EXE_ksf"), "/bin/ksf");
    let output = lab.run().unwrap().checked().unwrap();
    let refused = output.matches("this kernel does not count the bytes that wait").count();
    assert_eq!(refused, 2, "{output}");
}
