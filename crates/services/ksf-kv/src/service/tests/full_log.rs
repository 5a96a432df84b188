//! Commands that wait for room in a full log, or for memory.

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

    /// Advances the clock by `ms`. Returns the replies of connection 0.
    fn pass(&mut self, ms: u64) -> String {
        self.env.now = self.env.now.plus_ms(ms);
        assert_eq!(self.ask(1, &["PING"]), "+PONG\r\n");
        self.take(0)
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
    assert_eq!((world.waiting(), world.pass(HOPE_MS - 1)), (1, String::new()));
    let told = world.pass(1);
    assert!(told.starts_with("-OOM the log is full"), "{told}");
    let told = world.ask(2, &["DEL", &long_key(waits)]);
    assert!(told.starts_with("-OOM the log is full"), "{told}");
    assert_eq!(world.pass(NO_HOPE_MS), "");
    assert_eq!((world.ask(2, &["DEL", &long_key(waits)]), world.waiting()), (String::new(), 1));
    assert_eq!(world.ask(1, &["STRLEN", &long_key(waits)]), ":0\r\n", "what only reads does not wait");
}

/// A new value waits until the cleaner removes the tombstones of deleted keys from memory, but for at most `HOPE_MS`.
#[test]
fn value_without_memory_is_refused_after_a_bounded_wait() {
    let settings = Settings { durability: Durability::None, memory_bytes_max: 100_000, ..Settings::default() };
    let mut world = World::set_up(Folder::new(), Medium::Block, 1, 2, settings);
    world.complete();
    // Few keys, because each takes a block of the log.
    let key = |number: usize| format!("{number:01000}");
    let set = |world: &mut World, number: usize| world.ask(0, &["SET", &key(number), ""]);
    let keys = (0..200).find(|number| set(&mut world, *number) != "+OK\r\n").unwrap();
    assert!(keys > 50 && world.waiting() == 0, "without tombstones nothing waits: {keys}");
    (0..keys).for_each(|number| assert_eq!(world.ask(0, &["DEL", &key(number)]), ":1\r\n"));
    (keys..200).find(|number| set(&mut world, *number) != "+OK\r\n").unwrap();
    assert_eq!((world.waiting(), world.pass(HOPE_MS - 1)), (1, String::new()));
    let told = world.pass(1);
    assert!(told.starts_with("-OOM command not allowed"), "{told}");
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
