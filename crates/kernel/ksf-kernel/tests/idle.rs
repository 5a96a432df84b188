//! Idle connections under the kernel half. A program of its own, because its clock would suffer from the loads of
//! `server.rs`: kernel workers serve all connections of a CPU one after the other.

use std::io::Read;
use std::time::{Duration, Instant};

use crate::common::*;
use crate::rig::*;
use ksf::limits::Limits;

/// What the kernel answers is activity of which user space sees nothing.
#[test]
fn a_connection_the_kernel_answers_is_not_idle() {
    const IDLE: Duration = Duration::from_millis(300);
    on_each(|spoken, engine| {
        let idle = |time: Duration| Limits { idle_timeout_ms: time.as_millis() as u64, ..Limits::default() };
        let rig = Rig::start_with(spoken, engine, "127.0.0.1:0", idle(PATIENCE));
        let mut client = rig.connect();
        // Only messages that the kernel half can answer.
        let request = if spoken == Spoken::Rpc { null_call(1) } else { b"still here".to_vec() };
        let reply = if spoken == Spoken::Rpc { null_reply(1) } else { request.clone() };
        let begun = Instant::now();
        let mut last = begun;
        while last - begun < 2 * IDLE {
            last = Instant::now();
            send_all(&mut client, &request);
            assert_eq!(read_exactly(&mut client, reply.len()), reply);
        }
        let (answered, passed) = (rig.counter("segments_answered"), rig.counter("segments_passed"));
        assert!(answered > passed, "{answered} answered in the kernel, {passed} passed");
        // Now it is idle. The limit holds from here on, so that no pause of this test ends the connection before.
        rig.server.set_limits(&idle(IDLE).into());
        assert_eq!(client.read(&mut [0]).expect("the end"), 0);
        assert!(last.elapsed() > IDLE / 2, "what the kernel answered did not count");
        assert_eq!(rig.server_counter("messages"), rig.server_counter("replies"));
        wait_until("it is counted", || rig.server_counter("closed_idle_timeout") == 1);
        drop(client);
        rig.end();
    });
}
