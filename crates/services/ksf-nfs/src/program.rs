//! The program NFS, version 3: from a call to a lane and back.

use std::sync::Arc;
use std::time::Instant;

use ksf::Peer;
use ksf::pool::Chunk;
use ksf_fs::{Credential as Caller, Fs, Lane, Lanes};
use ksf_proto::oncrpc::Credential;
use ksf_services::rpc::{Answered, ProcError, RpcCall, RpcDeferred, RpcReply};

use crate::counters::Counters;
use crate::drc::{Begun, ClientAddress, Drc, Origin, Ticket};
use crate::exports::{Exports, Sender};
use crate::procedure::Procedure;
use crate::request::{Refusal, Request};
use crate::results::{Failed, ReadDone, put_not_begun, read, run};
use crate::status::Status;
use crate::wire::{put_attr, put_status};

/// What requests need while they are carried out. It has no lanes: a lane that gave up the last of them would wait for itself.
pub(crate) struct Core {
    pub(crate) fs: Fs,
    pub(crate) exports: Exports,
    pub(crate) drc: Drc<RpcDeferred>,
    pub(crate) counters: Counters,
    /// Greatest READ and WRITE.
    pub(crate) transfer_bytes_max: u32,
    pub(crate) started: Instant,
}

impl Core {
    fn now_ms(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// Whether the exports of these handles are for this client.
    fn admits(&self, sender: Sender, request: &Request) -> bool {
        let (first, second) = request.handles();
        let admits = |handle| {
            let export = self.fs.export_of(handle);
            let exported = export.and_then(|export| self.exports.of_id(export.id()));
            exported.is_some_and(|exported| exported.admits(sender))
        };
        admits(first) && second.is_none_or(admits)
    }
}

/// The caller of a request, as the file layer knows callers.
pub(crate) fn caller_of(credential: &Credential<'_>) -> Caller {
    match credential {
        Credential::None => Caller::anonymous(),
        Credential::Sys(sys) => {
            let groups: Vec<u32> = sys.gids.iter().collect();
            Caller::unix(sys.uid, sys.gid, &groups)
        }
    }
}

/// NFSv3.
pub(crate) struct NfsProgram {
    pub(crate) core: Arc<Core>,
    pub(crate) lanes: Arc<Lanes>,
}

impl NfsProgram {
    /// Answers a call, or gives it to a lane.
    pub(crate) fn call(&self, origin: &mut Origin, call: &RpcCall<'_>, reply: RpcReply<'_>) -> Answered {
        let started = Instant::now();
        let peer = call.peer();
        if matches!(peer, Peer::Udp(_)) {
            // A reply would be many times as long as the call, whose sender nobody has checked.
            return reply.error(ProcError::ProgUnavail);
        }
        let Some(procedure) = Procedure::of(call.procedure) else { return reply.error(ProcError::ProcUnavail) };
        if procedure == Procedure::Null {
            self.core.counters.answered(procedure, Status::OK, started.elapsed());
            return reply.void();
        }
        let sender = Sender::of(peer);
        let refuse = |status, reply: RpcReply<'_>| {
            self.core.counters.answered(procedure, status, started.elapsed());
            reply.results(|out| {
                put_not_begun(out, procedure, status);
                Ok(())
            })
        };
        let mut request = match Request::read(procedure, call.args, &self.core.fs, |data| call.keep(data)) {
            Ok(request) if self.core.admits(sender, &request) => request,
            Ok(_) => return refuse(Status::ACCES, reply),
            Err(Refusal::Status(status)) => return refuse(status, reply),
            Err(Refusal::Garbage) => return reply.error(ProcError::GarbageArgs),
        };
        if let Request::Getattr { object } = &request
            && let Some(attr) = self.core.fs.known_attr(object)
        {
            self.core.counters.answered(procedure, Status::OK, started.elapsed());
            return reply.results(|out| {
                put_status(out, Status::OK);
                put_attr(out, &attr);
                Ok(())
            });
        }
        request.bound(self.core.transfer_bytes_max);
        let (answered, way) = reply.defer_for(request.results_bytes_max());
        let (way, ticket) = if procedure.changes() {
            let client = match peer {
                Peer::Tcp(address) => ClientAddress::of_stream(address),
                _ => ClientAddress::of_this_machine(),
            };
            let key = self.core.drc.key(client, call);
            let is_named = matches!(call.credential, Credential::Sys(sys) if !sys.machine_name.is_empty());
            match self.core.drc.begin(key, origin, is_named, self.core.now_ms(), way) {
                Begun::Started(ticket, way) => (way, Some(ticket)),
                Begun::Replay(way, results) => {
                    self.core.counters.replayed(procedure);
                    answer(way, &results);
                    return answered;
                }
                Begun::Waits => return answered,
                Begun::Full(way) => {
                    let mut results = Vec::new();
                    put_not_begun(&mut results, procedure, Status::JUKEBOX);
                    self.core.counters.answered(procedure, Status::JUKEBOX, started.elapsed());
                    answer(way, &results);
                    return answered;
                }
            }
        } else {
            (way, None)
        };
        let caller = caller_of(&call.credential);
        let core = Arc::clone(&self.core);
        // What waits is in the budgets of connection and shard, at which no further request is taken.
        self.lanes.submit(request.bytes(), move |lane| {
            Job { core: &core, procedure, caller, request, way, ticket, started }.run(lane);
        });
        answered
    }
}

/// A request on its lane.
struct Job<'a> {
    core: &'a Core,
    procedure: Procedure,
    caller: Caller,
    request: Request,
    way: RpcDeferred,
    ticket: Option<Ticket<RpcDeferred>>,
    started: Instant,
}

impl Job<'_> {
    fn run(self, lane: &mut Lane) {
        let Self { core, procedure, caller, request, way, ticket, started } = self;
        if let Request::Read { file, offset, count } = &request {
            return match read(&core.fs, lane, &caller, file, *offset, *count) {
                Ok(ReadDone { head, data }) => {
                    core.counters.answered(procedure, Status::OK, started.elapsed());
                    // From where they lie.
                    way.results_with(|out| out.extend_from_slice(&head), Chunk::from_vec(data));
                }
                Err(Failed { status, results }) => {
                    core.counters.answered(procedure, status, started.elapsed());
                    answer(way, &results);
                }
            };
        }
        let mut results = Vec::with_capacity(256);
        let status = run(&core.fs, lane, &caller, &request, core.transfer_bytes_max, &mut results);
        // The data of a WRITE go back to their pool before the client hears that they may be sent again.
        drop(request);
        core.counters.answered(procedure, status, started.elapsed());
        let waiting = match ticket {
            Some(ticket) if status == Status::JUKEBOX => ticket.forget(),
            Some(ticket) => ticket.end(&results, core.now_ms()),
            None => Vec::new(),
        };
        for way in waiting {
            core.counters.replayed(procedure);
            answer(way, &results);
        }
        answer(way, &results);
    }
}

fn answer(way: RpcDeferred, results: &[u8]) {
    way.results(|out| {
        out.extend_from_slice(results);
        Ok(())
    });
}
