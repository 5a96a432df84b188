//! Messages that a service keeps where they landed, while there is room: copies beyond that, and never a shard that
//! waits for them. Of those in short slots tests/short_slots.rs tells.

use std::collections::HashSet;
use std::io::Write;
use std::net::TcpStream;
use std::sync::Arc;

use crate::common::keeper::Keeper;
use crate::common::net::*;
use ksf::Server;
use ksf::engine::EngineKind;
use ksf::pool::Chunk;
use ksf::server::{SLOT_BYTES, SLOTS};

fn start(engine: EngineKind, slots: u32) -> (Server, Arc<Keeper>) {
    let keeper = Arc::new(Keeper::default());
    let cpus = ksf::cpus::allowed().unwrap()[..1].to_vec();
    let builder = Server::builder().engine(engine).cpus(Some(cpus)).slots(SLOT_BYTES, slots).short_slots(0);
    (builder.listen(ANY.parse().unwrap(), Arc::clone(&keeper), None).start().unwrap(), keeper)
}

fn line(number: usize) -> Vec<u8> {
    format!("line {number}\n").into_bytes()
}

/// One after the other, so that each has a slot of its own.
fn ask_lines(peer: &mut TcpStream, lines: usize) {
    for number in 0..lines {
        ask(peer, &line(number), &line(number));
    }
}

/// Asserts that these are the lines, and that so many of them lie in slots, each in its own.
fn assert_kept(chunks: &[Chunk], lines: usize, in_slots: usize, what: &str) {
    let got: Vec<_> = chunks.iter().map(|chunk| [chunk, &b"\n"[..]].concat()).collect();
    assert_eq!(got, (0..lines).map(line).collect::<Vec<_>>(), "{what}");
    let slots: Vec<_> = chunks.iter().filter_map(|chunk| chunk.slot()).map(|(index, _)| index).collect();
    assert_eq!(slots.len(), in_slots, "{what}: slots kept");
    assert_eq!(slots.iter().collect::<HashSet<_>>().len(), in_slots, "{what}: a slot given out twice");
}

/// Those in the kernel to receive into do not count: on io_uring they are half of the default.
#[test]
fn half_of_the_slots_are_kept_and_then_copies_are_made() {
    for engine in engines_in_own_network() {
        for slots in [SLOTS, 20, 3, 1] {
            let what = format!("{engine} with {slots} slots");
            let (server, keeper) = start(engine, slots);
            let mut peer = connect(&server);
            let half = slots as usize / 2;
            let mut copies = 0;
            for _ in 0..3 {
                ask_lines(&mut peer, half + 50);
                let kept = keeper.take();
                assert_kept(&kept, half + 50, half, &what);
                copies += 50;
                assert_eq!(count(&server, "kept_as_copy"), copies, "{what}");
                // Their slots come back from another thread, which tells nobody.
                std::thread::spawn(move || drop(kept)).join().unwrap();
            }
            // One request at a time always finds a slot to be received into.
            assert_eq!(count(&server, "slots_exhausted"), 0, "{what}");
        }
    }
}

/// More requests at once than there are slots, while as many are kept as may be, and while they come back.
#[test]
fn a_shard_with_all_it_may_keep_serves_on() {
    for engine in engines_in_own_network() {
        for slots in [SLOTS, 20, 3, 1] {
            let (server, keeper) = start(engine, slots);
            let mut peers: Vec<_> = (0..slots + 10).map(|_| connect(&server)).collect();
            ask_lines(&mut peers[0], slots as usize);
            let mut kept = keeper.take();
            for round in 0..20 {
                for peer in &mut peers {
                    peer.write_all(&line(round)).unwrap();
                }
                // In the middle of it half of them are let go, on another thread.
                let rest = kept.split_off(kept.len() / 2);
                let dropper = std::thread::spawn(move || drop(rest));
                for peer in &mut peers {
                    expect(peer, &line(round));
                }
                dropper.join().unwrap();
                let more = keeper.take();
                assert_eq!(more.len(), peers.len(), "{engine} with {slots} slots");
                kept.extend(more);
                let in_slots = kept.iter().filter(|chunk| chunk.slot().is_some()).count();
                assert!(in_slots <= slots as usize / 2, "{engine}: {in_slots} of {slots} slots are kept");
            }
        }
    }
}
