//! Runs of load generators that share no code with ours, to check it: wrk and ab.

use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::client::{COMPRESS, Client, SLACK};
use crate::bench::contestant::pinned;
use crate::process::output;

/// A generator of Debian.
#[derive(Clone, Copy, Debug)]
pub(super) enum Generator {
    Wrk,
    /// ab of apache2-utils. It has one thread, and speaks HTTP/1.0.
    Ab,
}

impl Generator {
    /// The load of `client`, on the same CPUs, for whole seconds.
    pub(super) fn command(self, client: &Client<'_>, seconds: Option<f64>) -> Command {
        let cpus = client.pinning.client(client.case.connections);
        let whole_seconds = (seconds.unwrap_or(0.0).ceil() as u64).max(1).to_string();
        let in_flight = client.case.in_flight.to_string();
        let mut command;
        match self {
            Generator::Wrk => {
                command = pinned("wrk", cpus.as_deref());
                command.args(["-t", &client.case.connections.to_string(), "-c", &in_flight]);
                command.args(["-d", &format!("{whole_seconds}s")]);
                if !client.load.keep {
                    command.args(["-H", "Connection: close"]);
                }
            }
            Generator::Ab => {
                command = pinned("ab", cpus.as_deref());
                command.args(["-q", "-c", &in_flight]);
                match (seconds, client.count) {
                    (None, Some(count)) => command.args(["-n", &count.max(client.case.in_flight.into()).to_string()]),
                    // After -t, which alone would end it at 50,000 requests. ab has memory for all from the start.
                    _ => command.args(["-t", &whole_seconds, "-n", "1000000"]),
                };
            }
        }
        if client.load.costly {
            command.args(["-H", COMPRESS]);
        }
        command.arg(client.url());
        command
    }

    /// Requests per second, all of which were answered well.
    pub(super) fn run(self, command: &mut Command) -> Result<f64> {
        let text = output(command, SLACK)?;
        self.parse(&text).with_context(|| format!("{self:?} printed:\n{text}"))
    }

    fn parse(self, text: &str) -> Result<f64> {
        for bad in ["Socket errors", "Non-2xx"] {
            ensure!(!text.contains(bad), "requests failed");
        }
        let after = |label| text.lines().find_map(|line| line.trim().strip_prefix(label));
        let rate = match self {
            Generator::Wrk => after("Requests/sec:"),
            Generator::Ab => {
                ensure!(after("Failed requests:").map(str::trim) == Some("0"), "requests failed");
                after("Requests per second:").and_then(|rest| rest.split_whitespace().next())
            }
        };
        Ok(rate.context("no line of the rate")?.trim().parse()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_of_wrk_is_read() {
        let text = "Running 1s test @ http://127.0.0.1:80/\n  2 threads and 32 connections\nRequests/sec:  61234.56\n";
        assert_eq!(Generator::Wrk.parse(text).unwrap(), 61_234.56);
        assert!(
            Generator::Wrk.parse(&format!("{text}  Socket errors: connect 0, read 3, write 0, timeout 0\n")).is_err()
        );
        assert!(Generator::Wrk.parse("nothing").is_err());
    }

    #[test]
    fn the_rate_of_ab_is_read_unless_a_request_failed() {
        let text =
            "Complete requests:      7084\nFailed requests:        0\nRequests per second:    3541.87 [#/sec] (mean)\n";
        assert_eq!(Generator::Ab.parse(text).unwrap(), 3_541.87);
        for (from, to) in [("0\nReq", "3\nReq"), ("Failed requests:        0\n", "Non-2xx responses:      7\n")] {
            assert!(Generator::Ab.parse(&text.replace(from, to)).is_err(), "{to}");
        }
        assert!(Generator::Ab.parse(&format!("{text}Non-2xx responses:      7\n")).is_err());
    }
}
