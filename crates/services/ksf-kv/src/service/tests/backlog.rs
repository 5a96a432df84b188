//! Commands that wait for a slow medium, and connections that end meanwhile.

use super::*;

/// While the medium stalls, writers wait, and the shard keeps no more unwritten bytes than the bound and one command.
#[test]
fn slow_medium_delays_writes_but_no_reads() {
    let mut world = World::new(2);
    world.set(0, 0..10);
    assert_eq!((world.waiting(), world.take(0)), (4, "+OK\r\n".repeat(6)));
    let unwritten_bytes = world.service.unwritten_bytes.load(Ordering::Relaxed) as usize;
    let bounds = UNWRITTEN_BYTES..UNWRITTEN_BYTES + VALUE_BYTES + 3 * BLOCK_BYTES;
    assert!(bounds.contains(&unwritten_bytes), "{unwritten_bytes}");
    world.send(1, "STRLEN 5\r\nEXISTS 6\r\n");
    assert_eq!(world.take(1), format!(":{VALUE_BYTES}\r\n:0\r\n"), "a command that reads does not wait");
    world.send(1, "DEL 5\r\nEXISTS 5\r\n");
    assert_eq!((world.waiting(), world.take(1)), (6, String::new()), "nor does one overtake those of its connection");
    world.complete();
    world.send(0, "PING\r\n");
    assert_eq!((world.take(0), world.take(1)), ("+OK\r\n".repeat(4) + "+PONG\r\n", ":1\r\n:0\r\n".into()));
    assert_eq!(world.waiting(), 0);
}

/// On persistent memory the shard starts no file operation. It sends replies in the turn of their commands, also if these write
/// more than the bound of unwritten bytes.
#[test]
fn writes_to_persistent_memory_are_acknowledged_in_their_turn() {
    let Some(folder) = Folder::in_memory_or_skip() else { return };
    let mut world = World::on(folder, Medium::PmemMemory, 1, 2, Durability::Always);
    for round in 0..3 {
        world.send(0, &format!("SET key {round}\r\nGET key\r\n"));
        assert_eq!(world.take(0), format!("+OK\r\n$1\r\n{round}\r\n"));
    }
    world.set(0, 0..10);
    assert_eq!((world.waiting(), world.take(0)), (0, "+OK\r\n".repeat(10)));
    assert_eq!(world.service.unwritten_bytes.load(Ordering::Relaxed), 0);
    world.send(1, "SAVE\r\nINFO persistence\r\n");
    let said = world.take(1);
    assert!(said.starts_with("+OK\r\n"), "{said}");
    assert!(said.contains("\r\nksf_medium:pmem-memory\r\nksf_survives_power_cut:0\r\n"), "{said}");
}

/// When queued commands continue together, their replies stay within the limit of the connection.
#[test]
fn a_pipeline_that_waits_is_answered_whole() {
    const READS: usize = 30;
    let mut world = World::new(2);
    world.set(0, 0..6);
    world.take(0);
    let reads = "GET 0\r\n".repeat(READS);
    world.send(1, &format!("SET short value\r\n{reads}GET short\r\n"));
    assert_eq!((world.waiting(), world.take(1)), (2, String::new()), "a read that waits may have a long reply");
    world.complete();
    world.send(0, "PING\r\n");
    let replies = world.take(1);
    assert!(replies.starts_with("+OK\r\n$100000\r\n") && replies.ends_with("$5\r\nvalue\r\n"), "{}", replies.len());
    assert_eq!(replies.matches("$100000").count(), READS);
    assert!(!world.conns[1].as_ref().unwrap().is_closing());
}

/// The reply to `SAVE` waits until all earlier writes are durable, also if replies to writes do not wait.
#[test]
fn save_waits_for_what_was_acknowledged() {
    let mut world = World::new(2);
    world.send(0, "SET a 1\r\nSET b 2\r\n");
    assert_eq!(world.take(0), "+OK\r\n+OK\r\n");
    world.send(1, "SAVE\r\nBGSAVE\r\nLASTSAVE\r\n");
    assert_eq!(world.take(1), "", "it is not on the medium");
    world.complete();
    world.send(0, "PING\r\n");
    world.end_turn();
    assert_eq!(world.take(0), "+PONG\r\n");
    let replies = world.take(1);
    assert!(replies.starts_with("+OK\r\n+Background saving started\r\n:"), "{replies}");
}

#[test]
fn closing_connection_drops_queued_commands() {
    let mut world = World::new(3);
    world.set(0, 0..10);
    world.send(1, "SET kept 1\r\n");
    assert_eq!(world.waiting(), 5);
    world.conns[0].take().unwrap().end(&mut world.env);
    world.end_turn();
    assert_eq!(world.waiting(), 1, "that of the other connection");
    world.complete();
    world.send(2, "PING\r\n");
    assert_eq!((world.waiting(), world.take(1)), (0, "+OK\r\n".into()));
    world.send(2, "EXISTS 5 9\r\n");
    assert_eq!(world.take(2), "+PONG\r\n:1\r\n", "what was carried out before stays, the rest was not");
}

/// The end of a connection costs a number of looks that depends on its own queued commands only.
#[test]
fn closing_connection_visits_its_own_commands_only() {
    const CONNS: usize = 40;
    const EACH: usize = 50;
    let mut world = World::new(CONNS as u32 + 1);
    world.set(CONNS, 0..10);
    (0..CONNS).for_each(|conn| world.send(conn, &"INCR key\r\n".repeat(EACH)));
    assert_eq!(world.waiting() as usize, 4 + CONNS * EACH);
    let before = queue::LOOKS.get();
    (0..CONNS).for_each(|conn| world.conns[conn].take().unwrap().end(&mut world.env));
    let looks = (queue::LOOKS.get() - before) as usize;
    world.end_turn();
    assert_eq!(world.waiting(), 4);
    assert!(looks <= CONNS * (EACH + 1), "{looks}");
}

/// A connection that ends drops its reads that have not started.
#[test]
fn reads_go_with_their_connection() {
    const EACH: usize = 50;
    let settings = Settings { durability: Durability::None, memory_bytes_max: 1 << 20, ..Settings::default() };
    let mut world = World::set_up(Folder::new(), Medium::Block, 1, 3, settings);
    world.complete();
    let value = "v".repeat(16 << 10);
    let mut told = (0..4 * EACH).map(|key| world.ask(0, &["SET", &format!("key:{key}"), &value]));
    assert!(told.all(|told| told == "+OK\r\n"));
    for conn in [1, 2] {
        let keys = (conn * EACH..(conn + 1) * EACH).map(|key| format!("key:{key}"));
        let words: Vec<String> = ["MGET".to_owned()].into_iter().chain(keys).collect();
        world.send(conn, &array(words.into_iter()));
    }
    let reads = |world: &World| world.service.reads.load(Ordering::Relaxed);
    assert!(world.waiting() == 2 && reads(&world) > 0, "{}", reads(&world));
    world.conns[2].take().unwrap().end(&mut world.env);
    world.end_turn();
    assert_eq!((world.waiting(), reads(&world)), (1, 0));
}
