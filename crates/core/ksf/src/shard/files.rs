//! Operations on files: from the services to the engine, and their ends back to the services.

use std::rc::Rc;

use super::Shard;
use crate::engine::Engine;
use crate::files::{Begun, Owner};

impl<E: Engine> Shard<E> {
    /// Gives the engine what services began.
    pub(super) fn begin_files(&mut self) {
        while let Some(begun) = self.env.files.next() {
            self.engine.begin_file(begun, &mut self.env);
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
