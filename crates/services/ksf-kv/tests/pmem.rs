//! The server on persistent memory, or on what stands in for it: the same code of stores, flushes and fences, on tmpfs.

use crate::common::{Serving, counter, engines};
use ksf::engine::EngineKind;
use ksf::limits::Limits;
use ksf_kv::disk::DiskOptions;
use ksf_kv::{Medium, Settings};
use ksf_test::{Folder, own_network};

fn start(engine: EngineKind, folder: &Folder, medium: Medium) -> Serving {
    let options = DiskOptions { segment_bytes: 1 << 20, places: 6, medium, ..DiskOptions::default() };
    Serving::start_disk(engine, &folder.path(""), Limits::default(), Settings::default(), options)
}

/// Overwriting cleans the logs, and no command loses its place; what was acknowledged is there after a start on any medium, and
/// what is written there after the next one.
#[test]
fn what_one_medium_has_another_one_goes_on_with() {
    own_network();
    const CLIENTS: usize = 4;
    const KEYS: usize = 20;
    const ROUNDS: usize = 40;
    let value = |start: usize, client: usize, round: usize| format!("{start} {client} {round} {}", "v".repeat(20_000));
    for engine in engines() {
        let Some(folder) = Folder::in_memory_or_skip() else { return };
        let media = [Medium::PmemMemory, Medium::Block, Medium::PmemMemory, Medium::PmemMemory];
        for (number, medium) in media.into_iter().enumerate() {
            let serving = start(engine, &folder, medium);
            let mut client = serving.connect();
            assert!(client.ask("INFO persistence").contains(&format!("ksf_medium:{medium}\r\n")), "{engine}");
            if let Some(last) = number.checked_sub(1) {
                assert_eq!(client.ask("GET rounds"), (number * CLIENTS * ROUNDS).to_string(), "{engine} on {medium}");
                for (of, key) in (0..CLIENTS).flat_map(|of| (0..KEYS).map(move |key| (of, key))) {
                    client.send(&["GET", &format!("{of} {key}")]);
                    assert!(client.reply() == value(last, of, ROUNDS - 1), "{engine} on {medium}: {of} {key}");
                }
            }
            std::thread::scope(|scope| {
                for of in 0..CLIENTS {
                    let mut client = serving.connect();
                    scope.spawn(move || {
                        for round in 0..ROUNDS {
                            let value = value(number, of, round);
                            (0..KEYS).for_each(|key| client.send(&["SET", &format!("{of} {key}"), &value]));
                            client.send(&["INCR", "rounds"]);
                            (0..KEYS).for_each(|_| assert_eq!(client.reply(), "+OK"));
                            assert!(client.reply().starts_with(':'));
                        }
                    });
                }
            });
            let cleaned = counter(&serving, "segments_cleaned");
            assert!(cleaned > 10, "{engine} on {medium}: {cleaned}");
            serving.stop();
        }
    }
}

/// `ksf store check` reads a store that was mapped as any other.
#[test]
fn a_store_that_was_mapped_is_checked() {
    let Some(folder) = Folder::in_memory_or_skip() else { return };
    own_network();
    for engine in engines() {
        let serving = start(engine, &folder, Medium::PmemMemory);
        let mut client = serving.connect();
        assert_eq!(client.ask("FLUSHALL"), "+OK");
        for number in 0..500 {
            client.send(&["SET", &format!("key {number}"), &"v".repeat(number * 3)]);
            client.send(&["RPUSH", "list", &number.to_string()]);
        }
        for number in 1..=500 {
            assert_eq!((client.reply(), client.reply()), ("+OK".into(), format!(":{number}")), "{engine}");
        }
        serving.stop();
        let check = ksf_kv::offline::check(&folder.path("")).unwrap();
        assert_eq!(check.recovery.keys, 501, "{engine}");
    }
}
