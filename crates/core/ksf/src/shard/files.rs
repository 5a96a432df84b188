//! Operations on files: from the services to the engine, and their ends back to the services.

use std::rc::Rc;

use super::Shard;
use crate::engine::Engine;
use crate::env::Env;
use crate::error::CloseReason;
use crate::files::{Begun, FileDone, FileOp, FileRange, Owner};
use crate::service::ConnKey;

impl<E: Engine> Shard<E> {
    /// Gives the engine what services began.
    pub(super) fn begin_files(&mut self) {
        while let Some(begun) = self.env.files.next() {
            self.engine.begin_file(begun, &mut self.env);
        }
        if !self.file_waiting.is_empty() && self.env.files.running() == 0 {
            // The connection that was woken last had no use for the room.
            self.wake_file_reader();
        }
    }

    /// Has a connection try again that was refused to read a part of a reply.
    fn wake_file_reader(&mut self) {
        while let Some((key, range)) = self.file_waiting.pop_front() {
            if let Some((stream, env)) = self.stream(key) {
                stream.file_read(&range, None, env);
                return;
            }
        }
    }

    /// Tells whom it concerns that an operation ended.
    pub(super) fn file_ended(&mut self, begun: Begun) {
        let (owner, done) = self.env.files.ended(begun);
        match owner {
            Owner::Service(number) => {
                let Some((_, service)) = self.services.get(number as usize) else { return };
                let service = Rc::clone(service);
                self.env.service = number;
                service.file_done(done, &mut self.env);
            }
            Owner::Reply(key) => self.file_read(key, done),
        }
        self.wake_file_reader();
    }

    /// Begins to read a part of a reply. What is refused for now is tried again when another operation ended: there is one,
    /// because one alone is not refused.
    pub(super) fn read_file(&mut self, key: ConnKey, range: FileRange) {
        let Env { files, limits, buffers, .. } = &mut self.env;
        if !files.read(key, range.clone(), limits, buffers) {
            self.file_waiting.push_back((key, range));
        }
    }

    /// A part of a reply was read, or could not be.
    fn file_read(&mut self, key: ConnKey, done: FileDone) {
        let FileOp::Read { file, offset, bytes, into, .. } = done.op else { return };
        let range = FileRange { file, offset, bytes };
        let read = done.result.map(|_| into);
        if let Some((stream, env)) = self.stream(key)
            && !stream.file_read(&range, Some(read), env)
        {
            self.abort(key.index, CloseReason::FileRange);
        }
    }

    /// True when a shard that drains has nothing left to do, or no time.
    pub(super) fn is_drained(&self) -> bool {
        self.draining.is_some_and(|draining| {
            let files = self.env.files.running() == 0 || self.env.now >= draining.deadline;
            draining.handshakes_until.is_none() && self.open == 0 && files
        })
    }

    /// Ends all operations before files, memory and services go: nothing begins any more, and every service hears of what
    /// it began.
    pub(super) fn end_files(&mut self) {
        self.env.files.stop();
        while let Some(begun) = self.env.files.next() {
            self.file_ended(*begun);
        }
        for begun in self.engine.end_files(&mut self.env) {
            self.file_ended(begun);
        }
        self.env.stats.file_ops_left.add(self.env.files.running() as u64);
    }
}
