//! What `ksf accel status` says: a program that is not accelerated after all must not be measured as if it were.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;

use crate::process::output;

const TIMEOUT: Duration = Duration::from_secs(20);
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// The part that counts here of what `ksf accel status --json` prints.
#[derive(Deserialize)]
struct AccelStatus {
    programs: Vec<Program>,
}

#[derive(Deserialize)]
struct Program {
    on: bool,
    level: String,
    listeners: Vec<Listener>,
}

#[derive(Deserialize)]
struct Listener {
    address: String,
    not_accelerated: Option<String>,
    queues: Vec<QueueReadiness>,
}

#[derive(Deserialize)]
struct QueueReadiness {
    ready: bool,
}

/// Waits until so many workers serve queues of the port; returns the mechanism by its name. With `off` it is enough
/// that all is loaded, and nothing may be steered.
pub(super) fn wait_until_accelerated(ksf: &Path, pid: u32, port: u16, workers: usize, off: bool) -> Result<String> {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let mut status = Command::new(ksf);
        let text = output(status.args(["accel", "status", "--json", &pid.to_string()]), TIMEOUT)?;
        match judge(&text, port, workers, off)? {
            Ok(level) => return Ok(level),
            Err(missing) => ensure!(Instant::now() < deadline, "waited {TIMEOUT:?}: {missing}; status said:\n{text}"),
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// The mechanism, or what is missing as yet; an error where waiting will not help.
fn judge(text: &str, port: u16, workers: usize, off: bool) -> Result<Result<String, String>> {
    let status: AccelStatus = serde_json::from_str(text).context("ksf accel status printed no status")?;
    let [program] = status.programs.as_slice() else { bail!("{} programs, not 1", status.programs.len()) };
    ensure!(program.on != off, "switched {}", if program.on { "on" } else { "off" });
    let of_port = |listener: &&Listener| listener.address.ends_with(&format!(":{port}"));
    let Some(listener) = program.listeners.iter().find(of_port) else {
        return Ok(Err(format!("no listener on port {port}")));
    };
    if let Some(why) = listener.not_accelerated.as_ref().filter(|_| !off) {
        bail!("port {port} is not accelerated: {why}");
    }
    let ready = listener.queues.iter().filter(|queue| queue.ready).count();
    // Switched off, workers wait for the program's own listener.
    Ok(match off || ready >= workers {
        true => Ok(program.level.clone()),
        false => Err(format!("{ready} of {workers} workers serve a queue")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"{"schema":"ksf-accel/1","programs":[{"pid":7,"on":true,"level":"sk_lookup","listeners":[
        {"address":"127.0.0.1:81","not_accelerated":null,"queues":[{"worker":0,"ready":true},{"worker":1,"ready":false}]}
    ]}]}"#;

    #[test]
    fn ready_workers_are_counted() {
        assert_eq!(judge(TEXT, 81, 1, false).unwrap(), Ok("sk_lookup".to_owned()));
        assert!(judge(TEXT, 81, 2, false).unwrap().is_err());
        assert!(judge(TEXT, 80, 1, false).unwrap().is_err());
        let off = TEXT.replace("\"on\":true", "\"on\":false");
        assert_eq!(judge(&off, 81, 2, true).unwrap(), Ok("sk_lookup".to_owned()));
        assert!(judge(&off, 80, 2, true).unwrap().is_err());
    }

    #[test]
    fn what_is_not_accelerated_is_an_error() {
        let plain = TEXT.replace("\"not_accelerated\":null", "\"not_accelerated\":\"it is static\"");
        assert!(format!("{:#}", judge(&plain, 81, 1, false).unwrap_err()).contains("it is static"));
        assert!(judge(TEXT, 81, 1, true).is_err(), "it is on");
        assert!(judge(r#"{"programs":[]}"#, 81, 1, false).is_err());
    }
}
