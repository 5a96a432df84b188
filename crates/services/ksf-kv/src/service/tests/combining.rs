//! The work of `SDIFF`: counted in looks, not timed.

use super::*;

/// Members of the first set.
const MEMBERS: usize = 4_000;
const KEYS: usize = 500;

fn member(number: usize) -> String {
    format!("member {number:05}")
}

/// The reply to a command of these words, which has `words` behind them.
fn ask(world: &mut World, command: &str, words: &[String]) -> String {
    let command: Vec<&str> = command.split(' ').chain(words.iter().map(|word| &word[..])).collect();
    world.ask(0, &command)
}

fn add(world: &mut World, key: &str, members: &[String]) {
    for some in members.chunks(1_000) {
        assert_eq!(ask(world, &format!("SADD {key}"), some), format!(":{}\r\n", some.len()));
    }
}

/// A difference costs as much as its sets have, not as much as the first one for each of the others.
#[test]
fn difference_costs_the_sum_of_its_sets() {
    let all: Vec<String> = (0..MEMBERS).map(member).collect();
    // Of each of the others, the members.
    let missing = vec![Vec::new(); KEYS];
    let apart: Vec<_> = (0..KEYS).map(|_| vec!["none of them".to_owned()]).collect();
    let small: Vec<_> = (0..KEYS).map(|number| vec![member(7 * number), member(MEMBERS + number)]).collect();
    let larger = vec![(MEMBERS - 1..2 * MEMBERS).map(member).collect::<Vec<_>>()];
    for (name, others) in [("missing", missing), ("apart", apart), ("small", small), ("larger", larger)] {
        let mut world = World::new(1);
        world.complete();
        add(&mut world, "first", &all);
        let keys: Vec<String> = (0..others.len()).map(|number| format!("other{number}")).collect();
        keys.iter().zip(&others).for_each(|(key, members)| add(&mut world, key, members));
        let taken: Vec<&String> = others.iter().flatten().collect();
        let left: Vec<String> = all.iter().filter(|member| !taken.contains(member)).cloned().collect();
        let reply = array(left.into_iter());
        let members = all.len() + taken.len() + keys.len();
        for is_in_transaction in [false, true] {
            if is_in_transaction {
                // A walk through a set that the transaction has changed copies it whole.
                ask(&mut world, "MULTI", &[]);
                for key in ["first".to_owned()].iter().chain(&keys) {
                    ask(&mut world, &format!("SADD {key} changed"), &[]);
                }
            }
            let before = work::done();
            let told = ask(&mut world, "SDIFF first", &keys);
            let told = if is_in_transaction { ask(&mut world, "EXEC", &[]) } else { told };
            let units = work::done() - before;
            assert!(told.ends_with(&reply), "{name}, {is_in_transaction}: {}", &told[..told.len().min(200)]);
            let bound = 12 * members as u64;
            assert!(units <= bound, "{name}, {is_in_transaction}: {units} units of {bound}");
        }
    }
}
