//! What other threads, and services on this one, tell a shard.

use std::mem;
use std::sync::Arc;

use super::Shard;
use crate::deferred::{Mail, Target};
use crate::engine::Engine;

impl<E: Engine> Shard<E> {
    /// Answers that were given on this thread.
    #[inline]
    pub(super) fn deliver_answered(&mut self) {
        if !self.env.answered.is_empty() {
            self.deliver_all_answered();
        }
    }

    fn deliver_all_answered(&mut self) {
        while !self.env.answered.is_empty() {
            let mut answered = mem::take(&mut self.env.answered);
            for mail in answered.drain(..) {
                self.take_mail(mail);
            }
            if self.env.answered.is_empty() {
                // Kept for its memory.
                self.env.answered = answered;
            }
        }
    }

    /// What came to the mailbox.
    pub(super) fn read_mail(&mut self) {
        if !self.mail_arrived && !self.env.mailbox.has_mail() {
            return;
        }
        let mailbox = Arc::clone(&self.env.mailbox);
        let mut mail = mem::take(&mut self.mail);
        mailbox.take(mem::take(&mut self.mail_arrived), &mut mail);
        for item in mail.drain(..) {
            self.take_mail(item);
        }
        self.mail = mail;
    }

    pub(super) fn take_mail(&mut self, mail: Mail) {
        match mail {
            Mail::Answer { target: Target::Stream { key, ticket, work_bytes }, answer } => {
                if let Some((conn, env)) = self.served(key) {
                    let waited_for = conn.answer(ticket, work_bytes, answer, env);
                    // Each ticket is answered once: its bytes would count for ever.
                    debug_assert!(waited_for, "an answer to no message");
                    return;
                }
                self.env.stats.replies_too_late.add(1);
                match self.releasing(key) {
                    Some((conn, env)) => conn.answered_too_late(work_bytes, env),
                    None => self.env.budget.orphan_done(work_bytes),
                }
            }
            Mail::Answer { target: Target::Datagram { socket, peer, work_bytes }, answer } => {
                if let Some(Some(datagrams)) = self.datagrams.get_mut(socket as usize) {
                    datagrams.answer(peer, work_bytes, answer, &mut self.env, self.engine.datagram_output(socket));
                    self.engine.datagrams_added(socket, &mut self.env);
                }
            }
            Mail::Close(key) => self.close(key),
            Mail::Limits(limits) => {
                self.env.limits = *limits;
                self.env.files.set_limits(&self.env.limits);
                // Deadlines that are later now are put off when they come.
                (0..self.places.len() as u32).for_each(|index| self.arm(index));
            }
            Mail::File(begun) => self.file_ended(*begun),
            Mail::Released => self.env.released = true,
            Mail::Wake => self.services.iter().for_each(|(_, service)| service.info().active.set(true)),
            Mail::Drain => self.start_draining(),
            Mail::Stop => self.stop = true,
        }
    }
}
