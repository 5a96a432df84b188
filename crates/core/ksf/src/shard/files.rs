//! Operations on files: from the services to the engine, and their ends back to the services.

use std::rc::Rc;

use super::Shard;
use crate::engine::Engine;
use crate::env::Env;
use crate::error::CloseReason;
use crate::files::{Begun, FileDone, FileOp, FileRange, Owner, Waiter};
use crate::service::ConnKey;

impl<E: Engine> Shard<E> {
    /// Gives the engine what services began.
    #[inline]
    pub(super) fn begin_files(&mut self) {
        while let Some(begun) = self.env.files.next() {
            self.env.stats.file_ops.add(1);
            self.engine.begin_file(begun, &mut self.env);
        }
    }

    /// Has those go on that wait for room, each at most once in a turn.
    pub(super) fn files_have_room(&mut self) {
        if !self.env.files.are_used() {
            return;
        }
        // Peers that come, wait and leave while operations hang must not make the queue grow.
        let places = &self.places;
        self.env.files.forget_ended(2 * self.open + 64, |key| {
            let place = places.get(key.index as usize);
            place.is_some_and(|place| place.generation == key.generation && place.conn.is_some())
        });
        for _ in 0..self.env.files.waiting() {
            match self.env.files.next_to_go_on() {
                None => return,
                Some(Waiter::Service(number)) => {
                    let Some((_, service)) = self.services.get(number as usize) else { continue };
                    let service = Rc::clone(service);
                    self.env.service = number;
                    service.files_have_room(&mut self.env);
                }
                Some(Waiter::Reply(key)) => {
                    let Some((conn, env)) = self.served(key) else { continue };
                    conn.file_not_read();
                    if let Some(range) = conn.file_to_read(env.now) {
                        self.read_file(key, range);
                    }
                }
                Some(Waiter::Messages(key)) => {
                    if let Some((conn, env)) = self.served(key) {
                        conn.files_have_room(env);
                    }
                }
            }
        }
    }

    /// Tells the service or the connection that an operation of its own ended.
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
    }

    /// Begins to read a part of a reply.
    pub(super) fn read_file(&mut self, key: ConnKey, range: FileRange) {
        let Env { files, limits, buffers, .. } = &mut self.env;
        files.read(key, range, limits, buffers);
    }

    /// A part of a reply was read, or could not be.
    fn file_read(&mut self, key: ConnKey, done: FileDone) {
        let FileOp::Read { file, offset, bytes, into, .. } = done.op else { return };
        let range = FileRange { file, offset, bytes };
        let read = done.result.map(|_| into);
        if let Some((conn, env)) = self.served(key)
            && !conn.file_read(&range, read, env)
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
