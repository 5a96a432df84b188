//! A service that asks to be called at a time is called then, though nothing happens, on both engines.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::common::files::start;
use crate::common::net::*;
use ksf::framing::{Delimiter, Framing};
use ksf::limits::{Limits, Time};
use ksf::service::{Message, Peer, Refused};
use ksf::{Profile, Reply, Service, Turn, Unlogged};

/// Asks for a time as it starts, and then each time that it is called, until it was called so often.
#[derive(Default)]
struct Sleeper {
    called: AtomicU64,
    /// Times that came too early: the one that was asked for, and the one at which it was called.
    early: Mutex<Vec<(Time, Time)>>,
}

const CALLS: u64 = 5;
const NAP_MS: u64 = 3;

impl Service for Sleeper {
    type Shard = Time;
    type Conn = ();
    type Mode = Unlogged;

    fn profile(&self) -> Profile<'_> {
        Profile { turn_ends: true, ..Profile::new("sleeper", Framing::Delimiter(Delimiter::LF)) }
    }

    fn start(&self, turn: &mut Turn<'_>) -> std::io::Result<Time> {
        // The later one is forgotten.
        turn.wake_at(turn.now().plus_ms(3_600_000));
        let at = turn.now().plus_ms(NAP_MS);
        turn.wake_at(at);
        Ok(at)
    }

    fn accept(&self, _: &mut Time, _: &Peer) -> Result<(), Refused> {
        Ok(())
    }

    fn call(&self, _: &mut Time, (): &mut (), _: &Message<'_>, _: &mut Reply<'_>) {}

    fn turn_end(&self, at: &mut Time, turn: &mut Turn<'_>) {
        let now = turn.now();
        if now < *at {
            self.early.lock().unwrap().push((*at, now));
        }
        if self.called.fetch_add(1, Ordering::SeqCst) + 1 < CALLS {
            *at = now.plus_ms(NAP_MS);
            turn.wake_at(*at);
        }
    }
}

#[test]
fn a_service_is_called_at_the_time_that_it_asked_for() {
    for engine in engines() {
        let service = Arc::<Sleeper>::default();
        let server = start(engine, Limits::default(), Arc::clone(&service));
        wait_until("it was called as often as it asked for", || service.called.load(Ordering::SeqCst) >= CALLS);
        // What it did not ask for does not come: the server has nothing to do, and its end is no call.
        server.drain().unwrap();
        assert_eq!(service.called.load(Ordering::SeqCst), CALLS, "{engine}");
        assert!(service.early.lock().unwrap().is_empty(), "{engine}: {:?}", service.early.lock().unwrap());
    }
}
