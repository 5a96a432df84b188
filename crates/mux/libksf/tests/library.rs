//! libksf as a C program meets it: compiled, linked and run.

use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use ksf_test::stream::{connect, expect};
use ksf_test::{PATIENCE, Running, effort, folder, own_network, repository, run, wait_until};

thread_local! {
    /// The directory with the shared library, made of the archive that cargo built for these tests. Each test has its own:
    /// tests run in processes that start in any order.
    static LIBRARY: PathBuf = {
        let built = std::env::current_exe().unwrap();
        let archives = built.parent().unwrap().read_dir().unwrap().filter_map(|entry| {
            let entry = entry.unwrap();
            let name = entry.file_name().into_string().ok()?;
            let is_ours = name.starts_with("libksf_capi") && name.ends_with(".a");
            is_ours.then(|| (entry.metadata().unwrap().modified().unwrap(), entry.path()))
        });
        let (_, archive) = archives.max().expect("cargo has built the archive");
        let directory = folder();
        run(Command::new("sh").arg(repository().join("scripts/link-libksf.sh")).arg(archive).arg(&directory));
        directory
    };
}

fn library() -> PathBuf {
    LIBRARY.with(PathBuf::clone)
}

/// The program of a C file, compiled.
fn compile(source: &str) -> PathBuf {
    let source = repository().join(source);
    let library = library();
    let program = library.join(source.file_stem().unwrap());
    let flags = ["-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-O1", "-g", "-pthread"];
    run(Command::new("cc").args(flags).arg("-I").arg(repository().join("crates/mux/libksf/include")).arg(source).args(
        [
            "-o".as_ref(),
            program.as_os_str(),
            "-L".as_ref(),
            library.as_os_str(),
            "-lksf".as_ref(),
            // The loader, and programs that ask it what this one needs, find the library.
            "-Wl,-rpath".as_ref(),
            "-Xlinker".as_ref(),
            library.as_os_str(),
        ],
    ));
    program
}

fn program(path: &Path) -> Command {
    let mut command = Command::new(path);
    command.env("LD_LIBRARY_PATH", library());
    command
}

#[test]
fn every_call_does_what_the_header_says() {
    own_network();
    run(&mut program(&compile("crates/mux/libksf/tests/api.c")));
}

/// Without naming a connection: eight clients, four sockets, one message a call and several.
#[test]
fn every_client_gets_its_own_answers() {
    own_network();
    let answers = compile("crates/mux/libksf/tests/answers.c");
    for how in ["each", "many"] {
        assert_eq!(run(program(&answers).arg(how)), "160000 answers\n", "{how}");
    }
}

#[test]
fn the_header_is_c_and_cxx_and_has_the_layout_of_the_library() {
    let sizes = [
        ("struct ksf_options", size_of::<ksf_capi::KsfOptions>()),
        ("struct ksf_event", size_of::<ksf_capi::KsfEvent>()),
        ("struct ksf_stats", size_of::<ksf_capi::KsfStats>()),
    ];
    let checks: String = sizes.map(|(name, size)| format!("CHECK(sizeof({name}) == {size});\n")).concat();
    for (compiler, language, check) in [("cc", "c", "_Static_assert(x, #x)"), ("clang", "c++", "static_assert(x, #x)")]
    {
        let text = format!("#include <ksf.h>\n#define CHECK(x) {check}\n{checks}");
        let file = library().join(format!("layout.{}", language.replace('+', "x")));
        std::fs::write(&file, text).unwrap();
        run(Command::new(compiler)
            .args(["-x", language, "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only", "-I"])
            .arg(repository().join("crates/mux/libksf/include"))
            .arg(file));
    }
}

#[test]
fn nothing_but_the_interface_is_visible() {
    let symbols = run(Command::new("nm").args(["-D", "--defined-only"]).arg(library().join("libksf.so.0")));
    let mut visible: Vec<_> = symbols.lines().filter_map(|line| line.split_whitespace().nth(2)).collect();
    visible.retain(|symbol| *symbol != "KSF_0.1");
    let names: Vec<_> = visible.iter().map(|symbol| symbol.strip_suffix("@@KSF_0.1").expect(symbol)).collect();
    let texts = [
        ("ksf.h", std::fs::read_to_string(repository().join("crates/mux/libksf/include/ksf.h")).unwrap()),
        ("libksf.3", std::fs::read_to_string(repository().join("packaging/man/libksf.3")).unwrap()),
    ];
    for (file, text) in &texts {
        for name in &names {
            assert!(text.contains(&format!("{name}(")), "{file} does not know {name}");
        }
    }
    // What the header promises is there.
    let called = texts[0].1.lines().filter(|line| !line.trim_start().starts_with('*'));
    let promised = called.filter_map(|line| line.split_once('(')?.0.rsplit([' ', '*']).next());
    for name in promised.filter(|name| name.starts_with("ksf_")) {
        assert!(names.contains(&name), "{name} is in the header only");
    }
    let dynamic = run(Command::new("readelf").arg("-d").arg(library().join("libksf.so.0")));
    assert!(dynamic.contains("soname: [libksf.so.0]"), "{dynamic}");
    // Nothing of it loads programs into the kernel.
    assert!(!dynamic.contains("libelf") && !dynamic.contains("libz."), "{dynamic}");
}

#[test]
fn the_examples_talk_to_each_other() {
    own_network();
    let (server, client) = (compile("examples/c/echo_workers.c"), compile("examples/c/spread_client.c"));
    let mut server = Running::start(program(&server).arg("3").stdin(Stdio::piped()).stdout(Stdio::piped()));
    let port = server.out.line();
    let out = run(program(&client).args([&port, "4", "2000"]));
    // Nobody reads slowly, so every connection has its share, to one.
    assert_eq!(out, "2000 replies: 500 500 500 500\n");
    server.end_input();
    assert!(server.wait().success());
}

/// Clients that send and do not read: the program stays below what docs/memory.md states, and others are answered.
#[test]
fn clients_that_do_not_read_take_no_more_memory_than_is_stated() {
    own_network();
    const CONNECTIONS: usize = 1000;
    const MESSAGE_BYTES: usize = 256 << 10;
    const BUDGET_BYTES: usize = 16 << 20;
    // Messages in part, eight that go on at each limit with their replies, slots of three workers, connections.
    const BOUND_BYTES: usize =
        BUDGET_BYTES + 2 * BUDGET_BYTES / 4 + 16 * 2 * MESSAGE_BYTES + 3 * 32 * (64 << 10) + CONNECTIONS * (16 << 10);
    let server = compile("examples/c/echo_workers.c");
    let mut server =
        Running::start(program(&server).args(["3", "0", "16"]).stdin(Stdio::piped()).stdout(Stdio::piped()));
    let address: SocketAddr = format!("127.0.0.1:{}", server.out.line().trim()).parse().unwrap();
    let frame = |body: &[u8]| [&(body.len() as u32).to_be_bytes()[..], body].concat();
    let resident_bytes = || {
        let status = std::fs::read_to_string(format!("/proc/{}/status", server.pid())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() << 10
    };
    let ask = || {
        let begun = Instant::now();
        let mut client = connect(address);
        client.write_all(&frame(b"small")).unwrap();
        expect(&mut client, &frame(b"small"));
        assert!(begun.elapsed() < effort(PATIENCE, Duration::from_secs(1)), "{:?}", begun.elapsed());
    };
    ask();
    let idle_bytes = resident_bytes();
    let look = || {
        let bytes = resident_bytes().saturating_sub(idle_bytes);
        assert!(bytes <= BOUND_BYTES + BOUND_BYTES / 4, "{bytes} bytes of {BOUND_BYTES}");
    };
    let request = frame(&vec![b'x'; MESSAGE_BYTES]).repeat(4);
    let mut peers: Vec<(TcpStream, usize)> = Vec::new();
    for _ in 0..CONNECTIONS {
        let peer = connect(address);
        peer.set_nonblocking(true).unwrap();
        peers.push((peer, 0));
        // The last ones once more, which could send no more before.
        for (peer, sent) in peers.iter_mut().rev().take(8) {
            while let Ok(bytes @ 1..) = peer.write(&request[*sent..]) {
                *sent += bytes;
            }
        }
        look();
    }
    // While what the kernel had taken is worked off, and behind that.
    for _ in 0..32 {
        ask();
        look();
    }
    drop(peers);
    wait_until("their memory is returned", || resident_bytes().saturating_sub(idle_bytes) <= BUDGET_BYTES / 2);
    ask();
    server.end_input();
    assert!(server.wait().success());
}

#[test]
fn pkg_config_finds_it() {
    let template = std::fs::read_to_string(repository().join("packaging/libksf.pc.in")).unwrap();
    let text = template.replace("@PREFIX@", "/opt/ksf").replace("@VERSION@", env!("CARGO_PKG_VERSION"));
    std::fs::write(library().join("libksf.pc"), text).unwrap();
    let ask = |option: &str| run(Command::new("pkg-config").args([option, "libksf"]).env("PKG_CONFIG_PATH", library()));
    assert_eq!(ask("--cflags").trim(), "-I/opt/ksf/include");
    assert_eq!(ask("--libs").trim(), "-L/opt/ksf/lib -lksf");
    assert_eq!(ask("--modversion").trim(), env!("CARGO_PKG_VERSION"));
}
