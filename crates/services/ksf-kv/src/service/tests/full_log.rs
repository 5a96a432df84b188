//! Commands that wait for room in a full log.

use super::*;

impl World {
    /// Sets keys until the log is full. Returns their number.
    fn fill(&mut self) -> usize {
        let keys = (0..200).find(|number| self.ask(0, &["SET", &long_key(*number), ""]) != "+OK\r\n").unwrap();
        assert!(keys > 50, "{keys}");
        let told = self.ask(0, &["SET", &long_key(keys), ""]);
        assert!(told.starts_with("-OOM the log is full"), "{told}");
        keys
    }
}

/// A key so long that a few removals use up the reserve.
fn long_key(number: usize) -> String {
    format!("{number:060000}")
}

/// A removal without room waits for the cleaner, whose reads never complete here, for at most `HOPE_MS`. Then removals are refused
/// for `NO_HOPE_MS`.
#[test]
fn removal_without_room_is_refused_after_a_bounded_wait() {
    let mut world = World::new(3);
    world.complete();
    let keys = world.fill();
    let waits = (0..keys).find(|number| world.ask(0, &["DEL", &long_key(*number)]) != ":1\r\n").unwrap();
    assert!(waits > 5, "{waits}");
    let pass = |world: &mut World, ms: u64| {
        world.env.now = world.env.now.plus_ms(ms);
        assert_eq!(world.ask(1, &["PING"]), "+PONG\r\n");
        world.take(0)
    };
    assert_eq!((world.waiting(), pass(&mut world, HOPE_MS - 1)), (1, String::new()));
    let told = pass(&mut world, 1);
    assert!(told.starts_with("-OOM the log is full"), "{told}");
    let told = world.ask(2, &["DEL", &long_key(waits)]);
    assert!(told.starts_with("-OOM the log is full"), "{told}");
    assert_eq!(pass(&mut world, NO_HOPE_MS), "");
    assert_eq!((world.ask(2, &["DEL", &long_key(waits)]), world.waiting()), (String::new(), 1));
    assert_eq!(world.ask(1, &["STRLEN", &long_key(waits)]), ":0\r\n", "what only reads does not wait");
}

/// Queued commands continue together, and one of them must wait again: no later command of its connection overtakes it.
#[test]
fn no_command_overtakes_one_that_waits_once_more() {
    const PAIRS: usize = 14;
    let mut world = World::new(2);
    world.complete();
    world.fill();
    (0..8).for_each(|number| assert_eq!(world.ask(0, &["DEL", &long_key(number)]), ":1\r\n"));
    world.service.completes.store(false, Ordering::Relaxed);
    let pair = |number| array(["DEL", &long_key(number)].map(str::to_owned).into_iter()) + "HDEL nothing field\r\n";
    world.send(0, &(8..8 + PAIRS).map(pair).collect::<String>());
    let mut told = world.take(0);
    assert!(world.waiting() > 0, "the medium is behind");
    world.complete();
    for _ in 0..PAIRS {
        assert_eq!(world.ask(1, &["PING"]), "+PONG\r\n");
        told.push_str(&world.take(0));
    }
    let replies = told.lines().count();
    assert!((2..2 * PAIRS).contains(&replies), "{replies}");
    assert_eq!((told, world.waiting() as usize), (":1\r\n:0\r\n".repeat(replies / 2), 2 * PAIRS - replies));
}
