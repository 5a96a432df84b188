use super::*;

/// Most machines reserve none: then the pool is refused by name, which is all that can be seen there.
#[test]
fn huge_pages_are_used_or_refused_by_name() {
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap();
    let free = meminfo.lines().find_map(|line| line.strip_prefix("HugePages_Free:")).map_or("0", str::trim);
    match Pool::new(Memory::HugePages, 4096, 16) {
        Err(error) => {
            let text = format!("{error} {:?}", std::error::Error::source(&error));
            assert!(text.contains("vm.nr_hugepages"), "{text}");
            eprintln!("no memory on huge pages was tried: {free} are free");
        }
        Ok(mut pool) => {
            let mut slot = pool.take().unwrap();
            slot.as_mut_slice().fill(7);
            let at = slot.as_mut_slice().as_ptr().addr();
            let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
            let range = |line: &str| {
                let (from, to) = line.split(' ').next()?.split_once('-')?;
                Some(usize::from_str_radix(from, 16).ok()?..usize::from_str_radix(to, 16).ok()?)
            };
            let mut lines = smaps.lines().skip_while(|line| !range(line).is_some_and(|range| range.contains(&at)));
            let page = lines.find_map(|line| line.strip_prefix("KernelPageSize:")).unwrap();
            assert_eq!(page.trim(), "2048 kB");
            assert_eq!(slot.freeze(4096)[4095], 7);
        }
    }
}

fn pool(slots: u32) -> Pool {
    Pool::new(Memory::Anonymous, 64, slots).unwrap()
}

#[test]
fn a_slot_comes_back_only_when_its_last_holder_drops_it() {
    let mut pool = pool(1);
    let mut slot = pool.take().unwrap();
    slot.as_mut_slice()[..5].copy_from_slice(b"hello");
    let chunk = slot.freeze(5);
    let tail = chunk.slice(1..5);
    drop(chunk);
    assert!(pool.take().is_none());
    assert_eq!(&*tail, b"ello");
    assert_eq!(tail.slot(), Some((0, 1)));
    drop(tail);
    assert_eq!(pool.in_use(), 0);
    assert!(pool.take().is_some());
}

#[test]
fn slots_freed_by_other_threads_are_found_again_and_each_once() {
    let mut pool = pool(64);
    for _ in 0..200 {
        let chunks: Vec<_> = std::iter::from_fn(|| pool.take()).map(|slot| slot.freeze(64)).collect();
        assert_eq!(chunks.len(), 64);
        let mut indexes: Vec<_> = chunks.iter().map(|chunk| chunk.slot().unwrap().0).collect();
        indexes.sort_unstable();
        indexes.dedup();
        assert_eq!(indexes.len(), 64, "a slot was given out twice");
        std::thread::scope(|scope| {
            let mut chunks = chunks.into_iter();
            for _ in 0..4 {
                let part: Vec<_> = chunks.by_ref().take(16).collect();
                scope.spawn(move || drop(part));
            }
        });
    }
}

#[test]
fn the_pool_survives_in_its_slots() {
    let chunk = pool(2).take().unwrap().freeze(64);
    assert_eq!(&*chunk, [0; 64]);
}

#[test]
fn a_pool_in_a_file_writes_through() {
    let file = rustix::fs::memfd_create("slots", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, 128).unwrap();
    let again = || file.try_clone().unwrap();
    let mut pool = Pool::new(Memory::File(again()), 64, 2).unwrap();
    let mut slot = pool.take().unwrap();
    slot.as_mut_slice()[0] = 7;
    let (index, _) = slot.freeze(1).slot().unwrap();
    let mut byte = [0];
    rustix::io::pread(&file, &mut byte, u64::from(index) * 64).unwrap();
    assert_eq!(byte, [7]);
    assert!(Pool::new(Memory::File(again()), 64, 3).is_err());
}

fn temporary_file(bytes: u64) -> (tempfile::TempDir, impl Fn() -> OwnedFd) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("slots");
    std::fs::File::create(&path).unwrap().set_len(bytes).unwrap();
    (folder, move || std::fs::File::options().read(true).write(true).open(&path).unwrap().into())
}

#[test]
fn live_slots_are_found_by_name_and_not_received_into() {
    let (_folder, open) = temporary_file(4 * 64);
    let spec = || PoolSpec { id: 7, headroom_bytes: 8, ..PoolSpec::new(Memory::File(open()), 64, 4) };
    let mut pool = Pool::open(spec()).unwrap().pool;
    let mut names = Vec::new();
    let mut held = Vec::new();
    for text in [b"one", b"two"] {
        let mut slot = pool.take().unwrap();
        slot.as_mut_slice()[..3].copy_from_slice(text);
        let chunk = slot.freeze(3);
        names.push(chunk.name().unwrap());
        held.push(chunk);
    }
    assert_eq!(names.iter().map(|name| (name.pool, name.offset, name.len)).collect::<Vec<_>>(), [(7, 8, 3); 2]);
    assert!(Pool::open(spec()).is_err(), "the file is locked");
    drop((pool, held));

    // After a restart: the live ones are there, and only the others are given out.
    let Opened { mut pool, live } = Pool::open(PoolSpec { live: names.clone(), ..spec() }).unwrap();
    assert_eq!(live.iter().map(|chunk| &**chunk).collect::<Vec<_>>(), [b"one", b"two"]);
    assert_eq!(live.iter().map(|chunk| chunk.name().unwrap()).collect::<Vec<_>>(), names);
    assert_eq!((pool.in_use(), pool.kept()), (2, 2));
    let free: Vec<_> = std::iter::from_fn(|| pool.take()).collect();
    assert_eq!(free.len(), 2);
    drop((free, live));
    assert_eq!((pool.in_use(), pool.kept()), (0, 0));
    let all: Vec<_> = std::iter::from_fn(|| pool.take()).collect();
    assert_eq!(all.len(), 4, "what is no longer live is received into again");
}

#[test]
fn names_outside_of_the_pool_are_refused() {
    let name = SlotName { pool: 0, index: 0, offset: 0, len: 64 };
    let wrong = [
        SlotName { pool: 1, ..name },
        SlotName { index: 4, ..name },
        SlotName { offset: 1, ..name },
        SlotName { offset: u32::MAX, ..name },
    ];
    for name in wrong {
        let spec = PoolSpec { live: vec![name], ..PoolSpec::new(Memory::Anonymous, 64, 4) };
        let error = Pool::open(spec).unwrap_err().to_string();
        assert!(error.contains("outside of the pool"), "{error}");
    }
    let twice = PoolSpec { live: vec![name; 2], ..PoolSpec::new(Memory::Anonymous, 64, 4) };
    let Opened { pool, live } = Pool::open(twice).unwrap();
    assert_eq!((pool.in_use(), live.len()), (1, 2));
}

#[test]
fn headroom_is_written_by_the_only_holder() {
    let spec = PoolSpec { headroom_bytes: 16, ..PoolSpec::new(Memory::Anonymous, 64, 1) };
    let mut pool = Pool::open(spec).unwrap().pool;
    let mut slot = pool.take().unwrap();
    assert_eq!((slot.capacity(), slot.as_mut_slice().len()), (48, 48));
    slot.as_mut_slice()[..4].copy_from_slice(b"data");
    let mut chunk = slot.freeze(4);
    assert_eq!((chunk.slot(), &*chunk), (Some((0, 16)), &b"data"[..]));
    let other = chunk.clone();
    assert!(chunk.headroom_mut().is_none());
    drop(other);
    chunk.headroom_mut().unwrap().copy_from_slice(b"a header of 16 b");
    assert_eq!(&*chunk, b"data");
    let all = PoolSpec { headroom_bytes: 64, ..PoolSpec::new(Memory::Anonymous, 64, 1) };
    assert!(Pool::open(all).is_err());
}

#[test]
fn the_owner_sets_how_many_are_kept() {
    let spec = PoolSpec { kept_max: 3, ..PoolSpec::new(Memory::Anonymous, 64, 4) };
    let mut pool = Pool::open(spec).unwrap().pool;
    let chunks: Vec<_> = (0..4).map(|_| pool.take().unwrap().freeze(1).into_kept()).collect();
    assert_eq!(chunks.iter().filter(|chunk| chunk.name().is_some()).count(), 3);
}

/// This machine's file systems are on disks, or in memory without DAX.
#[test]
fn what_is_no_persistent_memory_is_refused_by_name() {
    let (_folder, open) = temporary_file(4096);
    match Pool::new(Memory::Dax(open()), 4096, 1) {
        Ok(_) => println!("the temporary folder is on persistent memory"),
        Err(error) => assert!(error.to_string().contains("MAP_SYNC"), "{error}"),
    }
}

/// What an engine holds to receive into does not count, and neither does what is only looked at.
#[test]
fn half_of_the_slots_are_kept_and_then_copies_are_made() {
    let mut pool = pool(8);
    let ring: Vec<_> = (0..4).map(|_| pool.take().unwrap()).collect();
    let received: Vec<_> = (0..4).map(|_| pool.take().unwrap().freeze(64)).collect();
    assert_eq!((pool.in_use(), pool.kept()), (8, 0));
    let mut kept: Vec<_> = received.iter().map(|chunk| chunk.slice(1..9).into_kept()).collect();
    assert!(kept.iter().all(|chunk| chunk.slot().is_some()));
    // Again, and another part: a slot counts once.
    kept.push(received[0].clone().into_kept());
    assert!(received[0].slice(9..64).keep());
    assert_eq!((pool.kept(), pool.take_copies()), (4, 0));

    let mut slot = ring.into_iter().next().unwrap();
    slot.as_mut_slice()[..4].copy_from_slice(b"more");
    let more = slot.freeze(4);
    assert!(!more.keep());
    let copy = more.clone().into_kept();
    assert_eq!((copy.slot(), &*copy), (None, &b"more"[..]));
    assert_eq!((pool.kept(), pool.take_copies(), pool.take_copies()), (4, 1, 0));
    // One hold less on a slot is none less; the last one makes room.
    drop(received);
    assert!(!more.keep());
    kept.swap_remove(1);
    assert_eq!(pool.kept(), 3);
    assert!(more.keep());
    drop((kept, more));
    assert_eq!((pool.kept(), pool.in_use()), (0, 0));
    // A slot that comes back has lost its mark.
    let again: Vec<_> = (0..8).map(|_| pool.take().unwrap().freeze(1)).collect();
    assert_eq!((pool.kept(), again.iter().filter(|chunk| chunk.keep()).count()), (0, 4));
}

#[test]
fn of_one_slot_none_is_kept() {
    let chunk = pool(1).take().unwrap().freeze(64);
    assert_eq!(chunk.into_kept().slot(), None);
}

/// Holders on several threads keep the same slots and let go of them, and nothing is counted twice or forgotten.
#[test]
fn what_is_kept_is_counted_right_from_many_threads() {
    let mut pool = pool(16);
    for _ in 0..200 {
        let chunks: Vec<_> = std::iter::from_fn(|| pool.take()).map(|slot| slot.freeze(64)).collect();
        assert_eq!(chunks.len(), 16);
        let barrier = std::sync::Barrier::new(4);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                let (chunks, barrier) = (chunks.clone(), &barrier);
                scope.spawn(move || {
                    barrier.wait();
                    for chunk in chunks {
                        let _ = chunk.into_kept();
                    }
                });
            }
            assert!(pool.kept() <= 8);
        });
        assert_eq!(pool.kept(), 8, "this thread still holds all of them");
        drop(chunks);
        assert_eq!(pool.kept(), 0);
    }
}

fn with_short(slots: u32, short_slots: u32) -> Pool {
    let long = PoolSpec::new(Memory::Anonymous, 8192, slots);
    Pool::open(long.with_short(PoolSpec::short(Memory::Anonymous, short_slots))).unwrap().pool
}

fn received(pool: &mut Pool, bytes: &[u8]) -> Chunk {
    let mut slot = pool.take().unwrap();
    slot.as_mut_slice()[..bytes.len()].copy_from_slice(bytes);
    slot.freeze(bytes.len())
}

/// A short slot, then the long one it was received into, then the heap.
#[test]
fn a_short_message_is_kept_where_there_is_room() {
    let mut pool = with_short(4, 2);
    let mut keep = |text: &[u8]| {
        let chunk = received(&mut pool, text).into_kept_message();
        assert_eq!(&*chunk, text);
        chunk
    };
    let long = keep(&[7; 2049]);
    let short: Vec<_> = (0..5).map(|number| keep(&[number; 2048])).collect();
    let places: Vec<_> = short.iter().map(|chunk| chunk.name().map(|name| name.pool)).collect();
    assert_eq!(places, [Some(SHORT_ID), Some(SHORT_ID), Some(0), None, None]);
    assert_eq!(short.iter().map(Chunk::occupied_bytes).collect::<Vec<_>>(), [2048, 2048, 8192, 4096, 4096]);
    assert_eq!((long.name().unwrap().pool, long.occupied_bytes()), (0, 8192));
    let usage = pool.usage();
    assert_eq!((usage.short.kept, usage.short.kept_bytes()), (2, 4096));
    assert_eq!((usage.long.kept, usage.long.kept_bytes(), pool.take_copies()), (2, 16384, 2));
    // Kept once more: where it is.
    assert_eq!(short[0].clone().into_kept_message().name(), short[0].name());
    drop((long, short));
    assert_eq!((pool.usage().short.in_use, pool.usage().short.kept, pool.kept()), (0, 0, 0));
    assert_eq!(received(&mut pool, b"again").into_kept_message().name().unwrap().pool, SHORT_ID);
}

#[test]
fn the_owner_sets_how_many_short_slots_are_kept() {
    let short = PoolSpec { kept_max: 1, headroom_bytes: 48, ..PoolSpec::short(Memory::Anonymous, 8) };
    let spec = PoolSpec::new(Memory::Anonymous, 8192, 8).with_short(short);
    let mut pool = Pool::open(spec).unwrap().pool;
    assert_eq!(received(&mut pool, &[1; 2001]).into_kept_message().name().unwrap().pool, 0, "behind the headroom");
    let first = received(&mut pool, &[1; 2000]).into_kept_message();
    assert_eq!((first.name().unwrap().pool, first.name().unwrap().offset), (SHORT_ID, 48));
    assert_eq!(received(&mut pool, b"second").into_kept_message().name().unwrap().pool, 0);
}

#[test]
fn live_short_slots_are_found_by_name_and_not_overwritten() {
    let ((_long, open_long), (_short, open_short)) = (temporary_file(4 * 8192), temporary_file(4 * 2048));
    let spec = |live: &[SlotName]| {
        let of = |pool| live.iter().filter(|name| name.pool == pool).copied().collect();
        let short = PoolSpec { id: 8, live: of(8), ..PoolSpec::short(Memory::File(open_short()), 4) };
        PoolSpec { id: 7, live: of(7), ..PoolSpec::new(Memory::File(open_long()), 8192, 4) }.with_short(short)
    };
    let mut pool = Pool::open(spec(&[])).unwrap().pool;
    let texts: [&[u8]; 3] = [&[1; 4000], b"two", b"three"];
    let held: Vec<_> = texts.iter().map(|text| received(&mut pool, text).into_kept_message()).collect();
    let names: Vec<_> = held.iter().map(|chunk| chunk.name().unwrap()).collect();
    assert_eq!(names.iter().map(|name| name.pool).collect::<Vec<_>>(), [7, 8, 8]);
    drop((pool, held));

    let Opened { mut pool, live } = Pool::open(spec(&names)).unwrap();
    assert_eq!((pool.usage().long.kept, pool.usage().short.kept), (1, 2));
    let more: Vec<_> = (0..4).map(|_| received(&mut pool, b"more").into_kept_message()).collect();
    let places: Vec<_> = more.iter().map(|chunk| chunk.name().map(|name| name.pool)).collect();
    assert_eq!(places, [Some(8), Some(8), Some(7), None], "two short slots and one long one may be kept besides");
    assert_eq!(live.iter().map(|chunk| &**chunk).collect::<Vec<_>>(), texts, "nothing was written over");
    assert_eq!(live.iter().map(|chunk| chunk.name().unwrap()).collect::<Vec<_>>(), names);
    drop(live);
    drop(more);
    assert_eq!((pool.usage().short.kept, pool.usage().long.kept), (0, 0), "what is live no longer is used again");
}

#[test]
fn short_slots_that_make_no_sense_are_refused_by_name() {
    let short = || PoolSpec::short(Memory::Anonymous, 4);
    let long = || PoolSpec::new(Memory::Anonymous, 8192, 4);
    let outside = SlotName { pool: SHORT_ID, index: 4, offset: 0, len: 1 };
    for (spec, text) in [
        (long().with_short(PoolSpec { id: 0, ..short() }), "same id"),
        (long().with_short(short().with_short(PoolSpec { id: 9, ..short() })), "no shorter ones"),
        (long().with_short(PoolSpec { live: vec![outside], ..short() }), "outside of the pool"),
        (long().with_short(PoolSpec { slots: 0, ..short() }), "at least one slot"),
    ] {
        let error = Pool::open(spec).unwrap_err().to_string();
        assert!(error.contains(text), "{error}");
    }
}

/// Threads keep messages and let go of them, and no two ever have the same slot.
#[test]
fn short_slots_are_given_out_once_at_a_time_on_many_threads() {
    let mut pool = with_short(2, 8);
    let messages: Vec<_> = (0..2).map(|number| received(&mut pool, &[number; 100])).collect();
    let taken = [const { std::sync::atomic::AtomicBool::new(false) }; 8];
    let barrier = std::sync::Barrier::new(4);
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (message, taken, barrier) = (&messages[thread % 2], &taken, &barrier);
            scope.spawn(move || {
                barrier.wait();
                for _ in 0..20_000 {
                    let kept = [(); 3].map(|()| message.clone().into_kept_message());
                    let short = || kept.iter().filter_map(Chunk::name).filter(|name| name.pool == SHORT_ID);
                    for name in short() {
                        assert!(!taken[name.index as usize].swap(true, Ordering::SeqCst), "slot {}", name.index);
                    }
                    assert!(kept.iter().all(|chunk| **chunk == **message));
                    short().for_each(|name| taken[name.index as usize].store(false, Ordering::SeqCst));
                }
            });
        }
    });
    assert_eq!((pool.usage().short.in_use, pool.usage().short.kept), (0, 0));
    let all: Vec<_> = (0..9).map(|_| messages[0].clone().into_kept_message()).collect();
    let mut indexes: Vec<_> =
        all.iter().filter_map(Chunk::name).filter(|name| name.pool == SHORT_ID).map(|name| name.index).collect();
    indexes.sort_unstable();
    assert_eq!(indexes, (0..8).collect::<Vec<_>>());
}
