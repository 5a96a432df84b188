//! Commands that access some cells of a key with thousands, compared with Redis.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::path::Path;

use crate::common::{Client, Redis, Serving};
use ksf::engine::EngineKind;
use ksf::limits::Limits;
use ksf_kv::{Durability, Settings};
use ksf_test::{Random, own_network};

/// Replies do not wait for the disk: other tests cover durability.
fn start(folder: &Path) -> Serving {
    let settings = Settings { durability: Durability::None, ..Settings::default() };
    Serving::start_set(EngineKind::Epoll, folder, Limits::default(), settings)
}

/// Sends a command to both servers and compares the replies.
fn both<S: Read + Write>(ours: &mut Client, theirs: &mut Client<S>, question: &str) -> String {
    let (answer, expected) = (ours.ask(question), theirs.ask(question));
    assert!(answer == expected, "{question}: {answer}\n instead of {expected}");
    answer
}

/// The words of a reply, sorted: Redis returns them in no fixed order.
fn sorted(answer: &str) -> Vec<&str> {
    let mut words: Vec<&str> = answer.trim_matches(['[', ']']).split(' ').filter(|word| !word.is_empty()).collect();
    words.sort_unstable();
    words
}

#[test]
fn members_are_found_by_place_and_by_score() {
    let Some(mut redis) = Redis::start() else { return };
    let serving = Serving::in_new_folder(start);
    let (mut client, peer) = (serving.connect(), &mut redis.client);
    let mut random = Random::of_test(3);
    let random: &mut Random = &mut random;
    let member = |random: &mut Random| format!("member{}", random.below(4_000));
    let score = |random: &mut Random| match random.below(20) {
        0 => "-inf".to_owned(),
        1 => "+inf".to_owned(),
        _ => (random.below(200) as i64 - 100).to_string(),
    };
    let bound = |random: &mut Random| format!("{}{}", ["", "("][random.below(2) as usize], score(random));
    let place = |random: &mut Random| random.below(4_000) as i64 - 2_000;
    for _ in 0..3_000 {
        let question = format!("ZADD z {} {}", score(random), member(random));
        both(&mut client, peer, &question);
    }
    let mut in_transaction = false;
    for round in 0..4_000 {
        let question = match random.below(12) {
            0 => format!("ZADD z {} {}", score(random), member(random)),
            1 => format!("ZREM z {}", member(random)),
            2 | 3 => format!("ZRANK z {}", member(random)),
            4 | 5 => format!("ZREVRANK z {}", member(random)),
            6 | 7 => format!("ZCOUNT z {} {}", bound(random), bound(random)),
            8 => {
                let from = place(random);
                format!("ZRANGE z {from} {} WITHSCORES", from + random.below(20) as i64)
            }
            9 => {
                let from = place(random);
                format!("ZREVRANGE z {from} {}", from + random.below(20) as i64)
            }
            10 => format!("{} z {}", ["ZPOPMIN", "ZPOPMAX"][random.below(2) as usize], random.below(3)),
            _ => {
                let from = place(random);
                format!("ZREMRANGEBYRANK z {from} {}", from + random.below(3) as i64)
            }
        };
        // A transaction sees its own changes.
        if round % 200 == 0 {
            in_transaction = true;
            both(&mut client, peer, "MULTI");
        }
        both(&mut client, peer, &question);
        if in_transaction && round % 200 == 15 {
            in_transaction = false;
            both(&mut client, peer, "EXEC");
        }
    }
    assert!(both(&mut client, peer, "ZRANGE z 0 -1 WITHSCORES").len() > 10_000);
    serving.stop();
}

#[test]
fn elements_of_lists_move_to_the_nearer_end() {
    own_network();
    let Some(mut redis) = Redis::start() else { return };
    let folder = tempfile::tempdir().unwrap();
    let serving = start(folder.path());
    let (mut client, peer) = (serving.connect(), &mut redis.client);
    let mut random = Random::of_test(4);
    for number in 0..1_500 {
        both(&mut client, peer, &format!("RPUSH l element{}", number % 40));
        both(&mut client, peer, &format!("RPUSH rare element{number}"));
    }
    let mut in_transaction = false;
    for round in 0..1_500 {
        let key = ["l", "rare"][random.below(2) as usize];
        let element = format!("element{}", random.below(if key == "l" { 45 } else { 1_600 }));
        let question = match random.below(6) {
            0 | 1 => format!("LINSERT {key} {} {element} new{round}", ["BEFORE", "AFTER"][random.below(2) as usize]),
            2 => format!("LREM {key} {} {element}", random.below(7) as i64 - 3),
            3 => format!("LPOS {key} {element} RANK {}", [-30, -2, -1, 1, 2, 30][random.below(6) as usize]),
            4 => {
                let rank = [-3, -1, 1, 3][random.below(4) as usize];
                format!("LPOS {key} {element} RANK {rank} COUNT {} MAXLEN {}", random.below(4), random.below(900))
            }
            _ => format!("RPUSH {key} {element}"),
        };
        if round % 150 == 0 {
            in_transaction = true;
            both(&mut client, peer, "MULTI");
        }
        both(&mut client, peer, &question);
        if in_transaction && round % 150 == 10 {
            in_transaction = false;
            both(&mut client, peer, "EXEC");
        }
        if !in_transaction && round % 50 == 49 {
            for key in ["l", "rare"] {
                both(&mut client, peer, &format!("LRANGE {key} 0 -1"));
                both(&mut client, peer, &format!("LINDEX {key} 0"));
                both(&mut client, peer, &format!("LINDEX {key} -1"));
            }
        }
    }
    let all = ["l", "rare"].map(|key| both(&mut client, peer, &format!("LRANGE {key} 0 -1")));
    serving.stop();
    let serving = start(folder.path());
    let mut client = serving.connect();
    assert!(["l", "rare"].map(|key| client.ask(&format!("LRANGE {key} 0 -1"))) == all, "after a start");
    for key in ["l", "rare"] {
        both(&mut client, peer, &format!("LPUSH {key} first"));
        both(&mut client, peer, &format!("RPUSH {key} last"));
        both(&mut client, peer, &format!("LRANGE {key} 0 -1"));
    }
    serving.stop();
}

#[test]
fn sets_are_combined_as_by_redis() {
    let Some(mut redis) = Redis::start() else { return };
    let serving = Serving::in_new_folder(start);
    let (mut client, peer) = (serving.connect(), &mut redis.client);
    let mut random = Random::of_test(5);
    for (key, members) in [("a", 1_500), ("b", 900), ("c", 600), ("few", 3), ("x", 256), ("y", 512)] {
        for _ in 0..members {
            both(&mut client, peer, &format!("SADD {key} member{}", random.below(2_000)));
        }
    }
    for keys in ["a b", "b a", "a b c", "few a", "a few", "a none", "none a", "x y", "y x", "a a", "c", "none"] {
        for command in ["SINTER", "SUNION", "SDIFF"] {
            let question = format!("{command} {keys}");
            assert_eq!(sorted(&client.ask(&question)), sorted(&peer.ask(&question)), "{question}");
            both(&mut client, peer, &format!("{command}STORE to {keys}"));
            assert_eq!(sorted(&client.ask("SMEMBERS to")), sorted(&peer.ask("SMEMBERS to")), "{question}");
        }
    }
    // In a transaction that has changed the sets itself.
    for question in
        ["MULTI", "SADD a new", "SREM b new", "SINTERSTORE to a b", "SUNIONSTORE to a to", "SCARD to", "EXEC"]
    {
        both(&mut client, peer, question);
    }
    serving.stop();
}

/// Every member is drawn sooner or later, none twice for a positive count, and no deleted one.
#[test]
fn cells_are_drawn_at_random() {
    const MEMBERS: usize = 400;
    let serving = Serving::in_new_folder(start);
    let mut client = serving.connect();
    let mut there: BTreeMap<String, String> = BTreeMap::new();
    for number in 0..2 * MEMBERS {
        client.ask(&format!("SADD s member{number}"));
        client.ask(&format!("HSET h member{number} value{number}"));
        there.insert(format!("member{number}"), format!("value{number}"));
    }
    // Deleted cells lie between the live ones until the next start.
    for number in (0..2 * MEMBERS).step_by(2) {
        client.ask(&format!("SREM s member{number}"));
        client.ask(&format!("HDEL h member{number}"));
        there.remove(&format!("member{number}"));
    }
    let all: BTreeSet<String> = there.keys().cloned().collect();
    let words = |answer: String| -> Vec<String> { sorted(&answer).into_iter().map(str::to_owned).collect() };
    for count in [0, 1, 5, 16, 17, 99, 100, 101, MEMBERS - 1, MEMBERS, MEMBERS + 1] {
        for command in ["SRANDMEMBER s", "HRANDFIELD h"] {
            let drawn = words(client.ask(&format!("{command} {count}")));
            let different: BTreeSet<String> = drawn.iter().cloned().collect();
            assert!(different.len() == drawn.len() && drawn.len() == count.min(MEMBERS), "{command} {count}");
            assert!(different.is_subset(&all), "{command} {count}");
            if count == 0 {
                continue;
            }
            let again = words(client.ask(&format!("{command} -{count}")));
            assert!(again.len() == count && again.iter().all(|one| all.contains(one)), "{command} -{count}");
        }
    }
    for count in [3, 300, -3, -300] {
        let pairs = client.ask(&format!("HRANDFIELD h {count} WITHVALUES"));
        let pairs: Vec<&str> = pairs.trim_matches(['[', ']']).split(' ').collect();
        assert_eq!(pairs.len(), 2 * count_of(count));
        assert!(pairs.chunks(2).all(|pair| there.get(pair[0]).is_some_and(|value| value == pair[1])), "{pairs:?}");
    }
    for command in ["SRANDMEMBER s", "HRANDFIELD h"] {
        assert_eq!(client.ask(&format!("{command} -1048577")), "-ERR at most 1048576 elements can be drawn at a time");
    }
    // Single draws, and many at once.
    for question in ["SRANDMEMBER s", "HRANDFIELD h"] {
        let mut seen = BTreeSet::new();
        for _ in 0..25 {
            for _ in 0..MEMBERS {
                client.send(&question.split(' ').collect::<Vec<_>>());
            }
            seen.extend((0..MEMBERS).map(|_| client.reply()));
        }
        assert!(seen == all, "{question}: {} of {MEMBERS}", seen.len());
        let seen: BTreeSet<String> = words(client.ask(&format!("{question} -{}", 25 * MEMBERS))).into_iter().collect();
        assert!(seen == all, "{question}: {} of {MEMBERS}", seen.len());
    }
    let mut left = all.clone();
    for count in [1, 16, 17, 200] {
        let popped = words(client.ask(&format!("SPOP s {count}")));
        assert!(popped.len() == count && popped.iter().all(|member| left.remove(member)), "{count}");
    }
    assert_eq!(client.ask("SCARD s"), format!(":{}", left.len()));
    assert!(left.remove(&client.ask("SPOP s")));
    for question in ["MULTI", "SPOP s", "SRANDMEMBER s 500", "SPOP s 500", "SRANDMEMBER s"] {
        client.ask(question);
    }
    let told = words(client.ask("EXEC").replace(['[', ']'], " "));
    // One popped member, then all others twice, then none.
    assert_eq!(told.len(), 2 * left.len());
    assert_eq!(client.ask("EXISTS s"), ":0");
    serving.stop();
}

fn count_of(count: i64) -> usize {
    count.unsigned_abs() as usize
}
