//! What the clock asks of a connection: its deadlines, and what happens when one has passed.

use super::{Connection, Memory};
use crate::env::Env;
use crate::error::CloseReason;
use crate::limits::{Time, earlier};

/// Bytes that a peer must send in each `pressure_timeout_ms` while it is read although memory is short, unless its message
/// ends. With less it keeps others from being read: then it is their turn.
const PASS_BYTES_MIN: u64 = 64 << 10;

impl Connection {
    /// Checks the clock. A reason means: end it now, without waiting for the peer.
    pub fn tick(&mut self, env: &mut Env) -> Option<CloseReason> {
        let now = env.now;
        let is_over = |deadline: Option<Time>| deadline.is_some_and(|at| now >= at);
        if is_over(self.send_deadline(env)) {
            return Some(CloseReason::SendTimeout);
        }
        if is_over(self.file_deadline(env)) {
            return Some(CloseReason::FileRange);
        }
        if is_over(self.pressure_deadline(env)) && !self.makes_progress(env) {
            self.close(CloseReason::MemoryLimit, env);
        } else if is_over(self.assembly_deadline(env)) {
            self.refuse(CloseReason::AssemblyTimeout, env);
        } else if is_over(self.idle_deadline(env)) {
            self.close(CloseReason::IdleTimeout, env);
        } else {
            return None;
        }
        self.recount(env);
        None
    }

    /// The time at which [`tick`](Self::tick) is due; `None`: never. An event of the connection can move the time to a later
    /// one, so `tick` may find nothing to do. Only a call on the connection or a change of its limits moves it to an earlier
    /// one.
    pub fn deadline(&self, env: &Env) -> Option<Time> {
        let mut first = self.idle_deadline(env);
        // Between two messages there is no other one.
        if self.sending || self.reading_file.is_set() {
            first = earlier(first, earlier(self.send_deadline(env), self.file_deadline(env)));
        }
        if self.memory == Memory::Pass || env.budget.is_overfull() {
            first = earlier(first, self.pressure_deadline(env));
        }
        if self.cutter.since().is_some() {
            first = earlier(first, self.assembly_deadline(env));
        }
        first
    }

    fn send_deadline(&self, env: &Env) -> Option<Time> {
        if self.sending { self.last_send_progress.after_ms(self.limits(env).send_timeout_ms) } else { None }
    }

    /// A file system that hangs must not hold a connection, and what it is owed, for ever.
    fn file_deadline(&self, env: &Env) -> Option<Time> {
        self.reading_file.get()?.after_ms(self.limits(env).send_timeout_ms)
    }

    fn pressure_deadline(&self, env: &Env) -> Option<Time> {
        let after = |since: Time| since.after_ms(env.limits.pressure_timeout_ms);
        if self.memory == Memory::Pass && self.is_awaited(env) {
            return after(self.aside.as_ref()?.pass_watched.0);
        }
        // The input that it put aside goes when its peer takes the replies, and all others wait for that.
        let keeps_input = env.budget.is_overfull() && !self.has_none_aside() && self.memory != Memory::Waiting;
        if keeps_input && self.sending && self.closing.is_none() { after(self.last_send_progress) } else { None }
    }

    fn assembly_deadline(&self, env: &Env) -> Option<Time> {
        let started = self.cutter.since().filter(|_| self.is_awaited(env))?;
        started.after_ms(self.limits(env).assembly_timeout_ms)
    }

    fn idle_deadline(&self, env: &Env) -> Option<Time> {
        // Off by default, so this is asked first.
        let after = self.last_activity.after_ms(self.limits(env).idle_timeout_ms)?;
        let owed = self.deferred > 0 || self.held.is_some();
        let waits_for_us =
            owed || self.keeps_message() || self.exchange.open || self.reading_file.is_set() || self.waits_for_files;
        let waits = self.closing.is_none() && !waits_for_us && self.is_in_turn(env);
        waits.then_some(after)
    }

    /// True while it is up to the peer to send the rest of a message: one that is not read cannot.
    fn is_awaited(&self, env: &Env) -> bool {
        let reads = self.has_none_aside() && !self.waits_for_memory();
        self.closing.is_none() && reads && !self.is_stalled(env) && self.is_in_turn(env)
    }

    /// True if it is among those that are read while the shard is overfull: with a pass, or at a message boundary.
    pub(super) fn is_in_turn(&self, env: &Env) -> bool {
        !env.budget.is_overfull() || self.memory == Memory::Pass || self.cutter.is_idle()
    }

    /// From now on the peer must send its message, if it is read with a pass.
    pub(super) fn watch_pass(&mut self, now: Time) {
        if let Some(aside) = self.aside.as_mut().filter(|_| self.memory == Memory::Pass) {
            aside.pass_watched = (now, self.received_bytes);
        }
    }

    /// True if the peer, which is read with a pass, has sent something in its time. If that was little the pass goes to
    /// another connection, and this one waits for its next turn.
    fn makes_progress(&mut self, env: &mut Env) -> bool {
        let Some(aside) = self.aside.as_ref().filter(|_| self.memory == Memory::Pass) else { return false };
        let sent = self.received_bytes - aside.pass_watched.1;
        if !self.is_awaited(env) || sent == 0 {
            return false;
        }
        self.watch_pass(env.now);
        if sent < PASS_BYTES_MIN {
            self.message_ends(env);
            self.wait_for_memory(env);
        }
        true
    }
}
