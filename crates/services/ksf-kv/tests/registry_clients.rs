//! redis-py, node-redis and go-redis as their registries have them, each on one engine, with a password or without. What
//! they ask and check is in the folder `registry`; `scripts/setup.sh test` installs them.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::common::{Serving, engines};
use ksf::engine::EngineKind;
use ksf::limits::Limits;
use ksf_kv::Settings;
use ksf_test::{own_network, program_or_skip};

/// What the client wrote in the repository.
fn source(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/registry").join(name)
}

/// What is installed of a client; `None`: the test is skipped.
fn installed_or_skip(name: &str) -> Option<PathBuf> {
    ksf_test::installed_or_skip(env!("CARGO_TARGET_TMPDIR"), name)
}

/// Runs the client with a port and a password, "" for none, on a server of `engine`, or of epoll where that does not work.
fn passes(mut client: Command, engine: EngineKind, password: &str) {
    own_network();
    let engine = engines().into_iter().find(|works| *works == engine).unwrap_or(EngineKind::Epoll);
    let folder = tempfile::tempdir().unwrap();
    let known = (!password.is_empty()).then(|| password.as_bytes().to_vec());
    let settings = Settings { password: known, ..Settings::default() };
    let serving = Serving::start_set(engine, &folder.path().join("store"), Limits::default(), settings);
    let port = serving.address().port().to_string();
    let output = client.args([&port, password]).output().unwrap();
    let told = String::from_utf8_lossy(&output.stdout);
    let whole = output.status.success() && told.contains("done: ");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(whole, "{engine}, password {password:?}: {}\n{told}{errors}", output.status);
    serving.stop();
}

#[test]
fn redis_py_is_answered() {
    let Some(_) = program_or_skip("python3") else { return };
    let Some(python) = installed_or_skip("python/venv/bin/python3") else { return };
    let mut client = Command::new(python);
    client.arg(source("python/client.py"));
    passes(client, EngineKind::Uring, "open sesame");
}

#[test]
fn node_redis_is_answered() {
    let Some(node) = program_or_skip("node") else { return };
    let Some(folder) = installed_or_skip("node") else { return };
    let mut client = Command::new(node);
    // From stdin, since a module looks for others beside itself, and where it has no file, in the folder of the process.
    let program = File::open(source("node/client.mjs")).unwrap();
    client.args(["--input-type=module", "-"]).current_dir(&folder).stdin(Stdio::from(program));
    passes(client, EngineKind::Epoll, "");
}

#[test]
fn go_redis_is_answered() {
    let Some(_) = program_or_skip("go") else { return };
    let Some(client) = installed_or_skip("go/client") else { return };
    passes(Command::new(client), EngineKind::Uring, "");
}
