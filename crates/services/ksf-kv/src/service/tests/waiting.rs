//! The queue of waiting commands, compared with a plain list that each step walks completely.

use std::collections::BTreeSet;

use ksf::deferred::Deferred;
use ksf_test::{Random, effort};

use super::queue::{FETCH_BYTES_MAX, Waiting, has_room};
use super::*;

/// Defers the reply to each message.
struct Stash(Mutex<Vec<Deferred<Logged>>>);

impl Service for Stash {
    type Shard = ();
    type Conn = ();
    type Mode = Logged;

    fn profile(&self) -> Profile<'_> {
        Profile::new("stash", Framing::Raw)
    }

    fn start(&self, _: &mut Turn<'_>) -> std::io::Result<()> {
        Ok(())
    }

    fn accept(&self, (): &mut (), _: &Peer) -> Result<(), Refused> {
        Ok(())
    }

    fn call(&self, (): &mut (), (): &mut (), _: &Message<'_>, reply: &mut Reply<'_, Logged>) {
        self.0.lock().unwrap().push(reply.defer_for(0));
    }
}

#[derive(Clone, Copy, Debug)]
enum Why {
    Nothing,
    Turn,
    Until(u64),
    Pause(bool),
    Room(usize),
}

#[derive(Clone, Copy, Debug)]
struct Plain {
    at: At,
    writes: bool,
    why: Why,
}

/// Waiting commands in no order, and the connections whose commands are a line.
#[derive(Default)]
struct List {
    all: Vec<Plain>,
    lines: BTreeSet<ConnKey>,
}

impl List {
    fn of(&self, from: ConnKey) -> usize {
        self.all.iter().filter(|one| one.at.0 == from).count()
    }

    /// The first command of the connections that `which` selects.
    fn first(&mut self, which: impl Fn(ConnKey) -> bool) -> Option<&mut Plain> {
        self.all.iter_mut().filter(|one| which(one.at.0)).min_by_key(|one| one.at.1)
    }

    fn take(&mut self, at: At) -> Plain {
        let number = self.all.iter().position(|one| one.at == at).unwrap();
        let taken = self.all.swap_remove(number);
        if self.of(at.0) == 0 {
            self.lines.remove(&at.0);
        }
        taken
    }

    fn is_behind(&self, (from, place): At) -> bool {
        self.all.iter().any(|one| one.at.0 == from && one.at.1 < place)
    }

    fn forget(&mut self, from: ConnKey) {
        self.all.retain(|one| one.at.0 != from);
        self.lines.remove(&from);
    }

    /// Commands that wait for room continue in the order of their arrival.
    fn give_room(&mut self, mut taken: usize) {
        loop {
            let (lines, mut firsts) = (self.lines.clone(), Vec::new());
            for from in lines {
                let first = self.first(|of| of == from).unwrap();
                firsts.extend(if let Why::Room(bytes) = first.why { Some((first.at, bytes)) } else { None });
            }
            let Some((at, bytes)) = firsts.into_iter().min_by_key(|((_, place), _)| *place) else { return };
            if !has_room(taken, bytes) {
                return;
            }
            taken += bytes;
            self.first(|of| of == at.0).unwrap().why = Why::Nothing;
        }
    }

    fn take_ready(&mut self, now_ms: u64, is_paused: impl Fn(bool) -> bool, is_full: bool) -> Vec<Plain> {
        let mut ready = Vec::new();
        for from in self.lines.clone() {
            while self.lines.contains(&from) {
                let first = self.first(|of| of == from).unwrap();
                let goes_on = match first.why {
                    Why::Nothing | Why::Turn => true,
                    Why::Until(at_ms) => at_ms <= now_ms,
                    Why::Pause(writes) => !is_paused(writes),
                    Why::Room(_) => false,
                };
                if !goes_on {
                    break;
                }
                first.why = Why::Nothing;
                let (at, must_wait) = (first.at, is_full && first.writes);
                if must_wait {
                    self.lines.remove(&from);
                } else {
                    ready.push(self.take(at));
                }
            }
        }
        ready
    }

    fn take_waiting(&mut self, is_full: bool) -> Option<Plain> {
        let lines = self.lines.clone();
        let first = self.first(|from| !lines.contains(&from)).filter(|first| !(is_full && first.writes))?;
        let at = first.at;
        Some(self.take(at))
    }
}

/// The queue, the list, and the inputs of both.
struct Pair {
    queue: Queue,
    list: List,
    clients: Clients,
    now_ms: u64,
    /// Commands that write must wait.
    is_full: bool,
    /// Bytes in the read buffers of other commands.
    taken: usize,
    world: World,
    stash: Arc<Stash>,
    conn: Box<Connection>,
}

impl Pair {
    fn new() -> Self {
        let mut world = World::new(0);
        world.env.limits.deferred_max = u32::MAX;
        let stash = Arc::new(Stash(Mutex::default()));
        let on = OnShard::new(Arc::clone(&stash), ());
        let conn = Connection::new(on, Peer::Unix, ConnKey { index: 0, generation: 0 }, world.env.now).unwrap();
        let (clients, is_full) = (Clients::new(1), false);
        Self {
            queue: Queue::default(),
            list: List::default(),
            clients,
            now_ms: 1,
            is_full,
            taken: 0,
            world,
            stash,
            conn,
        }
    }

    fn waiting(&mut self, Plain { at, writes, why }: Plain) -> Waiting {
        self.conn.receive(Chunk::from_vec(vec![0]), &mut self.world.env);
        let deferred = self.stash.0.lock().unwrap().pop().unwrap();
        let fetch = match why {
            Why::Nothing => Fetch::Nothing,
            Why::Turn => Fetch::Turn,
            Why::Until(at_ms) => Fetch::Until { at_ms, reply: Box::default() },
            Why::Pause(writes) => Fetch::Pause { writes },
            Why::Room(bytes) => Fetch::Room { bytes },
        };
        let bytes: &[u8] = if writes { b"SET key value\r\n" } else { b"GET key\r\n" };
        Waiting { deferred, resumed: Asked { bytes, http: None }.to_resumed(at.1, fetch) }
    }

    fn add(&mut self, one: Plain) {
        let waiting = self.waiting(one);
        self.queue.add(one.at, waiting);
        self.list.all.push(one);
    }

    fn add_first(&mut self, one: Plain) {
        let waiting = self.waiting(one);
        self.queue.add_first(one.at, waiting);
        self.list.all.push(one);
        self.list.lines.remove(&one.at.0);
    }

    fn line_up(&mut self, one: Plain) {
        let waiting = self.waiting(one);
        self.queue.line_up(one.at, waiting, Vec::new());
        self.list.all.push(one);
        self.list.lines.insert(one.at.0);
    }

    fn forget(&mut self, from: ConnKey) {
        let before = queue::LOOKS.get();
        self.queue.forget(from);
        let looks = queue::LOOKS.get() - before;
        assert!(looks <= self.list.of(from) as u64 + 1, "{looks}");
        self.list.forget(from);
    }

    /// Returns the commands that continue in this turn: the same ones from both.
    fn turn(&mut self, waiting_max: usize) -> Vec<Plain> {
        let is_full = self.is_full;
        let must_wait = |asked: Asked<'_>| is_full && asked.bytes.starts_with(b"SET");
        let sources = (&*self.world.service.kv.store, &self.clients, self.now_ms);
        let told =
            self.queue.take_ready(sources, self.taken, (&mut usize::MAX.clone(), &mut usize::MAX.clone()), must_wait);
        let clients = &self.clients;
        self.list.give_room(self.taken);
        let mut ready = self.list.take_ready(self.now_ms, |writes| clients.waits(writes, self.now_ms), is_full);
        // The order of the lines may differ.
        let place = |waiting: &Waiting| waiting.resumed.place;
        let connection = |place| ready.iter().find(|one| one.at.1 == place).map(|one| one.at.0);
        let mut told: Vec<_> = told.iter().map(|waiting| (connection(place(waiting)), place(waiting))).collect();
        told.sort_by_key(|(from, _)| *from);
        assert_eq!(told, ready.iter().map(|one| (Some(one.at.0), one.at.1)).collect::<Vec<_>>());
        for _ in 0..waiting_max {
            let told = self.queue.take_waiting(must_wait);
            let next = self.list.take_waiting(is_full);
            assert_eq!(told.as_ref().map(place), next.map(|one| one.at.1));
            ready.extend(next);
        }
        assert_eq!((self.queue.len(), self.queue.is_empty()), (self.list.all.len(), self.list.all.is_empty()));
        ready
    }

    /// Each command ends, or waits once more.
    fn go_on(&mut self, ready: Vec<Plain>, random: &mut Random) {
        for one in ready {
            let before = queue::LOOKS.get();
            let is_behind = self.queue.is_behind(one.at.0, one.at.1);
            assert_eq!(is_behind, self.list.is_behind(one.at), "{one:?}");
            match random.within(0..=4) {
                _ if is_behind => self.add(one),
                0 => self.line_up(Plain { why: self.why(random), ..one }),
                1 if one.writes => self.add_first(Plain { why: Why::Nothing, ..one }),
                _ => {}
            }
            assert!(queue::LOOKS.get() - before <= 3);
        }
    }

    fn why(&self, random: &mut Random) -> Why {
        match random.within(0..=5) {
            0 => Why::Until(u64::MAX),
            1 | 2 => Why::Until(self.now_ms + random.below(20)),
            3 => Why::Pause(random.one_in(2)),
            4 => Why::Room(random.within(1..=FETCH_BYTES_MAX)),
            _ => Why::Turn,
        }
    }
}

/// Random steps have the same outcome in both. A step for one connection does not visit the
/// commands of others, and ended commands leave nothing behind.
#[test]
fn queue_is_as_a_plain_list() {
    const CONNS: usize = 8;
    const OF_ONE_MAX: usize = 40;
    let mut random = Random::of_test(1);
    let key = |number: usize| ConnKey { index: number as u32, generation: 0 };
    for _ in 0..effort(20, 1000) {
        let mut pair = Pair::new();
        for _ in 0..400 {
            let from = key(random.within(1..=CONNS));
            match random.within(0..=16) {
                0 => pair.forget(from),
                1 => pair.is_full = !pair.is_full,
                2 => pair.clients.pause(pair.now_ms + random.below(20), random.one_in(2)),
                3 => pair.clients.resume(),
                4 => pair.now_ms += random.below(10),
                5 => pair.taken = random.pick(&[0, FETCH_BYTES_MAX / 2, FETCH_BYTES_MAX]),
                6..=8 => {
                    let ready = pair.turn(random.within(0..=8));
                    pair.go_on(ready, &mut random);
                }
                _ => {
                    let one =
                        Plain { at: (from, pair.queue.next_place()), writes: random.one_in(2), why: Why::Nothing };
                    match pair.list.of(from) {
                        OF_ONE_MAX.. => {}
                        0 if random.one_in(2) => pair.line_up(Plain { why: pair.why(&mut random), ..one }),
                        _ => pair.add(one),
                    }
                }
            }
        }
        let forgotten = random.pick(&[CONNS / 2, CONNS]);
        (1..=forgotten).for_each(|number| pair.forget(key(number)));
        pair.turn(0);
        // The other commands continue.
        (pair.is_full, pair.taken) = (false, 0);
        pair.clients.resume();
        while !pair.list.all.is_empty() {
            pair.now_ms = u64::MAX;
            pair.turn(8);
        }
        assert_eq!((pair.queue.kept(), pair.queue.next_ms(0)), (0, None));
    }
}

/// A line whose first command waits once more in each turn gets no larger share of a turn.
#[test]
fn long_line_is_visited_once_per_turn() {
    let mut pair = Pair::new();
    let from = ConnKey { index: 1, generation: 0 };
    for place in 1..=300 {
        let one = Plain { at: (from, place), writes: false, why: Why::Turn };
        if place == 1 { pair.line_up(one) } else { pair.add(one) }
    }
    let kept = pair.queue.kept();
    for turn in 0..20 {
        let sources = (&*pair.world.service.kv.store, &pair.clients, 1);
        let mut ready = pair
            .queue
            .take_ready(sources, 0, (&mut usize::MAX.clone(), &mut usize::MAX.clone()), |_| false)
            .into_iter();
        pair.queue.line_up((from, 1), ready.next().unwrap(), Vec::new());
        assert_eq!(1 + ready.len(), queue::LINE_TURN_MAX, "turn {turn}");
        ready.for_each(|waiting| pair.queue.add((from, waiting.resumed.place), waiting));
        assert!(pair.queue.kept() <= kept + 1, "turn {turn}");
    }
}

/// The number of commands that wait for room for their values does not matter.
#[test]
fn turn_visits_one_command_that_waits_for_room() {
    const LINES: u32 = 100;
    let mut pair = Pair::new();
    pair.taken = FETCH_BYTES_MAX;
    for index in 1..=LINES {
        let at = (ConnKey { index, generation: 0 }, u64::from(index));
        pair.line_up(Plain { at, writes: false, why: Why::Room(FETCH_BYTES_MAX / 10) });
    }
    let before = queue::LOOKS.get();
    assert!(pair.turn(0).is_empty() && pair.queue.needs_a_look());
    let looks = queue::LOOKS.get() - before;
    assert!(looks <= 1, "{looks}");
    pair.taken = 0;
    assert_eq!(pair.turn(0).iter().map(|one| one.at.1).collect::<Vec<_>>(), Vec::from_iter(1..=10));
}
