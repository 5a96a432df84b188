//! Pipelines of expensive commands, and of commands that repeat a key.

use super::*;

/// Another client gets its reply after a bounded part of the pipeline.
#[test]
fn pipeline_of_dear_commands_lets_others_in() {
    const KEYS: usize = 6_000;
    let mut world = World::new(2);
    world.complete();
    for first in (0..KEYS).step_by(1_000) {
        let keys = (first..first + 1_000).flat_map(|key| [format!("key:{key}"), "v".to_owned()]);
        let words: Vec<String> = ["MSET".to_owned()].into_iter().chain(keys).collect();
        world.send(0, &array(words.into_iter()));
        let members = (first..first + 1_000).map(|member| format!("member:{member}"));
        let words: Vec<String> = ["SADD".to_owned(), "set".to_owned()].into_iter().chain(members).collect();
        world.send(0, &array(words.into_iter()));
    }
    for key in ["one", "other"] {
        world.send(0, &array(["SET", key, &"ab".repeat(400)].map(str::to_owned).into_iter()));
    }
    world.take(0);
    for (count, command, reply) in [
        (500, "KEYS nothing*\r\n", "*0\r\n"),
        (8, "SUNIONSTORE to set\r\n", ":6000\r\n"),
        (20, "SCARD set\r\nSDIFF set to\r\n", ":6000\r\n*0\r\n"),
        (20, "MULTI\r\nSDIFF set to\r\nSDIFF set to\r\nEXEC\r\n", "+OK\r\n+QUEUED\r\n+QUEUED\r\n*2\r\n*0\r\n*0\r\n"),
        (20, "LCS one other LEN\r\n", ":800\r\n"),
        (20, "MULTI\r\nLCS one other LEN\r\nEXEC\r\n", "+OK\r\n+QUEUED\r\n*1\r\n:800\r\n"),
    ] {
        world.receive(0, &command.repeat(count));
        let (mut told, mut turns) = (String::new(), 0);
        loop {
            world.receive(1, "PING\r\n");
            assert_eq!(world.take_batch(1).as_deref(), Some("+PONG\r\n"), "{command:?}");
            while let Some(batch) = world.take_batch(0) {
                told.push_str(&batch);
            }
            if told.len() >= reply.len() * count {
                break;
            }
            turns += 1;
            assert!(turns <= 4 * count, "{command:?} does not go on");
            world.end_one_turn();
        }
        assert!(told == reply.repeat(count), "{command:?}: {}", &told[..told.len().min(400)]);
        // At most three of these fit into one turn.
        assert!(turns >= count / 4 - 1, "{command:?}: {turns} turns for {count}");
        world.end_turn();
    }
    // A pipeline of cheap commands ends within one turn.
    world.receive(0, &"STRLEN one\r\n".repeat(1_000));
    assert_eq!(world.take_batch(0).map(|told| told.matches(":800\r\n").count()), Some(1_000));
}

/// A command that names a key repeatedly costs as much as one that names it once.
#[test]
fn a_set_that_is_named_many_times_is_gone_through_once() {
    const TIMES: usize = 50;
    let mut world = World::new(1);
    world.complete();
    for (key, members) in [("set", 0..2_000), ("other", 1_000..2_500)] {
        let words = ["SADD".to_owned(), key.to_owned()].into_iter().chain(members.map(|member| member.to_string()));
        world.send(0, &array(words.collect::<Vec<_>>().into_iter()));
    }
    world.take(0);
    let mut told = |name: &str, keys: &[&str]| {
        let before = work::done();
        let words: Vec<&str> = name.split(' ').chain(keys.iter().copied()).collect();
        let reply = world.ask(0, &words);
        let units = work::done() - before;
        let reply = if words.len() > 1 + keys.len() { world.ask(0, &["SMEMBERS", "to"]) } else { reply };
        (reply.replacen('~', "*", 1), units)
    };
    for (plain, store) in [("SUNION", "SUNIONSTORE to"), ("SINTER", "SINTERSTORE to"), ("SDIFF", "SDIFFSTORE to")] {
        for name in [plain, store] {
            for keys in [&["set"][..], &["set", "other"], &["other", "set"], &["set", "nothing"], &["nothing", "set"]] {
                // The first one replaces the destination, which is work, too.
                told(name, keys);
                let (reply, units) = told(name, keys);
                let all = keys.repeat(TIMES);
                let others = [&keys[..1], &keys[1..].repeat(TIMES)].concat();
                let is_diff = plain == "SDIFF";
                for (many, expected) in [(all, if is_diff { "*0\r\n" } else { &reply }), (others, &reply)] {
                    let (reply, many_units) = told(name, &many);
                    assert!(reply == expected, "{name} {keys:?}: {}", &reply[..reply.len().min(200)]);
                    let bound = units + 4 * many.len() as u64;
                    assert!(many_units <= bound, "{name} {keys:?}: {many_units} units of {bound}");
                }
            }
        }
    }
}

/// Commands count as work also if their replies are dropped, or if they find nothing.
#[test]
fn pipeline_without_replies_lets_others_in() {
    let mut world = World::new(2);
    world.complete();
    let long = "b".repeat(6_000);
    for command in [["SET", &long, ""], ["SADD", "set", &long]] {
        world.ask(0, &command);
    }
    world.ask(0, &["HSET", "hash", &long, ""]);
    world.ask(0, &["ZADD", "scores", "1", &long]);
    let class = format!("*[{}]", "a".repeat(1_000));
    let many = |count: usize, words: &[&str]| array(words.iter().map(|word| (*word).to_owned())).repeat(count);
    for (commands, turns_min) in [
        (many(200, &["COMMAND", "DOCS"]), 50),
        (many(200, &["COMMAND"]), 20),
        (many(2_000, &["COMMAND", "LIST", "FILTERBY", "PATTERN", "nothing*"]), 50),
        (many(1_000, &["INFO"]), 5),
        (many(1_000, &["CLIENT", "LIST"]), 2),
        (many(1_000, &["PING", &long]), 20),
        (many(1_000, &["KEYS", &class]), 5),
        (many(1_000, &["SCAN", "0", "MATCH", &class]), 5),
        (many(1_000, &["HSCAN", "hash", "0", "MATCH", &class]), 5),
        (many(1_000, &["SSCAN", "set", "0", "MATCH", &class]), 5),
        (many(1_000, &["ZSCAN", "scores", "0", "MATCH", &class]), 5),
    ] {
        world.receive(0, &format!("CLIENT REPLY OFF\r\n{commands}CLIENT REPLY ON\r\n"));
        let what = commands[..60].escape_default();
        let mut turns = 0;
        while world.take_batch(0).is_none() {
            world.receive(1, "PING\r\n");
            assert_eq!(world.take_batch(1).as_deref(), Some("+PONG\r\n"), "{what}");
            turns += 1;
            assert!(turns <= 10_000, "{what} does not go on");
            world.end_one_turn();
        }
        assert!(turns >= turns_min, "{what}: {turns} turns");
        world.end_turn();
    }
}
