//! The index against the standard library's map, and from several threads.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use ksf_store::format::Lsn;
use ksf_store::index::leaf::{ENTRIES_MAX, Entry, Origin, Value};
use ksf_store::index::{Index, Position};
use ksf_store::memory::Memory;
use ksf_store::work;
use ksf_test::Random;

fn set(index: &Index, key: &[u8], value: &[u8], version: u64, expires_ms: Option<u64>) {
    let origin = Origin { log: 3, lsn: Lsn(version * 8), version };
    index.with(&[key], |locked| locked.set(&Entry { key, value: Value::Here(value), origin, expires_ms, older: 0 }));
}

#[test]
fn it_has_what_a_map_has() {
    let mut random = Random::of_test(1);
    let index = Index::default();
    let mut map: BTreeMap<Vec<u8>, (Vec<u8>, u64, Option<u64>)> = BTreeMap::new();
    for version in 1..=60_000 {
        let key = format!("key {}", random.below(7_000)).into_bytes();
        if random.one_in(3) {
            let removed = index.with(&[&key], |locked| locked.remove(&key));
            assert_eq!(removed, map.remove(&key).is_some());
        } else {
            let value = vec![version as u8; random.within(0..=40)];
            let expires_ms = random.one_in(5).then_some(version);
            set(&index, &key, &value, version, expires_ms);
            map.insert(key.clone(), (value, version, expires_ms));
        }
        let probe = format!("key {}", random.below(7_000)).into_bytes();
        index.with(&[&probe], |locked| {
            let found = locked.get(&probe).map(|entry| (entry.value, entry.origin.version, entry.expires_ms));
            let wanted = map.get(&probe).map(|(value, version, expires)| (Value::Here(value), *version, *expires));
            assert_eq!(found, wanted);
        });
    }
    assert_eq!(index.len(), map.len());
    let from = b"key 3".to_vec();
    let mut rest = map.range(from.clone()..);
    index.scan(&from, |entry| {
        let (key, (value, version, _)) = rest.next().expect("no more than there is");
        assert_eq!((entry.key, &entry.value), (&key[..], &Value::Here(value)));
        assert_eq!(entry.origin, Origin { log: 3, lsn: Lsn(version * 8), version: *version });
        true
    });
    assert!(rest.next().is_none());
}

/// A leaf that stays long has each later command on it search, copy and lock all that is in it.
#[test]
fn a_command_with_many_new_keys_leaves_no_long_leaf() {
    const KEYS: usize = 20_000;
    let memory = Arc::new(Memory::new(usize::MAX));
    let index = Index::new(Arc::clone(&memory), true);
    let names: Vec<Vec<u8>> = (0..KEYS).map(|number| format!("key {number:06}").into_bytes()).collect();
    let keys: Vec<&[u8]> = names.iter().map(|name| &name[..]).collect();
    index.with(&keys, |locked| {
        for (key, version) in keys.iter().zip(1..) {
            let origin = Origin { log: 3, lsn: Lsn(version * 8), version };
            locked.set(&Entry { key, value: Value::Here(key), origin, expires_ms: None, older: 0 });
        }
    });
    let before = work::done();
    assert_eq!(index.count(b"", b"\xff"), KEYS);
    let leaves = (work::done() - before) as usize;
    assert!(leaves >= KEYS / ENTRIES_MAX, "{KEYS} keys are in {leaves} leaves");
    let mut rest = keys.iter();
    index.scan(b"", |entry| {
        assert_eq!(Some((entry.key, entry.value)), rest.next().map(|key| (*key, Value::Here(key))));
        true
    });
    assert!(rest.next().is_none());
    assert_eq!(memory.sizes(), index.measure());
}

/// Keys that lie at the same place of two leaves, or change places, while one command has all of them.
#[test]
fn a_command_finds_each_of_its_keys() {
    let mut random = Random::of_test(2);
    let index = Index::default();
    let name = |number: u64| format!("key {number:04}").into_bytes();
    let mut map: BTreeMap<Vec<u8>, (Vec<u8>, u64)> = BTreeMap::new();
    for version in 1..=2_000 {
        set(&index, &name(version), &[0; 8], version, None);
        map.insert(name(version), (vec![0; 8], version));
    }
    for round in 1..=500 {
        let names: Vec<Vec<u8>> = (0..6).map(|_| name(random.below(2_100))).collect();
        let keys: Vec<&[u8]> = names.iter().map(|name| &name[..]).collect();
        index.with(&keys, |locked| {
            for at in 0..20 {
                let version = 10_000 + round * 20 + at;
                let key = keys[random.below(6) as usize];
                if random.one_in(4) {
                    assert_eq!(locked.remove(key), map.remove(key).is_some());
                } else if random.one_in(2) {
                    // Often of the length that is there.
                    let value = vec![version as u8; random.within(7..=8)];
                    let origin = Origin { log: 3, lsn: Lsn(version * 8), version };
                    locked.set(&Entry { key, value: Value::Here(&value), origin, expires_ms: None, older: 0 });
                    map.insert(key.to_vec(), (value, version));
                }
                for key in &keys {
                    let found = locked.get(key).map(|entry| (entry.key, entry.value, entry.origin.version));
                    let wanted = map.get(*key).map(|(value, version)| (*key, Value::Here(value), *version));
                    assert_eq!(found, wanted);
                }
            }
        });
    }
    assert_eq!(index.len(), map.len());
}

/// Keys that begin alike, that end where others go on, and that have zeros at their ends: what a search compares of them first is
/// the same for many.
#[test]
fn keys_that_are_alike_are_told_apart() {
    for seed in 0..40 {
        let mut random = Random::of_test(seed);
        let index = Index::default();
        let mut map: BTreeMap<Vec<u8>, u64> = BTreeMap::new();
        let fronts = [&b""[..], b"user:", b"user:0000000", b"user:0000000\0\0\0\0\0\0\0\0\0", b"\xff"];
        // Seldom all fronts, so that the keys of most leaves share more than what all keys do.
        let fronts = &fronts[..random.within(1..=fronts.len())];
        let draw = move |random: &mut Random| {
            let mut key = fronts[random.below(fronts.len() as u64) as usize].to_vec();
            let more = random.within(0..=12);
            key.extend((0..more).map(|_| [0, 0, 1, b'0', 0xff][random.below(5) as usize]));
            key
        };
        for version in 1..=3_000 {
            let key = draw(&mut random);
            if random.one_in(4) {
                let removed = index.with(&[&key], |locked| locked.remove(&key));
                assert_eq!(removed, map.remove(&key).is_some(), "seed {seed}: {}", key.escape_ascii());
            } else {
                set(&index, &key, &[], version, None);
                map.insert(key, version);
            }
            let probe = draw(&mut random);
            let found = index.with(&[&probe], |locked| locked.get(&probe).map(|entry| entry.origin.version));
            assert_eq!(found, map.get(&probe).copied(), "seed {seed}: {}", probe.escape_ascii());
        }
        let mut rest = map.iter();
        index.scan(b"", |entry| {
            assert_eq!(Some((entry.key, &entry.origin.version)), rest.next().map(|(key, version)| (&key[..], version)));
            true
        });
        assert!(rest.next().is_none());
    }
}

/// Others see a command on several keys whole: the sum over all keys stays what it was.
#[test]
fn commands_on_several_keys_are_seen_whole() {
    const KEYS: u64 = 2_000;
    let index = Index::default();
    let key = |number: u64| format!("{number:05}").into_bytes();
    let number = |value: &Value<'_>| match value {
        Value::Here(bytes) => i64::from_le_bytes((*bytes).try_into().unwrap()),
        Value::OnMedium(_) | Value::Cells(_) | Value::Gone => unreachable!("all values are short"),
    };
    (0..KEYS).for_each(|at| set(&index, &key(at), &100i64.to_le_bytes(), 1, None));
    std::thread::scope(|scope| {
        for seed in 0..4 {
            let index = &index;
            scope.spawn(move || {
                let mut random = Random::new(seed);
                for version in 2..5_000 {
                    let (from, to) = (key(random.below(KEYS)), key(random.below(KEYS)));
                    let other = format!("{seed} new {version}").into_bytes();
                    index.with(&[&from, &to, &other], |locked| {
                        if from == to {
                            return;
                        }
                        let origin = Origin { version, ..Origin::default() };
                        for (key, change) in [(&from, -7), (&to, 7)] {
                            let sum = number(&locked.get(key).unwrap().value) + change;
                            let bytes = sum.to_le_bytes();
                            locked.set(&Entry { key, value: Value::Here(&bytes), origin, expires_ms: None, older: 0 });
                        }
                        let zero = 0i64.to_le_bytes();
                        locked.set(&Entry {
                            key: &other,
                            value: Value::Here(&zero),
                            origin,
                            expires_ms: None,
                            older: 0,
                        });
                    });
                    if version % 100 == 0 {
                        let (a, b) = (key(random.below(KEYS)), key(random.below(KEYS)));
                        index.with(&[&a, &b], |locked| assert!(locked.get(&a).is_some() && locked.get(&b).is_some()));
                    }
                }
            });
        }
    });
    let mut sum = 0;
    index.scan(b"", |entry| {
        sum += number(&entry.value);
        true
    });
    assert_eq!(sum, KEYS as i64 * 100);
}

/// The promise of the store: an 8-byte key with an 8-byte value costs at most 100 bytes.
#[test]
fn a_short_key_with_a_short_value_costs_less_than_a_hundred_bytes() {
    const KEYS: u64 = 200_000;
    for in_order in [true, false] {
        let index = Index::default();
        let mut random = Random::of_test(2);
        for at in 0..KEYS {
            let key = if in_order { at } else { random.bits() };
            set(&index, &key.to_be_bytes(), &at.to_le_bytes(), at + 1, None);
        }
        let each = index.measure().used / index.len();
        assert!(each <= 90, "{each} bytes each, in order: {in_order}");
    }
}

/// Keys that are there all the time are shown, whatever comes and goes and whatever leaves are split meanwhile, also those that
/// lie between others; and each once, if nothing does.
#[test]
fn a_walk_in_steps_shows_what_is_there_all_the_time() {
    const KEYS: u64 = 3_000;
    for seed in 0..30 {
        let mut random = Random::of_test(seed);
        let (index, mut version) = (Index::default(), 0);
        let mut put = |key: &[u8]| {
            version += 1;
            set(&index, key, b"value", version, None);
        };
        let of = |name: &str, number: u64| format!("{name} {number:05}").into_bytes();
        for number in 0..KEYS {
            ["before", "in", "later"].iter().for_each(|name| put(&of(name, number)));
        }
        let stays: BTreeSet<Vec<u8>> =
            (0..KEYS).filter(|number| number % 3 > 0).map(|number| of("in", number)).collect();
        for is_quiet in [true, false] {
            let (mut from, mut seen) = (None, BTreeMap::<Vec<u8>, usize>::new());
            loop {
                let count = random.within(1..=150);
                let mut shown = 0;
                from = index.step(
                    b"in ",
                    from,
                    count,
                    |_| true,
                    |entry| {
                        *seen.entry(entry.key.to_vec()).or_default() += 1;
                        shown += 1;
                    },
                );
                assert!(shown <= 2 * count + 4, "{shown} keys for {count}");
                let Some(position) = from else { break };
                assert!(position.number() > 0 && position.number() >> Position::BITS == 0);
                from = Some(Position::of_number(position.number()));
                let changes = if is_quiet { 0 } else { random.within(0..=40) };
                for _ in 0..changes {
                    let gone = of("in", random.below(KEYS / 3) * 3);
                    index.with(&[&gone], |locked| locked.remove(&gone));
                    put(&[&of("in", random.below(KEYS))[..], b" came"].concat());
                }
            }
            assert!(stays.iter().all(|key| seen.contains_key(key)), "seed {seed}: a key was passed over");
            assert!(seen.keys().all(|key| key.starts_with(b"in ")), "seed {seed}: others were shown");
            assert!(!is_quiet || seen.len() as u64 == KEYS && seen.values().all(|times| *times == 1), "seed {seed}");
        }
        // A leaf that is no longer there begins anew, and ends.
        let mut from = Some(Position::of_number(1 << 40));
        let mut seen = BTreeSet::new();
        loop {
            from = index.step(
                b"in ",
                from,
                100,
                |_| true,
                |entry| {
                    seen.insert(entry.key.to_vec());
                },
            );
            if from.is_none() {
                break;
            }
        }
        assert!(seen.is_superset(&stays), "seed {seed}");
    }
}

#[test]
fn every_key_is_as_likely_to_be_drawn_as_any_other() {
    const KEYS: u64 = 3_000;
    const DRAWS: u64 = 60 * KEYS;
    let mut random = Random::of_test(1);
    let index = Index::default();
    assert_eq!(index.draw(|| random.below(u64::MAX), |_| Some(())), None);
    (0..KEYS).for_each(|number| set(&index, &number.to_be_bytes(), b"", number + 1, None));
    // Short leaves, and long ones.
    (0..KEYS / 2).filter(|number| number % 10 > 0).for_each(|number| {
        index.with(&[&number.to_be_bytes()], |locked| locked.remove(&number.to_be_bytes()));
    });
    let mut drawn = BTreeMap::<Vec<u8>, u64>::new();
    for _ in 0..DRAWS {
        let key = index.draw(|| random.below(u64::MAX), |entry| Some(entry.key.to_vec())).unwrap();
        *drawn.entry(key).or_default() += 1;
    }
    let (left, mean) = (KEYS / 2 + KEYS / 20, DRAWS / (KEYS / 2 + KEYS / 20));
    assert_eq!(drawn.len() as u64, left);
    assert!(drawn.values().all(|times| (mean / 2..mean * 2).contains(times)), "{drawn:?}");
    // Where nothing counts but one key, that one is found.
    let last = (KEYS - 1).to_be_bytes();
    let found = index.draw(|| random.below(u64::MAX), |entry| (entry.key == last).then_some(()));
    assert_eq!(found, Some(()));
}

/// Of keys between two, and of those behind some, each count and each key is that of a map.
#[test]
fn keys_are_counted_and_skipped_without_a_look_at_each() {
    let mut random = Random::of_test(7);
    for keys in [0, 1, 300, 40_000] {
        let (index, mut map) = (Index::default(), BTreeSet::new());
        for number in 0..keys {
            let key = format!("{:06}", random.below(2 * keys as u64)).into_bytes();
            set(&index, &key, b"", number as u64 + 1, None);
            map.insert(key);
        }
        for _ in 0..300 {
            let mut key = || format!("{:06}", random.below(2 * keys as u64 + 1)).into_bytes();
            let (from, to) = (key(), key());
            let between = if from <= to { map.range(from.clone()..to.clone()).count() } else { 0 };
            assert_eq!(index.count(&from, &to), between, "{from:?} {to:?}");
            let skipped = random.below(keys as u64 + 2) as usize;
            let mut found = Vec::new();
            index.scan_behind(&from, skipped, |entry| {
                found.push(entry.key.to_vec());
                found.len() < 3
            });
            assert_eq!(found, map.range(from..).skip(skipped).take(3).cloned().collect::<Vec<_>>(), "{skipped}");
        }
    }
}

/// A leaf that has nothing left takes no memory, whoever took its keys out, and however many there were.
#[test]
fn memory_comes_back_when_keys_go() {
    const KEYS: u64 = 1_000_000;
    let memory = Arc::new(Memory::new(usize::MAX));
    let index = Index::new(Arc::clone(&memory), true);
    let empty = memory.sizes();
    let name = |number: u64| number.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes();
    for number in 0..KEYS {
        set(&index, &name(number), &number.to_le_bytes(), number + 1, None);
    }
    assert!(memory.sizes().used > 56 * KEYS as usize);
    for number in 0..KEYS {
        let key = name(number);
        assert!(index.with(&[&key], |locked| locked.remove(&key)));
    }
    assert_eq!(index.len(), 0);
    assert_eq!(index.measure(), memory.sizes(), "what is counted is what is there");
    // The first leaf stays, with the room that it has.
    let left = memory.sizes().used - empty.used;
    assert!(left < 64 << 10, "{left} bytes are left of {KEYS} keys that are gone");
    set(&index, b"again", b"1", KEYS + 1, None);
    assert_eq!(
        index.with(&[b"again"], |locked| locked.get(b"again").map(|entry| entry.origin.version)),
        Some(KEYS + 1)
    );
}

/// A walk that is in a leaf that is taken away goes on behind it: it neither ends nor begins anew.
#[test]
fn a_walk_goes_on_where_a_leaf_is_gone() {
    const KEYS: u64 = 20_000;
    let index = Index::default();
    let name = |number: u64| format!("key {number:08}").into_bytes();
    (0..KEYS).for_each(|number| set(&index, &name(number), b"", number + 1, None));
    let (mut from, mut shown, mut steps, mut deleted) = (None, Vec::new(), 0, BTreeSet::new());
    loop {
        from = index.step(b"", from, 300, |_| true, |entry| shown.push(entry.key.to_vec()));
        if from.is_none() {
            break;
        }
        steps += 1;
        if steps % 8 == 3 {
            // Another client takes out all around the place at which it is about to go on.
            let last = shown.iter().max().map_or(0, |key| std::str::from_utf8(&key[4..]).unwrap().parse().unwrap());
            for number in u64::saturating_sub(last, 600)..(last + 600).min(KEYS) {
                let key = name(number);
                index.with(&[&key], |locked| locked.remove(&key));
                deleted.insert(key);
            }
        }
        assert!(steps < 2 * KEYS / 300, "it began anew: {steps} steps");
    }
    assert!(shown.len() as u64 <= KEYS, "{} keys were shown: it began anew", shown.len());
    let shown: BTreeSet<Vec<u8>> = shown.into_iter().collect();
    assert!((0..KEYS).map(name).all(|key| deleted.contains(&key) || shown.contains(&key)), "a key was left out");
    assert!(deleted.len() as u64 > 3 * 600);
}
