//! The program NFS, version 3: from a call to a lane and back.

use std::sync::Arc;
use std::time::Instant;

use ksf::Peer;
use ksf::pool::Chunk;
use ksf_fs::{Account, Credential as Caller, Exports, Fs, Handle, Lane, Lanes, Length, Owed, Sender, WarmTurn};
use ksf_proto::oncrpc::{Call, Credential, MOUNT_PROGRAM, NFS_PROGRAM};
use ksf_services::rpc::{Answered, ProcError, RpcCall, RpcDeferred, RpcReply};

use crate::activity::{Activity, Cells, Connection};
use crate::counters::Counters;
use crate::drc::{Begun, ClientAddress, Drc, Ticket};
use crate::mount::{DUMP, Mounts};
use crate::procedure::Procedure;
use crate::request::{FIXED_BYTES, Objects, Refusal, Request, results_bytes_max, status_of};
use crate::results::{Failed, Ran, ReadDone, Warmed, committed, put_not_begun, read, run};
use crate::status::Status;

/// What requests need while they are carried out. It has no lanes: a lane that gave up the last of them would wait for itself.
pub(crate) struct Core {
    pub(crate) fs: Arc<Fs>,
    pub(crate) exports: Exports,
    pub(crate) drc: Drc<RpcDeferred>,
    pub(crate) counters: Counters,
    pub(crate) activity: Activity,
    pub(crate) mounts: Mounts,
    /// Greatest READ and WRITE.
    pub(crate) transfer_bytes_max: u32,
    pub(crate) started: Instant,
}

impl Core {
    fn now_ms(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// The object of a handle, if its export is for this client.
    fn object(&self, sender: Sender, handle: &[u8]) -> Result<Handle, Status> {
        let object = self.fs.decode(handle).map_err(status_of)?;
        let exported = self.exports.of_id(object.export_id());
        if exported.is_some_and(|exported| exported.admits(sender)) { Ok(object) } else { Err(Status::ACCES) }
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

/// Where a call comes from, as the exports know senders.
pub(crate) fn sender_of(peer: Peer) -> Sender {
    Sender::new(match peer {
        Peer::Tcp(address) | Peer::Udp(address) => Some(address),
        _ => None,
    })
}

/// NFSv3.
pub(crate) struct NfsProgram {
    pub(crate) core: Arc<Core>,
    pub(crate) lanes: Arc<Lanes>,
}

impl NfsProgram {
    /// Most bytes that the reply to a message may have.
    pub(crate) fn reply_bytes(&self, message: &[u8]) -> usize {
        let Ok(call) = Call::parse(message) else { return 0 };
        match (call.program, Procedure::of(call.procedure)) {
            (NFS_PROGRAM, Some(procedure)) => results_bytes_max(procedure, call.args, self.core.transfer_bytes_max),
            (MOUNT_PROGRAM, _) if call.procedure == DUMP => self.core.mounts.dump_bytes_max(),
            _ => 0,
        }
    }

    /// Answers a call in this turn of the shard, or gives it to a lane. `transfer_bytes_max`: at its listener.
    pub(crate) fn call(
        &self,
        turn: &mut WarmTurn,
        connection: &mut Connection,
        transfer_bytes_max: u32,
        call: &RpcCall<'_>,
        reply: RpcReply<'_>,
    ) -> Answered {
        let started = Instant::now();
        connection.client.called();
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
        let sender = sender_of(peer);
        let object = |handle: &[u8]| self.core.object(sender, handle);
        let mut request = match Request::read(procedure, call.args, &object, |data| call.keep(data)) {
            Ok(request) => request,
            Err(Refusal::Garbage) => return reply.error(ProcError::GarbageArgs),
            Err(Refusal::Status(status, objects)) => {
                let mut warm = self.core.fs.warm(turn, &mut connection.share);
                let mut known = |object: &Option<Handle>| {
                    object.as_ref().map_or(Some(None), |object| warm.getattr(object).map(Some))
                };
                if let (Some(first), Some(second)) = (known(&objects[0]), known(&objects[1])) {
                    if objects.iter().any(Option::is_some) {
                        self.core.fs.count_warm();
                    }
                    self.core.counters.answered(procedure, status, started.elapsed());
                    return reply.results(|out| {
                        put_not_begun(out, procedure, status, [first, second]);
                        Ok(())
                    });
                }
                let (answered, way) = reply.defer_for(FIXED_BYTES);
                let (core, client) = (Arc::clone(&self.core), Arc::clone(&connection.client));
                let ending = Ending { core, client, procedure, way, ticket: None, started, transfer_bytes_max };
                refuse(&self.lanes, &connection.account, ending, status, *objects);
                return answered;
            }
        };
        request.bound(transfer_bytes_max);
        let mut caller = caller_of(&call.credential);
        let has_groups = self.core.fs.has_groups(&mut caller, request.handles().0);
        if has_groups {
            let warm = self.core.fs.warm(turn, &mut connection.share);
            if let Some(done) = Warmed::by(warm, &caller, &request) {
                self.core.fs.count_warm();
                self.core.counters.answered(procedure, done.status(), started.elapsed());
                connection.client.has_read(done.read_bytes());
                return done.answer(reply);
            }
        }
        let (answered, way) = reply.defer_for(request.results_bytes_max());
        let (way, ticket) = if procedure.changes() {
            let client = match peer {
                Peer::Tcp(address) => ClientAddress::of_stream(address),
                _ => ClientAddress::of_this_machine(),
            };
            let key = self.core.drc.key(client, call);
            let is_named = matches!(call.credential, Credential::Sys(sys) if !sys.machine_name.is_empty());
            match self.core.drc.begin(key, &connection.origin, is_named, self.core.now_ms(), way) {
                Begun::Started(ticket, way) => (way, Some(ticket)),
                Begun::Replay(way, results) => {
                    self.core.counters.replayed(procedure);
                    answer(way, &results);
                    return answered;
                }
                Begun::Waits => return answered,
                Begun::Foreign(way) => {
                    // What is dropped without an answer closes its connection.
                    drop(way);
                    return answered;
                }
            }
        } else {
            (way, None)
        };
        let (core, client) = (Arc::clone(&self.core), Arc::clone(&connection.client));
        let ending = Ending { core, client, procedure, transfer_bytes_max, way, ticket, started };
        // What waits is in the budgets of connection and shard, at which no further request is taken.
        if has_groups {
            to_lane(&self.lanes, &connection.account, ending, caller, request);
        } else {
            let (handle, lanes) = (request.handles().0.clone(), Arc::clone(&self.lanes));
            let account = connection.account.clone();
            self.core.fs.look_up_groups(&connection.account, caller, &handle, move |caller| match caller {
                Ok(caller) => to_lane(&lanes, &account, ending, caller, request),
                Err(error) => refuse(&lanes, &account, ending, status_of(error), request.objects()),
            });
        }
        answered
    }
}

fn to_lane(lanes: &Lanes, account: &Account, ending: Ending, caller: Caller, request: Request) {
    let share = ending.core.fs.share_of(request.handles().0);
    let length = if ending.procedure.is_long() { Length::Long } else { Length::Short };
    lanes.submit_for(account, share, length, request.bytes(), move |lane| carry_out(ending, caller, request, lane));
}

/// Answers a call that is not carried out, with the attributes of its objects.
fn refuse(lanes: &Lanes, account: &Account, ending: Ending, status: Status, objects: Objects) {
    let core = Arc::clone(&ending.core);
    let share = objects.iter().flatten().next().map_or(0, |handle| core.fs.share_of(handle));
    let bytes = size_of::<Ending>() + size_of::<Objects>();
    lanes.submit_for(account, share, Length::Short, bytes, move |lane| {
        let attrs = objects.map(|object| object.and_then(|handle| core.fs.getattr(lane, &handle).ok()));
        let mut results = Vec::with_capacity(256);
        put_not_begun(&mut results, ending.procedure, status, attrs);
        ending.answer(status, &results);
    });
}

/// Carries a request out on its lane. What it leaves to be synced is synced elsewhere before it is answered.
fn carry_out(ending: Ending, caller: Caller, request: Request, lane: &mut Lane) {
    let core = Arc::clone(&ending.core);
    if let Request::Read { file, offset, count } = &request {
        return match read(&core.fs, lane, &caller, file, *offset, *count) {
            Ok(ReadDone { head, data }) => {
                core.counters.answered(ending.procedure, Status::OK, ending.started.elapsed());
                ending.client.has_read(data.len());
                // From where they lie.
                ending.way.results_with(|out| head.put(out), Chunk::from_vec(data));
            }
            Err(Failed { status, results }) => ending.answer(status, &results),
        };
    }
    if let Request::Commit { file } = request {
        let fs = Arc::clone(&core.fs);
        return lane.settle(&fs, Owed::commit(file.clone()), size_of::<Ending>(), move |lane, synced| {
            let mut results = Vec::with_capacity(256);
            let Ran { status, .. } = committed(&mut results, core.fs.committed(lane, &file, synced));
            ending.answer(status, &results);
        });
    }
    let mut results = Vec::with_capacity(256);
    let (ran, owed) =
        lane.owing(|lane| run(&core.fs, lane, &caller, &request, ending.transfer_bytes_max, &mut results));
    if owed.has_no_room() {
        let (share, bytes) = (core.fs.share_of(request.handles().0), request.bytes());
        return lane.leave(share, bytes, move |lane| carry_out(ending, caller, request, lane));
    }
    let written = if let Request::Write { data, .. } = &request { data.len() } else { 0 };
    // The data of a WRITE go back to their pool before the client hears that they may be sent again.
    drop(request);
    let bytes = size_of::<Ending>() + results.capacity();
    lane.settle(&core.fs, owed, bytes, move |_, settled| {
        let mut status = ran.status;
        if let Err(error) = settled {
            status = status_of(error);
            ran.fail(&mut results, status);
        }
        if status == Status::OK {
            ending.client.has_written(written);
        }
        ending.answer(status, &results);
    });
}

/// The end of a request.
struct Ending {
    core: Arc<Core>,
    client: Arc<Cells>,
    procedure: Procedure,
    /// What FSINFO tells.
    transfer_bytes_max: u32,
    way: RpcDeferred,
    ticket: Option<Ticket<RpcDeferred>>,
    started: Instant,
}

impl Ending {
    fn answer(self, status: Status, results: &[u8]) {
        let Self { core, procedure, way, ticket, started, .. } = self;
        core.counters.answered(procedure, status, started.elapsed());
        let waiting = match ticket {
            Some(ticket) if status == Status::JUKEBOX => ticket.forget(),
            Some(ticket) => ticket.end(results, core.now_ms()),
            None => Vec::new(),
        };
        for way in waiting {
            core.counters.replayed(procedure);
            answer(way, results);
        }
        answer(way, results);
    }
}

fn answer(way: RpcDeferred, results: &[u8]) {
    way.results(|out| {
        out.extend_from_slice(results);
        Ok(())
    });
}
