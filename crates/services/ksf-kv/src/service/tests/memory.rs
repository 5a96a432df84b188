//! Memory of commands: allocations, and room that is counted or reserved.

use super::*;

/// As if others had taken all of the shard's memory.
#[test]
fn a_short_transaction_needs_no_room_and_a_long_one_is_refused() {
    let mut world = World::new(1);
    let room_bytes = std::mem::replace(&mut world.env.limits.shard_bytes_max, 1);
    let value = "x".repeat(1000);
    let transaction = |world: &mut World, sets: usize| {
        assert_eq!(world.ask(0, &["MULTI"]), "+OK\r\n");
        let queued: String = (0..sets).map(|_| world.ask(0, &["SET", "key", &value])).collect();
        (queued, world.ask(0, &["EXEC"]))
    };
    assert_eq!(transaction(&mut world, 3), ("+QUEUED\r\n".repeat(3), format!("*3\r\n{}", "+OK\r\n".repeat(3))));
    let (queued, done) = transaction(&mut world, 4);
    assert!(
        queued.contains("-OOM no room for more of a transaction") && done.starts_with("-EXECABORT"),
        "{queued}{done}"
    );
    world.env.limits.shard_bytes_max = room_bytes;
    assert_eq!(transaction(&mut world, 4).0, "+QUEUED\r\n".repeat(4));
}

/// The budget counts at least the bytes that the allocator gave to a queued command.
#[test]
fn queued_command_counts_all_its_memory() {
    const COMMANDS: usize = 500;
    /// Overhead of the allocator for the three allocations of a command.
    const OVERHEAD_BYTES: usize = 3 * 16;
    let mut world = World::new(4);
    assert_eq!(world.ask(0, &["CLIENT", "PAUSE", "600000", "ALL"]), "+OK\r\n");
    let delete = "DELETE /key HTTP/1.1\r\nHost: x\r\n\r\n";
    for (conn, command) in [(1, "INCR key\r\n"), (2, "*2\r\n$4\r\nINCR\r\n$3\r\nkey\r\n"), (3, delete)] {
        let (taken, counted, waiting) = (bytes(), world.env.budget.reply_bytes(), world.waiting() as usize);
        world.send(conn, &command.repeat(COMMANDS));
        assert_eq!(world.waiting() as usize, waiting + COMMANDS);
        let taken = (bytes() - taken) as usize / COMMANDS + OVERHEAD_BYTES;
        let counted = (world.env.budget.reply_bytes() - counted) / COMMANDS;
        assert!(taken <= counted, "{command:?}: {taken} bytes, of which {counted} are counted");
    }
}

/// `WAIT` reserves no room for a long reply.
#[test]
fn wait_reserves_no_long_reply() {
    let mut world = World::new(1);
    let before = world.env.budget.reply_bytes();
    world.send(0, "WAIT 1 0\r\n");
    assert_eq!(world.waiting(), 1);
    let counted = world.env.budget.reply_bytes() - before;
    assert!(counted < 4096, "{counted}");
}

/// Counts allocations from the bytes of the commands to the records in the batch and the replies.
#[test]
fn a_warm_set_and_get_of_a_key_that_is_there_allocate_nothing() {
    const PIPELINE: usize = 16;
    let mut world = World::new(1);
    world.complete();
    let value = "v".repeat(64);
    let (set, get) =
        (format!("*3\r\n$3\r\nSET\r\n$3\r\nkey\r\n$64\r\n{value}\r\n"), "*2\r\n$3\r\nget\r\n$3\r\nkey\r\n");
    let (commands, replies) = ((set + get).repeat(PIPELINE), format!("+OK\r\n$64\r\n{value}\r\n").repeat(PIPELINE));
    for round in 0..40 {
        let mut slot = world.env.pool.take().unwrap();
        slot.as_mut_slice()[..commands.len()].copy_from_slice(commands.as_bytes());
        let chunk = slot.freeze(commands.len());
        let before = allocations();
        world.conns[0].as_mut().unwrap().receive(chunk, &mut world.env);
        let counted = allocations() - before;
        world.end_turn();
        assert_eq!(world.take(0), replies);
        assert!(round < 20 || counted == 0, "{counted} allocations for {} commands in round {round}", 2 * PIPELINE);
    }
}
