//! Wake-ups of idle shards.

use super::*;

/// An idle log writes one commit marker. A shard without work requests no wake-up.
#[test]
fn idle_shard_writes_one_marker_and_sleeps() {
    let mut world = World::new(1);
    world.complete();
    for round in 0..3 {
        world.send(0, "SET a 1\r\n");
        world.send(0, "PING\r\n");
        assert_eq!(world.take(0), "+OK\r\n+PONG\r\n");
        assert_eq!(world.sleep(), Some(IDLE_MS), "round {round}");
        assert!(world.service.unwritten_bytes.load(Ordering::Relaxed) > 0, "it writes a commit marker");
        world.send(0, "PING\r\n");
        assert_eq!((world.take(0), world.sleep()), ("+PONG\r\n".into(), None), "round {round}");
    }
    // Reads, and writes that change nothing, need no marker.
    world.send(0, "GET a\r\nDEL b\r\n");
    assert_eq!((world.take(0), world.sleep()), ("$1\r\n1\r\n:0\r\n".into(), None));
}

/// Other shards sleep and do not learn of the key: the shard that set it wakes for its expiry.
#[test]
fn shard_that_set_a_key_wakes_for_its_expiry() {
    let mut world = World::on_last_of(2, 1, Durability::None);
    world.complete();
    world.send(0, "SET later 1 EX 100\r\n");
    world.send(0, "PING\r\n");
    assert_eq!(world.take(0), "+OK\r\n+PONG\r\n");
    world.sleep();
    world.send(0, "PING\r\n");
    assert_eq!((world.take(0), world.sleep()), ("+PONG\r\n".into(), Some(SWEEP_SLEEP_MS_MAX)));
}

/// A shard wakes for the next expiry, but sleeps no longer than it trusts the clock.
#[test]
fn a_shard_sleeps_until_a_key_ends() {
    let mut world = World::new(1);
    world.complete();
    world.send(0, "SET later 1 EX 100\r\n");
    world.send(0, "PING\r\n");
    world.sleep();
    world.send(0, "PING\r\n");
    assert_eq!(world.take(0), "+OK\r\n+PONG\r\n+PONG\r\n");
    assert_eq!(world.sleep(), Some(SWEEP_SLEEP_MS_MAX));
    assert_eq!(world.sleep(), Some(SWEEP_SLEEP_MS_MAX), "its clock stands still here");
}
