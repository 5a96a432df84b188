//! Programs with their types erased: once per program, per shard and per connection, not per call.

use std::any::Any;
use std::io;
use std::sync::Arc;

use ksf::files::FileDone;
use ksf::{Peer, Refused, Turn};

use super::call::{ProcError, RpcCall};
use super::program::{Program, ShardProgram};
use super::reply::{Answered, RpcReply};
use super::table::ProgramTable;
use super::turn::{Operations, RpcTurn};

/// A program with its types erased, before any shard runs it.
pub(super) trait AnyProgram: Send + Sync {
    fn name(&self) -> &str;
    fn keeps_messages(&self) -> bool;
    fn has_turn_end(&self) -> bool;
    fn outside_of_shards(&self) -> Option<&dyn Program>;
    fn counters(&self) -> Vec<(&'static str, u64)>;
    /// Makes the program's state for the shard of this thread.
    fn start(self: Arc<Self>, turn: &mut RpcTurn<'_, '_>) -> io::Result<Box<dyn LocalProgram>>;
}

impl<P: ShardProgram> AnyProgram for P {
    fn name(&self) -> &str {
        ShardProgram::name(self)
    }

    fn keeps_messages(&self) -> bool {
        ShardProgram::keeps_messages(self)
    }

    fn has_turn_end(&self) -> bool {
        P::HAS_TURN_END
    }

    fn outside_of_shards(&self) -> Option<&dyn Program> {
        ShardProgram::outside_of_shards(self)
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        ShardProgram::counters(self)
    }

    fn start(self: Arc<Self>, turn: &mut RpcTurn<'_, '_>) -> io::Result<Box<dyn LocalProgram>> {
        let shard = ShardProgram::start(&*self, turn)?;
        Ok(Box::new(Local { program: self, shard, conns: Vec::new(), active: false }))
    }
}

/// A program on one shard, with its connections.
pub(super) trait LocalProgram {
    fn accept(&mut self, slot: usize, peer: &Peer) -> Result<(), Refused>;
    fn call(&mut self, slot: usize, call: &RpcCall<'_>, reply: RpcReply<'_, '_>) -> Answered;
    fn resume(&mut self, slot: usize, state: Box<dyn Any + Send>, reply: RpcReply<'_, '_>) -> Answered;
    fn turn_end(&mut self, turn: &mut RpcTurn<'_, '_>);
    fn file_done(&mut self, done: FileDone, turn: &mut RpcTurn<'_, '_>);
    fn files_have_room(&mut self, turn: &mut RpcTurn<'_, '_>);
    fn close(&mut self, slot: usize);
    fn stop(self: Box<Self>);
}

struct Local<P: ShardProgram> {
    program: Arc<P>,
    shard: P::Shard,
    /// By the connection's slot. States lie side by side, so a connection costs no allocation and a call no cast.
    conns: Vec<Option<P::Conn>>,
    /// True if the program was called since its last turn end.
    active: bool,
}

impl<P: ShardProgram> LocalProgram for Local<P> {
    fn accept(&mut self, slot: usize, peer: &Peer) -> Result<(), Refused> {
        // Left by a connection that was refused, or closed, by the panic of another program.
        self.close(slot);
        self.active |= P::HAS_TURN_END;
        let conn = self.program.accept(&mut self.shard, peer)?;
        if self.conns.len() <= slot {
            self.conns.resize_with(slot + 1, || None);
        }
        self.conns[slot] = Some(conn);
        Ok(())
    }

    fn call(&mut self, slot: usize, call: &RpcCall<'_>, reply: RpcReply<'_, '_>) -> Answered {
        self.active |= P::HAS_TURN_END;
        match self.conns.get_mut(slot) {
            Some(Some(conn)) => self.program.call(&mut self.shard, conn, call, reply),
            _ => reply.error(ProcError::SystemErr),
        }
    }

    fn resume(&mut self, slot: usize, state: Box<dyn Any + Send>, reply: RpcReply<'_, '_>) -> Answered {
        self.active |= P::HAS_TURN_END;
        match self.conns.get_mut(slot) {
            Some(Some(conn)) => self.program.resume(&mut self.shard, conn, state, reply),
            _ => reply.error(ProcError::SystemErr),
        }
    }

    fn turn_end(&mut self, turn: &mut RpcTurn<'_, '_>) {
        if std::mem::take(&mut self.active) {
            self.program.turn_end(&mut self.shard, turn);
        }
    }

    fn file_done(&mut self, done: FileDone, turn: &mut RpcTurn<'_, '_>) {
        self.active |= P::HAS_TURN_END;
        self.program.file_done(&mut self.shard, done, turn);
    }

    fn files_have_room(&mut self, turn: &mut RpcTurn<'_, '_>) {
        self.active = true;
        self.program.files_have_room(&mut self.shard, turn);
    }

    fn close(&mut self, slot: usize) {
        if let Some(conn) = self.conns.get_mut(slot).and_then(Option::take) {
            self.active |= P::HAS_TURN_END;
            self.program.close(&mut self.shard, conn);
        }
    }

    fn stop(self: Box<Self>) {
        let Self { program, mut shard, conns, .. } = *self;
        conns.into_iter().flatten().for_each(|conn| program.close(&mut shard, conn));
        program.stop(shard);
    }
}

/// The programs of a table on one shard.
pub struct RpcShard {
    /// In the order of the table.
    programs: Vec<Box<dyn LocalProgram>>,
    /// Places of the programs that want to hear of turn ends.
    turn_ends: Vec<usize>,
    /// Slots of connections below `slots` that nobody has.
    free: Vec<usize>,
    slots: usize,
    operations: Operations,
}

/// A connection, or datagram socket: the slot of its states.
pub struct RpcConn {
    slot: usize,
}

impl RpcShard {
    pub(super) fn start(table: &ProgramTable, turn: &mut Turn<'_>) -> io::Result<Self> {
        let (programs, turn_ends, operations) = (Vec::new(), Vec::new(), Operations::default());
        let mut this = Self { programs, turn_ends, free: Vec::new(), slots: 0, operations };
        for (at, program) in table.all().enumerate() {
            if program.has_turn_end() {
                this.turn_ends.push(at);
            }
            match Arc::clone(program).start(&mut RpcTurn::new(turn, at as u32, &this.operations)) {
                Ok(local) => this.programs.push(local),
                Err(error) => {
                    this.stop();
                    return Err(error);
                }
            }
        }
        Ok(this)
    }

    pub(super) fn accept(&mut self, peer: &Peer) -> Result<RpcConn, Refused> {
        // Taken at the end: after a panic the slot is free, and what is left in it is closed by its next connection.
        let slot = self.free.last().copied().unwrap_or(self.slots);
        for at in 0..self.programs.len() {
            if let Err(refused) = self.programs[at].accept(slot, peer) {
                self.programs[..at].iter_mut().for_each(|program| program.close(slot));
                return Err(refused);
            }
        }
        if self.free.pop().is_none() {
            self.slots += 1;
        }
        Ok(RpcConn { slot })
    }

    #[inline]
    pub(super) fn call(&mut self, at: usize, conn: &RpcConn, call: &RpcCall<'_>, reply: RpcReply<'_, '_>) -> Answered {
        match self.programs.get_mut(at) {
            Some(program) => program.call(conn.slot, call, reply),
            None => reply.error(ProcError::SystemErr),
        }
    }

    pub(super) fn resume(
        &mut self,
        at: usize,
        conn: &RpcConn,
        state: Box<dyn Any + Send>,
        reply: RpcReply<'_, '_>,
    ) -> Answered {
        match self.programs.get_mut(at) {
            Some(program) => program.resume(conn.slot, state, reply),
            None => reply.error(ProcError::SystemErr),
        }
    }

    pub(super) fn turn_end(&mut self, turn: &mut Turn<'_>) {
        for &at in &self.turn_ends {
            self.programs[at].turn_end(&mut RpcTurn::new(turn, at as u32, &self.operations));
        }
    }

    /// Tells every program: one queue has the operations of all.
    pub(super) fn files_have_room(&mut self, turn: &mut Turn<'_>) {
        for (at, program) in self.programs.iter_mut().enumerate() {
            program.files_have_room(&mut RpcTurn::new(turn, at as u32, &self.operations));
        }
    }

    pub(super) fn file_done(&mut self, done: FileDone, turn: &mut Turn<'_>) {
        let Some((at, done)) = self.operations.ended(done) else { return };
        if let Some(program) = self.programs.get_mut(at) {
            program.file_done(done, &mut RpcTurn::new(turn, at as u32, &self.operations));
        }
    }

    pub(super) fn close(&mut self, conn: &RpcConn) {
        self.free.push(conn.slot);
        self.programs.iter_mut().for_each(|program| program.close(conn.slot));
    }

    pub(super) fn stop(self) {
        self.programs.into_iter().for_each(LocalProgram::stop);
    }
}
