//! One simulated run: peers, network, connections, and time.

use std::sync::{Arc, Mutex};

use ksf::connection::Connection;
use ksf::cutter::Direct;
use ksf::env::Env;
use ksf::files::{FileError, FileRange};
use ksf::gates::Gate;
use ksf::limits::{Limits, Time};
use ksf::outgoing::ExchangeRequest;
use ksf::output::SendBatch;
use ksf::pool::{Memory, Pool, PoolSpec};
use ksf::service::{ConnKey, EXPECTED_REPLY_BYTES};
use ksf::session::OnShard;
use ksf::{CloseReason, Peer, Turn};

use crate::check::{History, check};
use crate::far::{Far, Step};
use crate::ideal::decode;
use crate::plan::WorldPlan;
use crate::remote::Remote;
use crate::script::{ServiceAction, SimRequest, reply_to};
use crate::service::{Disk, Handed, Scripted, lock};
use ksf_test::Random;

/// What came of a run that went as it must. Two runs of one seed give equal reports.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SimReport {
    /// Connections that ended.
    pub connections: usize,
    /// Messages the service saw.
    pub messages: usize,
    /// Replies that arrived.
    pub replies: usize,
    /// Deferred answers whose connection was gone.
    pub too_late: usize,
    /// Connections that went on after they were not read for lack of memory.
    pub waited: usize,
    /// Times that a connection went on which had given way to others.
    pub gave_way: usize,
    /// Times nobody was read but a few, because far more had arrived than is kept.
    pub overfull: usize,
    /// Chunks that waited unprocessed because replies did.
    pub stalls: usize,
    /// Receives straight into the buffer of a message.
    pub lent: usize,
    /// Parts of files that were read for replies.
    pub file_reads: usize,
    /// Receives that were put off because no slot was free.
    pub starved: usize,
    /// What backends told.
    pub told: usize,
    /// Replies that waited for a log.
    pub gated: usize,
    /// Logs that were lost, because the service panicked at the end of a turn.
    pub logs_lost: usize,
    /// How often each reason ended a connection, in the order of [`CloseReason::ALL`].
    pub ends: [usize; CloseReason::ALL.len()],
    /// Folds every byte that arrived, and when.
    pub trace: u64,
}

/// Runs the world of `seed`. The error says what went wrong, on which connection, and in which world.
pub fn simulate(seed: u64) -> Result<SimReport, String> {
    let mut random = Random::new(seed);
    let plan = WorldPlan::random(&mut random);
    let about = format!("{plan:?}");
    let mut world = World::new(plan, random).map_err(|error| format!("seed {seed}: cannot set up: {error}"))?;
    world.run().map_err(|what| format!("seed {seed}, step {}: {what}\nthe world: {about}", world.step))?;
    Ok(world.report)
}

/// A connection with its peer, and what is between them.
struct SimConnection {
    conn: Box<Connection>,
    remote: Remote,
    handed: Handed,
    /// The buffer of a long message, while the engine has it.
    lent: Option<Direct>,
    /// What is being read of a file for it.
    reading: Option<FileRange>,
    /// What the engine sends.
    batch: Option<SendBatch>,
    /// Bytes it was given before it took no more.
    given: usize,
    eof_told: bool,
    /// The other end of its exchange.
    far: Option<Far>,
    /// What it gave to the engine, if there is a log, and how many of the replies in it were looked at.
    left: (Vec<u8>, usize),
}

struct World {
    plan: WorldPlan,
    random: Random,
    env: Env,
    service: Arc<Scripted>,
    on: OnShard<Scripted>,
    /// Connections whose next replies wait for the log.
    gated: Vec<(Gate, ConnKey)>,
    places: Vec<(u32, Option<SimConnection>)>,
    /// In work for connections that have ended.
    orphan_bytes: usize,
    peers_left: u32,
    step: usize,
    draining: Option<Time>,
    report: SimReport,
}

/// Far beyond what the slowest world needs; reaching it means that a connection got stuck.
const STEPS_MAX: usize = 400_000;

impl World {
    fn new(plan: WorldPlan, random: Random) -> Result<Self, String> {
        let mut spec = PoolSpec::new(Memory::Anonymous, plan.slot_bytes, plan.slots);
        if plan.short_slots > 0 {
            spec = spec.with_short(PoolSpec::short(Memory::Anonymous, plan.short_slots));
        }
        let pool = Pool::open(spec).map_err(|error| error.to_string())?.pool;
        let mut env = Env::new(plan.limits.clone(), pool).map_err(|error| error.to_string())?;
        env.set_share(plan.messages_max);
        let log = plan.logs.then(|| Turn::new(&mut env).open_log()).transpose().map_err(|error| error.to_string())?;
        let service = Arc::new(Scripted {
            framing: plan.framing.validate().map_err(|error| error.to_string())?,
            custom: plan.custom,
            order: plan.order,
            keeps: plan.keeps,
            disk: if plan.files { Some(Disk::new().map_err(|error| error.to_string())?) } else { None },
            log,
            records: Mutex::default(),
            called_after_panic: Mutex::default(),
            next: Mutex::default(),
            pending: Mutex::default(),
            open: Mutex::default(),
            kept_bytes: Mutex::default(),
        });
        let places = (0..plan.places).map(|_| (0, None)).collect();
        let peers_left = plan.peers;
        let (step, draining, report) = (0, None, SimReport::default());
        let (on, gated) = (OnShard::new(Arc::clone(&service), ()), Vec::new());
        Ok(Self { plan, random, env, service, on, gated, places, orphan_bytes: 0, peers_left, step, draining, report })
    }

    fn run(&mut self) -> Result<(), String> {
        while self.peers_left > 0 || self.places.iter().any(|(_, link)| link.is_some()) {
            self.step += 1;
            if self.step > STEPS_MAX {
                return Err(self.stuck());
            }
            self.turn()?;
        }
        // Whoever is late is too late, and finds nobody.
        while self.answer_one() {}
        self.deliver()?;
        let (budget, slots) = (&self.env.budget, self.env.pool.usage());
        let slots = slots.long.in_use + slots.short.in_use;
        let left =
            (slots, budget.input_bytes(), budget.reply_bytes() + budget.session_bytes(), *lock(&self.service.open));
        if left != (0, 0, 0, 0) {
            return Err(format!("slots, bytes and connection states left over: {left:?}"));
        }
        Ok(())
    }

    fn turn(&mut self) -> Result<(), String> {
        self.env.now = Time(self.env.now.0 + self.random.within(0..=5_000_000) as u64);
        if self.plan.drain_at.is_some_and(|at| self.step >= at) && self.draining.is_none() {
            self.draining = Some(self.env.now.plus_ms(self.plan.limits.drain_timeout_ms));
            self.peers_left = 0;
        }
        self.go_on()?;
        let first = self.random.within(0..=self.places.len() - 1);
        for at in 0..self.places.len() {
            let index = (first + at) % self.places.len();
            if self.places[index].1.is_none() && self.peers_left > 0 && self.random.one_in(4) {
                self.connect(index)?;
            }
            if let Some(link) = self.places[index].1.take() {
                self.proceed(index, link)?;
            }
        }
        while self.random.within(1..=self.plan.answer_every) == 1 && self.answer_one() {}
        if self.random.one_in(2) {
            self.deliver()?;
        }
        self.end_turn()?;
        self.proceed_waiting()?;
        if *lock(&self.service.called_after_panic) {
            return Err("the service was called for a connection after it had panicked there".into());
        }
        self.check_memory()
    }

    fn connect(&mut self, index: usize) -> Result<(), String> {
        self.peers_left -= 1;
        let number = self.plan.peers - self.peers_left;
        let remote = Remote::random(number, &self.plan, &mut self.random);
        let handed = Handed::default();
        *lock(&self.service.next) = Arc::clone(&handed);
        let key = ConnKey { index: index as u32, generation: self.places[index].0 };
        let conn = Connection::new(self.on.clone(), Peer::Unix, key, self.env.now);
        let conn = conn.map_err(|_| "the service refused, which it never does")?;
        self.places[index].1 = Some(SimConnection {
            conn,
            remote,
            handed,
            lent: None,
            reading: None,
            batch: None,
            given: 0,
            eof_told: false,
            far: None,
            left: Default::default(),
        });
        Ok(())
    }

    /// A share of everything that can happen on one connection, and then what a shard does at the end of a turn.
    fn proceed(&mut self, index: usize, mut link: SimConnection) -> Result<(), String> {
        link.remote.proceed(&mut self.random);
        if link.remote.resets_at == Some(link.remote.written) && self.random.one_in(8) {
            let reason = link.conn.finished().unwrap_or(CloseReason::Io);
            return self.end(index, link, reason);
        }
        self.receive(&mut link)?;
        self.hear_backend(&mut link)?;
        self.send(&mut link);
        if let Some(reason) = self.read_file(&mut link) {
            return self.end(index, link, reason);
        }
        self.carry_out(&mut link)?;
        if self.draining.is_some() {
            link.conn.drain(&mut self.env);
        }
        let batch = link.conn.take_batch(self.env.now, &mut self.env.spares);
        if let Some(batch) = &batch {
            self.check_gates(&mut link, batch)?;
        }
        if let Some(batch) = batch
            && link.batch.replace(batch).is_some()
        {
            return Err(format!("peer {}: a second batch while one is being sent", link.remote.number));
        }
        if let Some(reason) = link.conn.finished() {
            return self.end(index, link, reason);
        }
        if self.random.one_in(4)
            && let Some(reason) = self.tick(&mut link)?
        {
            return self.end(index, link, reason);
        }
        if self.draining.is_some_and(|deadline| self.env.now >= deadline) {
            let reason = link.conn.finished().unwrap_or(CloseReason::DrainTimeout);
            return self.end(index, link, reason);
        }
        self.places[index].1 = Some(link);
        Ok(())
    }

    /// A shard looks at a connection when its deadline has come, and only then.
    fn tick(&mut self, link: &mut SimConnection) -> Result<Option<CloseReason>, String> {
        let due = link.conn.deadline(&self.env).is_some_and(|at| self.env.now >= at);
        let was_closing = link.conn.is_closing();
        let owed = link.conn.held_replies() > 0;
        let ended = link.conn.tick(&mut self.env);
        // Who made little progress is put off instead, and waits for its next turn.
        let put_off = link.conn.deadline(&self.env).is_none_or(|at| self.env.now < at);
        let over = ended.is_some() || link.conn.is_closing() != was_closing;
        if over && !due || due && !over && !put_off {
            let number = link.remote.number;
            return Err(format!("peer {number}: its deadline has come: {due}; the clock ended it: {}", !due));
        }
        if owed && !was_closing && link.conn.finished() == Some(CloseReason::IdleTimeout) {
            return Err(format!("peer {}: it was ended as idle, and waits for its replies", link.remote.number));
        }
        Ok(ended)
    }

    fn receive(&mut self, link: &mut SimConnection) -> Result<(), String> {
        if link.lent.is_none() && self.random.one_in(2) {
            link.lent = link.conn.lend_buffer(self.random.within(1..=100), &mut self.env);
        }
        self.receive_lent(link)?;
        // An engine that was told to stop may have bytes under way.
        while link.lent.is_none() && (link.conn.wants_bytes(&self.env) || self.random.one_in(20)) {
            let there = link.remote.arrived - link.remote.received;
            if there == 0 {
                break;
            }
            let Some(mut slot) = self.env.pool.take() else {
                self.report.starved += 1;
                break;
            };
            let bytes = there.min(self.random.within(1..=slot.capacity()));
            let from = link.remote.received;
            slot.as_mut_slice()[..bytes].copy_from_slice(&link.remote.stream[from..from + bytes]);
            link.remote.received += bytes;
            let stalled = link.conn.queued_bytes() > self.plan.limits.out_queue_bytes_max;
            let before = lock(&link.handed).len();
            let asking = link.far.is_some();
            self.report.stalls += usize::from(stalled);
            link.conn.receive(slot.freeze(bytes), &mut self.env);
            if !link.conn.is_closing() {
                link.given = link.remote.received;
            }
            if asking && lock(&link.handed).len() > before {
                return Err(format!("peer {} has a request with a backend, and was processed", link.remote.number));
            }
            self.carry_out(link)?;
            if stalled && lock(&link.handed).len() > before {
                return Err(format!("peer {} does not read, and was processed", link.remote.number));
            }
            if self.random.one_in(3) {
                break;
            }
        }
        let all = link.remote.received == link.remote.stream.len() && link.remote.resets_at.is_none();
        let told = link.lent.is_none() && (link.conn.wants_bytes(&self.env) || self.random.one_in(20));
        if all && link.remote.half_closes && !link.eof_told && told {
            link.eof_told = true;
            link.conn.peer_closed(&mut self.env);
        }
        Ok(())
    }

    /// The engine gives a lent buffer back, with what was there to be received, or because it was called back.
    fn receive_lent(&mut self, link: &mut SimConnection) -> Result<(), String> {
        // The kernel may take its time.
        let Some(mut direct) = link.lent.take_if(|_| self.random.one_in(2)) else { return Ok(()) };
        let there = (link.remote.arrived - link.remote.received).min(direct.missing());
        let bytes = if self.random.one_in(8) { 0 } else { self.random.within(0..=there) };
        let from = link.remote.received;
        direct.room_mut()[..bytes].copy_from_slice(&link.remote.stream[from..from + bytes]);
        link.remote.received += bytes;
        self.report.lent += usize::from(bytes > 0);
        link.conn.received_direct(direct, bytes, &mut self.env);
        if !link.conn.is_closing() {
            link.given = link.remote.received;
        }
        self.carry_out(link)
    }

    /// Plays the shard: what the connection asked for since the last time.
    fn carry_out(&mut self, link: &mut SimConnection) -> Result<(), String> {
        loop {
            let orders = self.env.take_exchange_requests();
            if orders.is_empty() {
                return Ok(());
            }
            for (_, order) in orders {
                self.carry_out_one(link, order)?;
            }
        }
    }

    fn carry_out_one(&mut self, link: &mut SimConnection, order: ExchangeRequest) -> Result<(), String> {
        let passed_bytes = if let ExchangeRequest::Pass(bytes) = &order { bytes.len() } else { 0 };
        Far::carry_out(&mut link.far, order, &mut self.random)
            .map_err(|what| format!("peer {}: {what}", link.remote.number))?;
        if passed_bytes > 0 {
            link.conn.passed(passed_bytes, &mut self.env);
        }
        Ok(())
    }

    /// The same, for connections that are in their places.
    fn carry_out_for_all(&mut self) -> Result<(), String> {
        loop {
            let orders = self.env.take_exchange_requests();
            if orders.is_empty() {
                return Ok(());
            }
            for (key, order) in orders {
                let Some(mut link) = self.places[key.index as usize].1.take() else { continue };
                let carried_out = self.carry_out_one(&mut link, order);
                self.places[key.index as usize].1 = Some(link);
                carried_out?;
            }
        }
    }

    /// The other end of an exchange; it is not read while its client does not read.
    fn hear_backend(&mut self, link: &mut SimConnection) -> Result<(), String> {
        while link.conn.queued_bytes() <= self.plan.limits.out_queue_bytes_max {
            let Some(far) = &mut link.far else { break };
            let step = far.step(&mut self.random);
            if Far::is_over(&step) {
                link.far = None;
            }
            match step {
                Step::Nothing => break,
                Step::Full(full) => link.conn.set_full(full, &mut self.env),
                Step::Tells(event) => {
                    self.report.told += 1;
                    link.conn.upstream(event, &mut self.env);
                }
            }
            self.carry_out(link)?;
        }
        Ok(())
    }

    /// Begins a turn as a shard does: with the connections that gave way in the one before.
    fn go_on(&mut self) -> Result<(), String> {
        self.env.begin_turn();
        while let Some(key) = self.env.next_to_go_on() {
            let Some((generation, Some(link))) = self.places.get_mut(key.index as usize) else { continue };
            if *generation == key.generation {
                self.report.gave_way += 1;
                link.conn.go_on(&mut self.env);
            }
            self.carry_out_for_all()?;
        }
        Ok(())
    }

    /// Lets connections go on that were not read for lack of memory, as a shard does.
    fn proceed_waiting(&mut self) -> Result<(), String> {
        for _ in 0..self.env.budget.waiting() {
            let Some(key) = self.env.budget.next_to_proceed(&self.env.limits) else { break };
            let Some((generation, Some(link))) = self.places.get_mut(key.index as usize) else { continue };
            if *generation == key.generation {
                self.report.waited += 1;
                link.conn.proceed(&mut self.env);
            }
            self.carry_out_for_all()?;
        }
        if self.env.budget.update_overfull(&self.env.limits) {
            let overfull = self.env.budget.is_overfull();
            self.report.overfull += usize::from(overfull);
            for (_, link) in self.places.iter_mut().filter(|_| !overfull) {
                if let Some(link) = link {
                    link.conn.read_again(&self.env);
                }
            }
        }
        Ok(())
    }

    /// The disk gives what a connection wants of a file: all of it, a part, or nothing yet. The reason, if the file is too
    /// short, and the connection has to end.
    fn read_file(&mut self, link: &mut SimConnection) -> Option<CloseReason> {
        if !self.plan.files {
            return None;
        }
        if link.reading.is_none() && self.random.one_in(2) {
            link.reading = link.conn.file_to_read(self.env.now);
        }
        let range = link.reading.take_if(|_| self.random.one_in(2))?;
        let mut buffer = self.env.buffers.take(range.bytes);
        let read = match self.random.within(0..=19) {
            0 => {
                link.conn.file_not_read();
                return None;
            }
            1 => Err(FileError::Interrupted),
            2 if self.plan.file_breaks => Ok(buffer),
            3 if self.plan.file_breaks => Err(FileError::Medium),
            kind => {
                let bytes = if kind < 12 { range.bytes } else { self.random.within(1..=range.bytes) };
                let disk = self.service.disk.as_ref()?;
                buffer.fill(&lock(&disk.bytes)[range.offset as usize..][..bytes]);
                self.report.file_reads += 1;
                Ok(buffer)
            }
        };
        let goes_on = link.conn.file_read(&range, read, &mut self.env);
        (!goes_on).then_some(CloseReason::FileRange)
    }

    fn send(&mut self, link: &mut SimConnection) {
        let Some(mut batch) = link.batch.take() else { return };
        let remote = &mut link.remote;
        let room = (remote.window - remote.unread).min(batch.len());
        let bytes = if self.random.one_in(2) { room } else { self.random.within(0..=room) };
        if bytes > 0 {
            let mut slices = [&[][..]; 16];
            let filled = batch.slices(&mut slices);
            let front: Vec<u8> = slices[..filled].concat();
            let bytes = bytes.min(front.len());
            remote.taken.extend_from_slice(&front[..bytes]);
            remote.unread += bytes;
            self.report.trace = fold(self.report.trace, self.env.now.0, &front[..bytes]);
            batch.advance(bytes, &mut self.env.spares);
            let done = batch.is_empty();
            link.conn.sent(bytes, done, &mut self.env);
            if done {
                batch.recycle(&mut self.env.spares);
                return;
            }
        }
        link.batch = Some(batch);
    }

    /// Any of the answers that are due, as from another thread.
    fn answer_one(&mut self) -> bool {
        let mut pending = lock(&self.service.pending);
        if pending.is_empty() {
            return false;
        }
        let at = self.random.within(0..=pending.len() - 1);
        let answer = pending.swap_remove(at);
        drop(pending);
        answer.answer();
        true
    }

    /// Carries the mail to whoever is in the place now; that it is the right one, the connection must see.
    fn deliver(&mut self) -> Result<(), String> {
        for delivery in self.env.mailbox.take_deliveries() {
            let place = self.places.get_mut(delivery.key().index as usize);
            let work_bytes = delivery.work_bytes();
            let delivered = place
                .and_then(|(_, link)| link.as_mut())
                .is_some_and(|link| link.conn.deliver(delivery, &mut self.env));
            if !delivered {
                self.report.too_late += 1;
                self.orphan_bytes =
                    self.orphan_bytes.checked_sub(work_bytes).ok_or("more is given back than was left")?;
                self.env.budget.orphan_done(work_bytes);
            }
            self.carry_out_for_all()?;
        }
        Ok(())
    }

    /// The turn is over: the log gets further, or it is lost, and replies go for which it was durable far enough.
    fn end_turn(&mut self) -> Result<(), String> {
        if self.step >= self.plan.log_lost_at {
            lock(&self.service.records).panics |= self.report.logs_lost == 0;
        }
        self.on.turn_end(&mut self.env);
        let Some(log) = self.service.log else { return Ok(()) };
        self.report.logs_lost = usize::from(self.env.gates.is_lost(log));
        let (durable, last) = (self.env.gates.released(log), lock(&self.service.records).last);
        if durable < last && self.step < self.plan.log_stops_at && self.random.one_in(4) {
            let number = self.random.within(durable as usize + 1..=last as usize) as u64;
            Turn::new(&mut self.env).release(log, number);
        }
        loop {
            let more = self.env.take_gated();
            self.report.gated += more.len();
            self.gated.extend(more);
            let (env, places) = (&mut self.env, &mut self.places);
            let mut opened = false;
            self.gated.retain(|(gate, key)| {
                let (generation, link) = &mut places[key.index as usize];
                let Some(link) = link.as_mut().filter(|_| *generation == key.generation) else { return false };
                let closed = env.gates.wait(*gate, 0);
                if !closed {
                    opened = true;
                    link.conn.open_gates(env);
                }
                closed
            });
            self.carry_out_for_all()?;
            if !opened {
                return Ok(());
            }
        }
    }

    /// No reply is in the hands of the engine before what it tells is durable.
    fn check_gates(&self, link: &mut SimConnection, batch: &SendBatch) -> Result<(), String> {
        let Some(log) = self.service.log else { return Ok(()) };
        let (left, looked_at) = &mut link.left;
        let mut slices = [&[][..]; 256];
        let filled = batch.slices(&mut slices);
        slices[..filled].iter().for_each(|slice| left.extend_from_slice(slice));
        let no_limits = Limits { message_bytes_max: usize::MAX >> 8, fragments_max: u32::MAX, ..Limits::default() };
        let replies = decode(self.plan.framing, &no_limits, left).messages;
        let (durable, records) = (self.env.gates.released(log), lock(&self.service.records));
        for reply in &replies[*looked_at..] {
            let of = reply_to(crate::ideal::payload(self.plan.framing, reply));
            if let Some((of, number)) = of.and_then(|of| Some((of, *records.due.get(&of)?)))
                && number > durable
            {
                return Err(format!("a reply to {of:?} left with record {durable} durable, and waits for {number}"));
            }
        }
        *looked_at = replies.len();
        Ok(())
    }

    fn check_memory(&self) -> Result<(), String> {
        let limit = self.plan.input_bytes_max();
        if self.env.budget.input_bytes() > limit {
            return Err(format!("{} bytes of input are kept, limit {limit}", self.env.budget.input_bytes()));
        }
        let links = self.places.iter().filter_map(|(_, link)| link.as_ref());
        let owed = links.clone().map(|link| link.conn.owed_bytes()).sum::<usize>() + self.orphan_bytes;
        if owed != self.env.budget.reply_bytes() {
            return Err(format!("{owed} bytes are owed, {} are counted", self.env.budget.reply_bytes()));
        }
        let kept: usize = links.clone().map(|link| link.conn.session_bytes()).sum();
        let told = lock(&self.service.kept_bytes).to_owned();
        let budget = &self.env.budget;
        if (kept, kept) != (budget.session_bytes(), told) {
            return Err(format!("{kept} bytes of sessions, {} are counted, {told} are kept", budget.session_bytes()));
        }
        let shard_bytes_max = self.plan.limits.shard_bytes_max;
        // These of each session need no room.
        let begun = self.plan.places * EXPECTED_REPLY_BYTES;
        if budget.bytes() != budget.input_bytes() + owed + kept || kept > shard_bytes_max / 2 + begun {
            return Err(format!("{} bytes in all, {kept} of them of sessions", budget.bytes()));
        }
        let limit = shard_bytes_max + self.plan.places * self.plan.one_more_bytes() + begun;
        if owed + kept > limit {
            return Err(format!("{owed} bytes are owed on the shard, and {kept} kept, limit {limit}"));
        }
        let limit = self.plan.limits.connection_bytes_max + self.plan.one_more_bytes();
        if let Some(link) = links.clone().find(|link| link.conn.owed_bytes() > limit) {
            let (peer, owed) = (link.remote.number, link.conn.owed_bytes());
            return Err(format!("peer {peer}: {owed} bytes are owed, limit {limit}"));
        }
        let limit = self.plan.queued_bytes_max();
        for link in self.places.iter().filter_map(|(_, link)| link.as_ref()) {
            let queued = link.conn.queued_bytes();
            if queued > limit {
                return Err(format!("peer {}: {queued} bytes of replies wait, limit {limit}", link.remote.number));
            }
            if queued > self.plan.limits.out_queue_bytes_max && link.conn.wants_bytes(&self.env) {
                return Err(format!("peer {} does not read, and would be read", link.remote.number));
            }
        }
        Ok(())
    }

    fn end(&mut self, index: usize, link: SimConnection, reason: CloseReason) -> Result<(), String> {
        let SimConnection { conn, remote, handed, batch, given, .. } = link;
        let sending = batch.is_some();
        if let Some(batch) = batch {
            batch.recycle(&mut self.env.spares);
        }
        let (owed, counted) = (conn.owed_bytes(), self.env.budget.reply_bytes());
        conn.end(&mut self.env);
        // What is in work for it is all that stays counted.
        self.orphan_bytes += self.env.budget.reply_bytes() + owed - counted;
        // Nobody is left to carry out for.
        self.env.take_exchange_requests();
        self.places[index].0 += 1;
        let handed = lock(&handed);
        let failed = |what: String| {
            let (messages, received) = (handed.len(), remote.received);
            format!("peer {} ({reason:?} after {received} bytes, {messages} messages): {what}", remote.number)
        };
        self.check_reason(&remote, &handed, reason, sending).map_err(failed)?;
        let due = decode(self.plan.framing, &self.plan.limits, &remote.stream[..given]).messages.len();
        if reason == CloseReason::Drained && handed.len() != due {
            return Err(failed(format!("{due} messages were received before it was drained")));
        }
        let history = History {
            framing: self.plan.framing,
            order: self.plan.order,
            peer: remote.number,
            ideal: &remote.ideal,
            handed: &handed,
            taken: &remote.taken,
            reason,
        };
        self.report.replies += check(&history).map_err(failed)?;
        self.report.connections += 1;
        self.report.messages += handed.len();
        for (count, known) in self.report.ends.iter_mut().zip(CloseReason::ALL) {
            *count += usize::from(known == reason);
        }
        Ok(())
    }

    /// Nobody is cut off for something that did not happen.
    fn check_reason(
        &self,
        remote: &Remote,
        handed: &[Vec<u8>],
        reason: CloseReason,
        sending: bool,
    ) -> Result<(), String> {
        let limits = &self.plan.limits;
        let asked = |action| {
            let mut requests = handed
                .iter()
                .filter_map(|message| SimRequest::from_text(crate::ideal::payload(self.plan.framing, message)));
            requests.any(|request| request.action == action)
        };
        let just = match reason {
            CloseReason::Abandoned => asked(ServiceAction::Abandon),
            CloseReason::Service => asked(ServiceAction::Close),
            CloseReason::Panicked => {
                let lost = self.service.log.is_some_and(|log| self.env.gates.is_lost(log));
                asked(ServiceAction::Panic) || asked(ServiceAction::PanicLater) || lost
            }
            CloseReason::AssemblyTimeout => limits.assembly_timeout_ms < 1000,
            CloseReason::IdleTimeout => limits.idle_timeout_ms > 0,
            CloseReason::SendTimeout => limits.send_timeout_ms < 1000 && sending,
            CloseReason::MemoryLimit => limits.assembly_bytes_max <= 20_000,
            CloseReason::ReplyLimit => limits.connection_bytes_max <= 20_000,
            CloseReason::FileRange => self.plan.files && self.plan.file_breaks,
            CloseReason::Io => remote.resets_at.is_some(),
            CloseReason::DrainTimeout | CloseReason::Drained => self.draining.is_some(),
            // Compared with the ideal, byte by byte.
            _ => true,
        };
        if just { Ok(()) } else { Err("there was no reason to end it".into()) }
    }

    fn stuck(&self) -> String {
        let links = self.places.iter().filter_map(|(_, link)| link.as_ref());
        let states: Vec<_> = links
            .map(|link| {
                let Remote { number, received, stream, unread, window, .. } = &link.remote;
                let (conn, wants) = (&link.conn, link.conn.wants_bytes(&self.env));
                format!(
                    "peer {number}: received {received} of {}, unread {unread} of {window}, queued {}, wants bytes: \
                     {wants}, closing: {}",
                    stream.len(),
                    conn.queued_bytes(),
                    conn.is_closing()
                )
            })
            .collect();
        format!("stuck: {}", states.join("; "))
    }
}

fn fold(trace: u64, time: u64, bytes: &[u8]) -> u64 {
    // FNV-1a: order and value of every byte count.
    let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
    bytes.iter().fold(trace ^ time.rotate_left(17), |hash, byte| step(hash, *byte))
}
