//! What is said to people.

use std::os::fd::AsFd;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::time::Instant;

use super::Holder;
use super::listener::{self, Listener};
use crate::Level;
use crate::status::{self, ListenerStatus, QueueStatus, RefusedRequests, Request, Status, WorkerStatus};

impl Holder {
    pub(super) fn serve_status(&mut self) {
        if let Some(mut socket) = self.status_socket.take() {
            socket.serve(|line| status::answer(line, |request| self.act(request)));
            self.status_socket = Some(socket);
        }
    }

    fn act(&mut self, request: Request) -> Result<Status, String> {
        match request {
            Request::Status => {}
            Request::Pause => self.switch(false),
            Request::Resume => self.switch(true),
        }
        Ok(self.status())
    }

    fn switch(&mut self, on: bool) {
        self.options.on = on;
        self.steering.shared.state().control.on.store(on.into(), SeqCst);
        self.tell_all();
        self.look_timer.activity(Instant::now());
    }

    fn status(&self) -> Status {
        Status {
            pid: std::process::id(),
            name: self.program_socket.address.name.clone(),
            attached: false,
            program: self.options.program.clone(),
            source_ports: self.options.source_ports.clone(),
            on: self.options.on,
            level: self.level(),
            refused: self.steering.refused.clone(),
            other_programs: self.steering.others(),
            processes: self.lifetime.processes(),
            listeners: (0..self.listeners.len())
                .filter_map(|index| {
                    self.listeners[index].as_ref().map(|listener| self.listener_status(index, listener))
                })
                .collect(),
            workers: (0..self.workers.len()).filter_map(|index| self.worker_status(index)).collect(),
            ended_workers: self.ended_workers,
            stalls: self.stalls,
            rescues: self.rescues,
            refused_requests: self
                .refused_requests
                .values()
                .map(|&(reason, count)| RefusedRequests { why: reason.text().to_owned(), count })
                .collect(),
        }
    }

    fn listener_status(&self, index: usize, listener: &Listener) -> ListenerStatus {
        let queues = listener.queues.iter().map(|(&worker, queue)| {
            let (waiting, waiting_max) = listener::waiting(queue.fd.as_fd()).unwrap_or_default();
            QueueStatus { worker: worker as u32, ready: self.is_ready(index, worker), waiting, waiting_max }
        });
        ListenerStatus {
            address: listener.address.to_string(),
            mechanism: if listener.not_accelerated.is_some() { Level::Plain } else { self.level() },
            not_accelerated: listener.not_accelerated.clone(),
            trouble: listener.trouble.clone().or_else(|| self.undivided(listener)),
            own_reuseport: listener.own_reuseport && listener.queues.values().all(|queue| queue.own_cookie.is_some()),
            excluded: listener.excluded.clone(),
            queues: queues.collect(),
        }
    }

    /// Workers of which others have the same socket for their queue: what is steered to one may be taken by any of them.
    fn undivided(&self, listener: &Listener) -> Option<String> {
        let living = listener.queues.iter().filter(|(worker, _)| self.workers[**worker].is_some());
        let own: Vec<u64> = living.filter_map(|(_, queue)| queue.own_cookie).collect();
        let shared = own.iter().filter(|cookie| own.iter().filter(|other| other == cookie).count() > 1).count();
        (shared > 0).then(|| {
            format!("{shared} workers share a socket on which the program has set SO_REUSEPORT; it is not divided among them")
        })
    }

    fn worker_status(&self, index: usize) -> Option<WorkerStatus> {
        let worker = self.workers[index].as_ref()?;
        let address = |(at, listener): (usize, &Option<Listener>)| {
            listener.as_ref().filter(|_| self.is_ready(at, index)).map(|listener| listener.address.to_string())
        };
        Some(WorkerStatus {
            index: index as u32,
            pid: worker.pid,
            tid: worker.tid,
            cpu: worker.cpu,
            ready: self.listeners.iter().enumerate().filter_map(address).collect(),
            stalled: self.steering.shared.worker(index).stalled.load(Relaxed) != 0,
            counters: self.steering.shared.counters(index),
        })
    }
}
