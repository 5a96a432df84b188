//! The policy, call by call.

use super::*;

#[derive(Clone)]
struct Peer {
    name: u8,
    ordered: Option<std::sync::Arc<OrderedQueue<u32>>>,
    throttle: &'static Throttle,
}

/// Of a peer that may be throttled.
struct Throttle {
    is_on: std::sync::atomic::AtomicBool,
    parked: std::sync::LazyLock<Parked<u32>>,
}

impl Throttle {
    const fn new() -> Self {
        let is_on = std::sync::atomic::AtomicBool::new(false);
        Self { is_on, parked: std::sync::LazyLock::new(Parked::default) }
    }
}

/// Of those that never are, and whose work is not counted.
static NEVER: Throttle = Throttle::new();

impl Source for Peer {
    type Message = u32;

    fn key(&self) -> usize {
        self.name.into()
    }

    fn ordered_queue(&self) -> Option<&OrderedQueue<u32>> {
        self.ordered.as_deref()
    }

    /// Messages above 100 are of class 0, above 200 of class 1, and so on.
    fn class(&self, message: &u32) -> Option<usize> {
        (message / 100).checked_sub(1).map(|class| class as usize)
    }

    fn is_throttled(&self) -> bool {
        self.throttle.is_on.load(Ordering::SeqCst)
    }

    fn parked(&self) -> &Parked<u32> {
        &self.throttle.parked
    }
}

const FREE: Peer = Peer { name: b'f', ordered: None, throttle: &NEVER };
const OTHER: Peer = Peer { name: b'o', ordered: None, throttle: &NEVER };

fn in_order() -> Peer {
    Peer { name: b'i', ordered: Some(std::sync::Arc::default()), throttle: &NEVER }
}

/// What one take finds.
fn take(scheduler: &Scheduler<Peer>, worker: &Worker<Peer>, want: usize) -> Vec<u32> {
    let mut lease = VecDeque::new();
    scheduler.take(worker, want, &mut lease);
    lease.into_iter().map(|taken| taken.message).collect()
}

/// A take finds the turn of this connection, which begins.
fn turn(scheduler: &Scheduler<Peer>, worker: &Worker<Peer>, peer: &Peer, max: usize) {
    let mut lease = VecDeque::new();
    let Take::Turn(Turn::Parked(found)) = scheduler.take(worker, 64, &mut lease) else { panic!("no turn") };
    assert!(found.is_same(peer) && lease.is_empty());
    scheduler.begin_turn(worker, peer, max);
}

fn sleepers(scheduler: &Scheduler<Peer>, count: usize) {
    (0..count).for_each(|_| assert!(scheduler.sleep()));
}

#[test]
fn a_worker_takes_its_own_first_then_common_ones_then_those_of_others_oldest_first() {
    let scheduler = Scheduler::new(&[]);
    let (first, second, third) = (scheduler.join(), scheduler.join(), scheduler.join());
    scheduler.push(Some(&second), &FREE, [20, 21]);
    scheduler.push(Some(&third), &FREE, [30]);
    scheduler.push(None, &FREE, [1]);
    scheduler.push(Some(&first), &FREE, [10, 11]);
    let order: Vec<_> = (0..7).map(|_| take(&scheduler, &first, 1)).collect();
    assert_eq!(order, [vec![10], vec![11], vec![1], vec![20], vec![21], vec![30], vec![]]);
    assert_eq!(scheduler.queued(), 0);
}

#[test]
fn thieves_take_half_and_begin_with_their_neighbour() {
    let scheduler = Scheduler::new(&[]);
    let (first, second, third) = (scheduler.join(), scheduler.join(), scheduler.join());
    scheduler.push(Some(&first), &FREE, 0..7);
    assert_eq!(take(&scheduler, &second, 64), [0, 1, 2, 3]);
    assert_eq!(take(&scheduler, &second, 64), [4, 5]);
    assert_eq!(take(&scheduler, &second, 64), [6]);
    scheduler.push(Some(&first), &FREE, [1]);
    scheduler.push(Some(&third), &FREE, [3]);
    assert_eq!(take(&scheduler, &second, 64), [3]);
    assert_eq!(take(&scheduler, &second, 64), [1]);
}

#[test]
fn batches_are_of_one_connection_and_only_for_busy_workers() {
    let scheduler = Scheduler::new(&[]);
    let worker = scheduler.join();
    scheduler.push(Some(&worker), &FREE, 0..5);
    scheduler.push(Some(&worker), &OTHER, 5..7);
    assert_eq!(take(&scheduler, &worker, 2), [0, 1]);
    let idle = Scheduler::<Peer>::new(&[]);
    sleepers(&idle, 1);
    let busy = idle.join();
    idle.push(Some(&busy), &FREE, 0..3);
    assert_eq!(take(&idle, &busy, 64), [0], "others could work on the rest");
    idle.awake(0);
    assert_eq!(take(&idle, &busy, 64), [1, 2]);
    assert_eq!(take(&scheduler, &worker, 64), [2, 3, 4], "of one connection");
    assert_eq!(take(&scheduler, &worker, 0), [5], "at least one");
    assert_eq!(take(&scheduler, &worker, 64), [6]);
}

#[test]
fn a_reread_has_its_turn_after_the_messages_in_all_queues() {
    let scheduler = Scheduler::new(&[]);
    let (worker, held_up) = (scheduler.join(), scheduler.join());
    scheduler.push(Some(&worker), &FREE, [0, 1]);
    scheduler.push_reread(Some(&worker), FREE);
    scheduler.push(Some(&held_up), &OTHER, [2]);
    scheduler.push(None, &OTHER, [3]);
    let order: Vec<_> = (0..3).map(|_| take(&scheduler, &worker, 64)).collect();
    assert_eq!(order, [vec![0, 1], vec![3], vec![2]]);
    assert_eq!(scheduler.queued(), 1);
    let mut lease = VecDeque::new();
    let Take::Turn(Turn::Reread(peer)) = scheduler.take(&worker, 64, &mut lease) else { panic!("no reread") };
    assert!(peer.is_same(&FREE) && lease.is_empty());
    assert_eq!(scheduler.queued(), 0);
}

#[test]
fn one_worker_is_woken_per_entry_the_caller_does_not_work_on_at_once() {
    let scheduler = Scheduler::new(&[]);
    let worker = scheduler.join();
    sleepers(&scheduler, 8);
    assert_eq!(scheduler.push(Some(&worker), &FREE, [0]), 0);
    assert_eq!(scheduler.push(Some(&worker), &FREE, [1]), 1, "the caller works on 0");
    assert_eq!(scheduler.push_reread(Some(&worker), FREE), 1, "the caller works on 0");
    assert_eq!(scheduler.push(None, &FREE, [2, 3]), 2);
    assert_eq!(scheduler.push(None, &FREE, 4..100), 4, "no more than sleep");
    assert_eq!(scheduler.push(None, &FREE, [100]), 0, "all are on their way");
    let other = scheduler.join();
    scheduler.awake(1);
    assert_eq!(scheduler.push_reread(Some(&other), FREE), 0, "the caller looks at once");
}

#[test]
fn a_reread_waits_for_one_turn_of_others_however_many_have_work() {
    static BUSY: Throttle = Throttle::new();
    static ALSO: Throttle = Throttle::new();
    let peers = [(b'b', &BUSY), (b'a', &ALSO)].map(|(name, throttle)| Peer { name, ordered: None, throttle });
    let scheduler = Scheduler::new(&[]);
    let worker = scheduler.join();
    for peer in &peers {
        scheduler.push(Some(&worker), peer, [0, 1]);
        peer.parked().note_work(TURN_NS as u64, false);
    }
    let mut order = Vec::new();
    for _ in 0..2 {
        scheduler.push_reread(Some(&worker), FREE);
        scheduler.push_reread(Some(&worker), OTHER);
    }
    while scheduler.queued() > 0 {
        let mut lease = VecDeque::new();
        if let Take::Turn(Turn::Reread(peer) | Turn::Parked(peer)) = scheduler.take(&worker, 64, &mut lease) {
            order.push(char::from(peer.name));
        }
    }
    assert_eq!(order.into_iter().collect::<String>(), "fboafo");
}

#[test]
fn a_queue_keeps_no_room_of_a_burst() {
    let scheduler = Scheduler::new(&[]);
    let worker = scheduler.join();
    scheduler.push(Some(&worker), &FREE, 0..3 * ROOM_KEPT as u32);
    while !take(&scheduler, &worker, 64).is_empty() {}
    let room = lock(&worker.0.entries).capacity();
    assert!(room <= ROOM_KEPT, "{room}");
}

#[test]
fn messages_of_a_throttled_connection_wait_aside_and_come_back_in_their_turn() {
    static SLOW: Throttle = Throttle::new();
    let slow = Peer { name: b's', ordered: None, throttle: &SLOW };
    let scheduler = Scheduler::new(&[]);
    let worker = scheduler.join();
    scheduler.push(Some(&worker), &slow, [1, 2]);
    scheduler.push(Some(&worker), &FREE, [3]);
    SLOW.is_on.store(true, Ordering::SeqCst);
    assert_eq!(take(&scheduler, &worker, 64), [3], "others have their turn");
    assert!(take(&scheduler, &worker, 64).is_empty() && scheduler.sleep());
    assert_eq!(scheduler.queued(), 0);
    assert_eq!(scheduler.push(None, &FREE, [4]), 1);
    scheduler.awake(1);
    SLOW.is_on.store(false, Ordering::SeqCst);
    assert_eq!(scheduler.unpark(&slow), 0, "no worker sleeps");
    assert_eq!(take(&scheduler, &worker, 64), [4]);
    turn(&scheduler, &worker, &slow, 64);
    assert_eq!(take(&scheduler, &worker, 64), [1, 2]);
    // Nothing is aside any more; with a sleeper one is woken per message.
    assert!(scheduler.sleep());
    assert_eq!(scheduler.unpark(&slow), 0);
    SLOW.is_on.store(true, Ordering::SeqCst);
    scheduler.awake(0);
    scheduler.push(None, &slow, [5]);
    assert!(take(&scheduler, &worker, 1).is_empty() && scheduler.sleep());
    // While some are parked others join them, and do not overtake them.
    assert_eq!(scheduler.push(None, &slow, [6]), 0);
    SLOW.is_on.store(false, Ordering::SeqCst);
    assert_eq!((scheduler.unpark(&slow), scheduler.unpark(&slow)), (1, 0));
    scheduler.awake(1);
    // Throttled again when its turn comes.
    SLOW.is_on.store(true, Ordering::SeqCst);
    turn(&scheduler, &worker, &slow, 64);
    assert!(take(&scheduler, &worker, 64).is_empty() && scheduler.queued() == 0);
    SLOW.is_on.store(false, Ordering::SeqCst);
    scheduler.unpark(&slow);
    turn(&scheduler, &worker, &slow, 64);
    assert_eq!(take(&scheduler, &worker, 64), [5, 6]);
}

#[test]
fn connections_with_more_work_than_a_turn_take_turns() {
    static BUSY: Throttle = Throttle::new();
    let busy = Peer { name: b'b', ordered: None, throttle: &BUSY };
    let scheduler = Scheduler::new(&[]);
    let worker = scheduler.join();
    scheduler.push(Some(&worker), &busy, 0..6);
    assert_eq!(take(&scheduler, &worker, 1), [0]);
    busy.parked().note_work(TURN_NS as u64 - 1, false);
    assert_eq!(take(&scheduler, &worker, 1), [1], "something of the turn is left");
    busy.parked().note_work(u64::MAX, false);
    scheduler.push(Some(&worker), &FREE, [10]);
    assert_eq!(take(&scheduler, &worker, 64), [10]);
    scheduler.push(Some(&worker), &busy, [6]);
    // As many as are expected to fit, and another turn for the others.
    turn(&scheduler, &worker, &busy, 2);
    scheduler.push(None, &FREE, [11]);
    assert_eq!(take(&scheduler, &worker, 64), [2, 3]);
    busy.parked().note_work(1, false);
    assert_eq!(take(&scheduler, &worker, 64), [11]);
    // They took longer than that: those that are left are parked again.
    turn(&scheduler, &worker, &busy, 2);
    assert_eq!(take(&scheduler, &worker, 1), [4]);
    busy.parked().note_work(TURN_NS as u64, false);
    assert_eq!(scheduler.queued(), 2, "a message and a turn");
    turn(&scheduler, &worker, &busy, 64);
    assert_eq!(take(&scheduler, &worker, 64), [5, 6]);
    assert_eq!(scheduler.queued(), 0);
    // One that has nothing to do begins anew.
    busy.parked().note_work(TURN_NS as u64, false);
    busy.parked().note_work(TURN_NS as u64, true);
    scheduler.push(Some(&worker), &busy, [7]);
    assert_eq!(take(&scheduler, &worker, 64), [7]);
}

#[test]
fn a_turn_of_an_ordered_queue_ends_with_its_work() {
    static BUSY: Throttle = Throttle::new();
    let busy = Peer { throttle: &BUSY, ..in_order() };
    let scheduler = Scheduler::new(&[]);
    let worker = scheduler.join();
    scheduler.push(Some(&worker), &busy, 0..3);
    for expected in 0..3 {
        assert_eq!(take(&scheduler, &worker, 64), [expected]);
        scheduler.push(None, &FREE, [10]);
        busy.parked().note_work(TURN_NS as u64, false);
        scheduler.finish(Some(&worker), &busy, None);
        assert_eq!(take(&scheduler, &worker, 64), [10]);
        if expected < 2 {
            turn(&scheduler, &worker, &busy, 64);
        }
    }
    assert_eq!(scheduler.queued(), 0);
}

#[test]
fn no_worker_sleeps_while_something_is_queued() {
    let scheduler = Scheduler::new(&[]);
    scheduler.push(None, &FREE, [0]);
    assert!(!scheduler.sleep());
    assert!(!scheduler.has_sleepers());
    let worker = scheduler.join();
    take(&scheduler, &worker, 1);
    assert!(scheduler.sleep());
    assert!(scheduler.has_sleepers());
}

#[test]
fn what_a_worker_leaves_behind_wakes_one_more() {
    let scheduler = Scheduler::new(&[]);
    let worker = scheduler.join();
    scheduler.push(Some(&worker), &FREE, [0, 1, 2]);
    take(&scheduler, &worker, 1);
    assert_eq!(scheduler.pass_on(), 0, "no worker sleeps");
    // Two that looked before the push and go to sleep after the take; one of them is woken by something else.
    scheduler.sleepers.fetch_add(2, Ordering::SeqCst);
    assert_eq!(scheduler.pass_on(), 1);
    assert_eq!(scheduler.pass_on(), 1, "two are left, one wake-up is on its way");
    assert_eq!(scheduler.pass_on(), 0, "both are on their way");
}

#[test]
fn no_more_are_woken_than_entries_were_queued() {
    let scheduler = Scheduler::new(&[]);
    sleepers(&scheduler, 2);
    assert_eq!(scheduler.push_reread(None, FREE), 1);
    // It is awake and has not looked yet.
    scheduler.awake(1);
    assert_eq!(scheduler.pass_on(), 0, "the one entry has woken one");
    assert_eq!(scheduler.decline(), 1, "it will not look: another must");
}

#[test]
fn what_leaves_with_a_worker_is_older_than_what_is_common() {
    let scheduler = Scheduler::new(&[]);
    let (leaving, staying) = (scheduler.join(), scheduler.join());
    scheduler.push(Some(&leaving), &FREE, [0, 1]);
    scheduler.push(None, &FREE, [2]);
    scheduler.sleepers.fetch_add(3, Ordering::SeqCst);
    assert_eq!(scheduler.leave(leaving), 2);
    let order: Vec<_> = (0..4).flat_map(|_| take(&scheduler, &staying, 1)).collect();
    assert_eq!(order, [0, 1, 2]);
}

#[test]
fn an_ordered_queue_lets_one_pass_at_a_time() {
    let scheduler = Scheduler::new(&[]);
    let worker = scheduler.join();
    let peer = in_order();
    scheduler.push(Some(&worker), &peer, 0..5);
    for expected in 0..5 {
        let mut lease = VecDeque::new();
        scheduler.take(&worker, 3, &mut lease);
        assert_eq!(lease.len(), 1);
        assert_eq!((lease[0].message, lease[0].more), (expected, expected < 4));
        assert_eq!(take(&scheduler, &worker, 3), [], "{expected} is not done");
        scheduler.finish(Some(&worker), &peer, None);
    }
    scheduler.push(Some(&worker), &peer, [5]);
    assert_eq!(take(&scheduler, &worker, 9), [5]);
}

#[test]
fn what_is_given_back_comes_before_what_is_younger() {
    for peer in [FREE, in_order()] {
        let scheduler = Scheduler::new(&[]);
        let worker = scheduler.join();
        scheduler.push(Some(&worker), &peer, 0..5);
        let mut lease = VecDeque::new();
        scheduler.take(&worker, 4, &mut lease);
        let first = lease.pop_front().unwrap();
        scheduler.give_back(lease.into_iter());
        scheduler.finish(Some(&worker), &first.source, first.class);
        let mut order = Vec::new();
        for _ in 1..5 {
            order.extend(take(&scheduler, &worker, 1));
            scheduler.finish(Some(&worker), &peer, None);
        }
        order.sort_unstable_by_key(|message| (peer.ordered.is_none() && *message == 4, *message));
        assert_eq!(order, [1, 2, 3, 4], "in a ordered: {}", peer.ordered.is_some());
    }
}

#[test]
fn a_class_at_its_cap_parks_the_rest_and_lets_others_pass() {
    let scheduler = Scheduler::new(&[1, 2]);
    let worker = scheduler.join();
    scheduler.push(Some(&worker), &FREE, [100, 101, 1, 200, 201, 202, 2, 900]);
    assert_eq!(take(&scheduler, &worker, 64), [100, 1, 200, 201, 2, 900], "a class without a cap is none");
    assert_eq!(scheduler.queued(), 0);
    scheduler.finish(Some(&worker), &FREE, None);
    assert_eq!(take(&scheduler, &worker, 64), []);
    scheduler.finish(Some(&worker), &FREE, Some(1));
    assert_eq!(take(&scheduler, &worker, 64), [202]);
    scheduler.finish(Some(&worker), &FREE, Some(0));
    assert_eq!(take(&scheduler, &worker, 64), [101]);
}

#[test]
fn connections_take_turns_below_a_cap() {
    let scheduler = Scheduler::new(&[1]);
    let worker = scheduler.join();
    scheduler.push(Some(&worker), &FREE, 100..104);
    scheduler.push(Some(&worker), &OTHER, [110]);
    let mut order = Vec::new();
    for _ in 0..5 {
        order.extend(take(&scheduler, &worker, 1));
        assert_eq!(take(&scheduler, &worker, 1), []);
        scheduler.finish(Some(&worker), &FREE, Some(0));
    }
    assert_eq!(order, [100, 101, 110, 102, 103]);
}

#[test]
fn parking_takes_the_same_steps_however_many_connections_are_parked() {
    #[derive(Clone)]
    struct Counted<'a> {
        name: usize,
        looks: &'a std::cell::Cell<usize>,
        parked: &'a Parked<usize>,
    }

    impl Source for Counted<'_> {
        type Message = usize;

        fn key(&self) -> usize {
            self.looks.set(self.looks.get() + 1);
            self.name
        }

        fn ordered_queue(&self) -> Option<&OrderedQueue<usize>> {
            None
        }

        fn class(&self, _: &usize) -> Option<usize> {
            Some(0)
        }

        fn is_throttled(&self) -> bool {
            false
        }

        fn parked(&self) -> &Parked<usize> {
            self.parked
        }
    }

    const CONNECTIONS: usize = 1000;
    let (looks, parked) = (std::cell::Cell::new(0), Parked::default());
    let scheduler = Scheduler::new(&[1]);
    let worker = scheduler.join();
    let peers: Vec<_> = (0..CONNECTIONS).map(|name| Counted { name, looks: &looks, parked: &parked }).collect();
    for round in 0..2 {
        peers.iter().for_each(|peer| _ = scheduler.push(None, peer, [round]));
    }
    let mut order = Vec::new();
    while order.len() < 2 * CONNECTIONS {
        let mut lease = VecDeque::new();
        scheduler.take(&worker, 1, &mut lease);
        let Taken { source, message, class, .. } = lease.pop_front().unwrap();
        order.push((message, source.name));
        // All others are parked.
        assert!(matches!(scheduler.take(&worker, 1, &mut lease), Take::Nothing));
        scheduler.finish(None, &source, class);
    }
    assert!(order.is_sorted(), "they do not take turns");
    assert!(looks.get() <= 8 * CONNECTIONS, "{} looks at connections", looks.get());
}

#[test]
fn a_throttled_connection_holds_up_no_other_one_of_the_class() {
    static SLOW: Throttle = Throttle::new();
    let slow = Peer { name: b's', ordered: None, throttle: &SLOW };
    let scheduler = Scheduler::new(&[1]);
    let worker = scheduler.join();
    scheduler.push(Some(&worker), &slow, [100, 101]);
    scheduler.push(Some(&worker), &OTHER, [110, 111]);
    assert_eq!(take(&scheduler, &worker, 1), [100]);
    assert_eq!(take(&scheduler, &worker, 1), []);
    SLOW.is_on.store(true, Ordering::SeqCst);
    scheduler.finish(Some(&worker), &slow, Some(0));
    // 101 has its turn in the class, and is parked.
    assert_eq!(take(&scheduler, &worker, 1), [110]);
    scheduler.finish(Some(&worker), &OTHER, Some(0));
    assert_eq!(take(&scheduler, &worker, 1), [111]);
    assert_eq!((take(&scheduler, &worker, 1), scheduler.queued()), (vec![], 0));
}

#[test]
fn giving_back_frees_a_place_of_the_class() {
    let scheduler = Scheduler::new(&[1]);
    let worker = scheduler.join();
    scheduler.push(Some(&worker), &FREE, [100, 101]);
    let mut lease = VecDeque::new();
    scheduler.take(&worker, 64, &mut lease);
    scheduler.give_back(lease.into_iter());
    assert_eq!(scheduler.queued(), 2, "the one given back and the one that was parked");
    assert_eq!(take(&scheduler, &worker, 1), [100]);
    assert_eq!(take(&scheduler, &worker, 1), []);
}
