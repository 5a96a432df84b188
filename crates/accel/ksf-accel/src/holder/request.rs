//! The library's requests. They are judged by the holder's own books and by the kernel (SO_PEERCRED, the descriptors that
//! come with them), never by the shared memory, which the program can write.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering::SeqCst;
use std::time::Instant;

use ksf_accel_proto::message::{Answer, NO_WORKER, Refusal, Request};
use ksf_accel_proto::state::VERSION;
use rustix::event::epoll::{self, EventFlags};

use super::conn::Reply;
use super::listener::{AcceptQueue, cookie_of};
use super::{DISPLACED_REQUESTS, Displaced, EventSource, Holder, data};
use crate::{queue, sys};

const DONE: Answer = Answer::Done { listener: 0, worker: 0, cpu: -1, generation: 0, found: 0 };

impl Holder {
    pub(super) fn answer(&mut self, conn: u64, request: Request, files: Vec<OwnedFd>) -> Reply {
        let file = files.first().map(AsFd::as_fd);
        let result = match request {
            Request::Hello { version, token, pid, begins } => self.hello(conn, version, &token, pid, begins != 0),
            Request::Listen { cookie, backlog } => {
                file.ok_or(Refusal::Malformed).and_then(|socket| self.listen(socket, cookie, backlog)).map(|listener| {
                    done(Answer::Done { listener: listener as u32, worker: 0, cpu: -1, generation: 0, found: 0 })
                })
            }
            Request::Join { cookie, worker, tid, cpu } => {
                file.ok_or(Refusal::Malformed).and_then(|socket| self.join(conn, socket, cookie, worker, tid, cpu))
            }
            Request::Leave { cookie, worker, closed } => self.leave(conn, cookie, worker, closed != 0),
            Request::Steal { cookie, worker } => {
                file.ok_or(Refusal::Malformed).and_then(|socket| self.steal(socket, cookie, worker))
            }
        };
        // Something happens in the program: look soon, and often for a while.
        self.look_timer.activity(Instant::now());
        result.unwrap_or_else(Reply::refused)
    }

    fn hello(
        &mut self,
        number: u64,
        version: u32,
        token: &[u8; 16],
        seen_pid: u32,
        begins: bool,
    ) -> Result<Reply, Refusal> {
        let conn = self.conns.get(&number).ok_or(Refusal::Malformed)?;
        let (pid, uid) = (conn.pid, conn.uid);
        if !self.admits(pid, uid, token) {
            return Err(Refusal::Token);
        }
        if version != VERSION {
            return Err(Refusal::Version);
        }
        // Ids are used again, and the end of the last owner may not have been told yet.
        let is_another = self.lifetime.has_ended(pid);
        if is_another {
            self.process_ended(pid);
        } else if begins {
            self.free_workers_of(pid);
        }
        let conn = self.conns.get(&number).ok_or(Refusal::Malformed)?;
        if !self.lifetime.knows(pid) {
            // A process that is gone already has nothing to be told.
            let pidfd = sys::peer_pidfd(conn.socket.as_fd(), pid).map_err(|_| Refusal::Malformed)?;
            epoll::add(&self.epoll, &pidfd, data(EventSource::Process, pid.into()), EventFlags::IN)
                .map_err(|_| Refusal::Full)?;
            self.lifetime.add(pid, pidfd);
        }
        let state = self.steering.shared.as_fd().try_clone_to_owned().map_err(|_| Refusal::Full)?;
        let lock = self.lifetime.lock().map_err(|_| Refusal::Full)?;
        let conn = self.conns.get_mut(&number).ok_or(Refusal::Malformed)?;
        conn.known = true;
        conn.same_pids = pid == seen_pid;
        Ok(Reply { answer: DONE, files: vec![state, lock] })
    }

    /// True if a process may ask; see the rules in `ksf_accel_proto::message`. The environment's token gets around: it is in
    /// the environment of every program that the accelerated one starts, as whatever user. So it admits the holder's own
    /// user, and that of the process that was started (`ksf accel run -- setpriv --reuid=... PROGRAM`).
    fn admits(&mut self, pid: u32, uid: u32, token: &[u8; 16]) -> bool {
        if same(token, self.lifetime.secret()) {
            return true;
        }
        if !same(token, &self.program_socket.address.token) {
            return false;
        }
        if !self.trusted_users.contains(&uid) && self.lifetime.is_start(pid) {
            self.trusted_users.insert(uid);
        }
        self.trusted_users.contains(&uid)
    }

    fn join(
        &mut self,
        conn: u64,
        own: BorrowedFd<'_>,
        cookie: u64,
        worker: u32,
        tid: u32,
        cpu: i32,
    ) -> Result<Reply, Refusal> {
        // Also one that was never announced: it was made before the library was there, or handed over by another program.
        let index = self.listen(own, cookie, 0)?;
        let (worker, is_new) = match worker {
            NO_WORKER => {
                let preferred = self.orphans(index, cookie);
                (self.new_worker(conn, tid, cpu, &preferred).ok_or(Refusal::Full)?, true)
            }
            worker => (self.own_worker(conn, worker)?, false),
        };
        self.displaced.retain(|displaced| (displaced.listener, displaced.tid) != (index, tid));
        let files = self
            .queue_for(index, worker, own, cookie)
            .and_then(|()| self.set_owner(index, worker, own))
            .and_then(|()| self.files(index, worker));
        let files = match files {
            Ok(files) => files,
            Err(why) => {
                if is_new {
                    self.free_worker(worker);
                }
                self.listener_mut(index).trouble = Some(why);
                return Err(Refusal::Queue);
            }
        };
        let entry = self.workers[worker].as_mut().expect("found or made above");
        entry.joined |= 1 << index;
        let home = entry.cpu.filter(|_| self.options.pin).map_or(-1, |cpu| cpu as i32);
        let generation = entry.generation;
        let answer = Answer::Done { listener: index as u32, worker: worker as u32, cpu: home, generation, found: 0 };
        Ok(Reply { answer, files })
    }

    fn leave(&mut self, conn: u64, cookie: u64, worker: u32, closed: bool) -> Result<Reply, Refusal> {
        let index = self.find(cookie).ok_or(Refusal::Unknown)?;
        if worker != NO_WORKER {
            let worker = self.own_worker(conn, worker)?;
            self.steering.shared.worker(worker).ready.fetch_and(!(1 << index), SeqCst);
            let entry = self.workers[worker].as_mut().expect("found above");
            entry.joined &= !(1 << index);
            let is_idle = entry.joined == 0;
            let is_own = self.listener(index).queues.get(&worker).is_some_and(|queue| queue.own_cookie.is_some());
            if closed && is_own {
                self.forget_own(index, worker);
            }
            if is_idle {
                self.free_worker(worker);
            }
        }
        if closed {
            // No process may have it any more: then its port is to be free at once.
            self.watch();
        }
        Ok(done(DONE))
    }

    /// Who has the listener may accept its connections anyway, and so may take what waits in its queues.
    fn steal(&mut self, own: BorrowedFd<'_>, cookie: u64, worker: u32) -> Result<Reply, Refusal> {
        if !queue::is_listening_tcp(own) || cookie_of(own) != Some(cookie) {
            return Err(Refusal::NotListening);
        }
        let index = self.find(cookie).ok_or(Refusal::Unknown)?;
        // Also of a worker that the process has from its parent: what it takes would otherwise wait.
        let thief = self.live_worker(worker)?;
        let Some(victim) = self.find_unserved(index, thief) else { return Ok(done(DONE)) };
        let queue = self.listener(index).queues[&victim].fd.try_clone().map_err(|_| Refusal::Full)?;
        let answer = Answer::Done { listener: index as u32, worker: victim as u32, cpu: -1, generation: 0, found: 1 };
        Ok(Reply { answer, files: vec![queue] })
    }

    /// Queue and rescue eventfd, for the worker.
    fn files(&self, index: usize, worker: usize) -> Result<Vec<OwnedFd>, String> {
        let listener = self.listener(index);
        let files = [&listener.queues[&worker].fd, &listener.rescue].map(OwnedFd::try_clone);
        files.into_iter().collect::<Result<_, _>>().map_err(|error| format!("a descriptor for the worker: {error}"))
    }

    /// The queue of a worker: one the holder makes, or the worker's own listener in a program with a reuseport group.
    fn queue_for(&mut self, index: usize, worker: usize, own: BorrowedFd<'_>, cookie: u64) -> Result<(), String> {
        let listener = self.listener(index);
        let present = listener.queues.get(&worker).map(|queue| queue.own_cookie);
        let shares = listener.own_reuseport && self.shares(index, worker, cookie);
        if !listener.own_reuseport || shares || present == Some(None) {
            if let Some(Some(_)) = present {
                self.forget_own(index, worker);
            }
            self.add_queue(index, worker, own)?;
            if shares {
                self.displace(index, worker, cookie);
            }
            return Ok(());
        }
        if present == Some(Some(cookie)) {
            return Ok(());
        }
        let fd = own.try_clone_to_owned().map_err(|error| format!("a descriptor of the listener: {error}"))?;
        let mut queue = AcceptQueue::new(fd, Some(cookie));
        // The holder's descriptor keeps the socket open; it is kept only as long as the process is seen to have one, too.
        let pid = self.workers[worker].as_ref().map_or(0, |worker| worker.pid);
        queue.own_fd = sys::descriptor_of(pid, queue.inode, None)
            .map_err(|error| format!("the descriptors of process {pid} cannot be seen: {error}"))?;
        self.steering.add(index, worker, own).map_err(|error| format!("the map of queues: {error}"))?;
        self.listener_mut(index).queues.insert(worker, queue);
        Ok(())
    }

    fn set_owner(&mut self, index: usize, worker: usize, own: BorrowedFd<'_>) -> Result<(), String> {
        self.steering.set_owner(index, worker, own).map_err(|error| format!("the map of listeners: {error}"))
    }

    /// Workers of the same process that serve the listener, but for this one.
    fn siblings(&self, index: usize, worker: usize) -> impl Iterator<Item = (usize, &AcceptQueue)> {
        let pid = self.workers[worker].as_ref().map(|worker| worker.pid);
        self.listener(index).queues.iter().map(|(&other, queue)| (other, queue)).filter(move |&(other, _)| {
            let lives = self.workers[other].as_ref().filter(|other| other.joined & 1 << index != 0);
            other != worker && lives.is_some_and(|other| Some(other.pid) == pid)
        })
    }

    /// True where a process has one socket with SO_REUSEPORT for several workers, as HAProxy has for its threads: such a
    /// socket is nobody's queue, but a listener to be divided. Who has a queue of the holder's shows that, too.
    fn shares(&self, index: usize, worker: usize, cookie: u64) -> bool {
        self.siblings(index, worker).any(|(_, queue)| queue.own_cookie.is_none_or(|own| own == cookie))
    }

    /// Takes the socket from the worker that came first and has it for its queue: given up as if it were dead, it joins
    /// anew at its next `accept()`, to which it is called.
    fn displace(&mut self, index: usize, worker: usize, cookie: u64) {
        let has_it = |&(_, queue): &(usize, &AcceptQueue)| queue.own_cookie == Some(cookie);
        let holders: Vec<usize> = self.siblings(index, worker).filter(has_it).map(|(other, _)| other).collect();
        for other in holders {
            let tid = self.workers[other].as_ref().map_or(0, |worker| worker.tid);
            self.displaced.push(Displaced { listener: index, tid, requests_left: DISPLACED_REQUESTS });
            self.forget_own(index, other);
            self.free_worker(other);
            self.request_rescue(index);
        }
    }

    /// Indexes whose queue has lost its worker, those with waiting connections first.
    fn orphans(&self, index: usize, cookie: u64) -> Vec<usize> {
        let listener = self.listener(index);
        let orphaned = |&(&worker, _): &(&usize, &AcceptQueue)| self.workers[worker].is_none();
        let mut found: Vec<usize> = if listener.own_reuseport {
            let same = |queue: &AcceptQueue| queue.own_cookie.is_none_or(|own| own == cookie);
            listener
                .queues
                .iter()
                .filter(orphaned)
                .filter(|(_, queue)| same(queue))
                .map(|(&worker, _)| worker)
                .collect()
        } else {
            listener.queues.iter().filter(orphaned).map(|(&worker, _)| worker).collect()
        };
        let waiting =
            |worker: &usize| super::listener::waiting(listener.queues[worker].fd.as_fd()).map_or(0, |it| it.0);
        found.sort_by_key(|worker| std::cmp::Reverse(waiting(worker)));
        found
    }

    /// The index, if it is a worker of this connection's process.
    fn own_worker(&self, conn: u64, worker: u32) -> Result<usize, Refusal> {
        let index = self.live_worker(worker)?;
        let pid = self.conns.get(&conn).map(|conn| conn.pid);
        if self.workers[index].as_ref().map(|worker| worker.pid) == pid { Ok(index) } else { Err(Refusal::Malformed) }
    }

    fn live_worker(&self, worker: u32) -> Result<usize, Refusal> {
        let index = worker as usize;
        if self.workers.get(index).is_some_and(Option::is_some) { Ok(index) } else { Err(Refusal::Malformed) }
    }
}

fn done(answer: Answer) -> Reply {
    Reply { answer, files: Vec::new() }
}

/// Takes the same time wherever they differ.
fn same(a: &[u8; 16], b: &[u8; 16]) -> bool {
    a.iter().zip(b).fold(0, |differ, (a, b)| differ | (a ^ b)) == 0
}
