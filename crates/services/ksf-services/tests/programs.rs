//! What an author of RPC programs can rely on: results are whole or not there at
//! all, and each call has exactly one answer.

mod common;

use std::any::Any;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use common::{SLOT_BYTES, Wire, counter};
use ksf::connection::Connection;
use ksf::env::Env;
use ksf::files::{File, FileRange};
use ksf::limits::{Limits, Time};
use ksf::pool::{Chunk, Memory, Pool};
use ksf::service::ConnKey;
use ksf::shard_service::OnShard;
use ksf::tasks::{TaskOptions, TaskPool};
use ksf::{Peer, Refused, Service, ShardService, Turn};
use ksf_proto::oncrpc::{AuthStat, Credential};
use ksf_proto::xdr::{XdrReader, XdrWrite};
use ksf_services::rpc::{
    Answered, ProcError, Program, ProgramTable, ResultPieces, RpcCall, RpcDeferred, RpcOnWorkers, RpcReply, RpcService,
    RpcTurn, ShardProgram, nfs_null,
};
use ksf_test::alloc::{Counting, allocations};

#[global_allocator]
static COUNTING: Counting = Counting;

/// Procedures: 1 adds two numbers, 2 fails after it wrote something, 3 is for
/// AUTH_SYS only and answers the user, 4 answers with data of a length from the thread
/// pool, 5 the same at once, 6 from a thread that may block, 7 goes on on its
/// connection, 8 tells what it knows of the call and gives its arguments back, 9
/// answers with data of the length twice, and 10 the same from another thread; 11
/// and 12 as 9 and 10, with a range of a file between both.
struct Sample;

/// Data that tells one place from another.
fn data(bytes: u32) -> Chunk {
    Chunk::from_vec((0..bytes).map(|at| at as u8).collect())
}

impl Program for Sample {
    fn name(&self) -> &str {
        "sample"
    }

    fn number(&self) -> u32 {
        0x2000_0001
    }

    fn versions(&self) -> RangeInclusive<u32> {
        1..=1
    }

    fn call(&self, call: &RpcCall<'_>, reply: RpcReply<'_, '_>) -> Answered {
        match call.procedure {
            1 => reply.results(|out| {
                let mut args = XdrReader::new(call.args);
                let sum = args.u32()?.wrapping_add(args.u32()?);
                args.finish()?;
                out.put_u32(sum);
                Ok(())
            }),
            2 => reply.results(|out| {
                out.put_opaque(b"half of it");
                Err(ProcError::SystemErr)
            }),
            3 => match call.credential {
                Credential::Sys(sys) => reply.results(|out| {
                    out.put_u32(sys.uid);
                    Ok(())
                }),
                Credential::None => reply.error(ProcError::Auth(AuthStat::TOOWEAK)),
            },
            5 | 6 => {
                let Ok(bytes) = XdrReader::new(call.args).u32() else { return reply.error(ProcError::GarbageArgs) };
                let later = move |deferred: RpcDeferred| {
                    deferred.results_with(|out| out.put_u32(bytes), data(bytes));
                };
                match call.procedure {
                    5 => reply.results_with(|out| out.put_u32(bytes), data(bytes)),
                    _ => reply.block(bytes as usize, later),
                }
            }
            7 => {
                let (answered, deferred) = reply.defer_for(4);
                deferred.resume(70_u32);
                answered
            }
            8 => {
                assert_eq!(call.peer(), ksf::Peer::Tcp("127.0.0.1:9".parse().unwrap()));
                let key = call.key().index;
                let kept = call.keep(call.args);
                assert!(call.message().bytes().ends_with(&kept));
                reply.results_with(|out| out.put_u32(key), kept)
            }
            9..=12 => {
                let Ok(bytes) = XdrReader::new(call.args).u32() else { return reply.error(ProcError::GarbageArgs) };
                let file = || File::from(std::fs::File::open("/dev/zero").unwrap());
                let range = (call.procedure > 10).then(|| FileRange { file: file(), offset: 0, bytes: 5 });
                let add = move |pieces: &mut ResultPieces<'_, '_>| {
                    pieces.opaque(data(bytes));
                    pieces.write(|out| out.put_u32(99));
                    if let Some(range) = range {
                        pieces.opaque_file(range)?;
                    }
                    pieces.opaque(data(bytes + 1));
                    Ok(())
                };
                if call.procedure % 2 == 1 {
                    return reply.results_pieces(add).unwrap_or_else(|reply| reply.error(ProcError::SystemErr));
                }
                reply.block(2 * bytes as usize, move |deferred| {
                    if let Err(deferred) = deferred.results_pieces(add) {
                        deferred.error(ProcError::SystemErr);
                    }
                })
            }
            _ => reply.error(ProcError::ProcUnavail),
        }
    }

    fn resume(&self, state: Box<dyn Any + Send>, reply: RpcReply<'_, '_>) -> Answered {
        let Ok(number) = state.downcast::<u32>() else { return reply.error(ProcError::SystemErr) };
        reply.results(|out| {
            out.put_u32(*number + 7);
            Ok(())
        })
    }
}

fn service() -> Arc<RpcService> {
    let mut table = ProgramTable::new();
    table.register(Sample).unwrap();
    Arc::new(RpcService::new("sample", table))
}

/// Words behind a record mark of their length.
fn record(words: &[u32]) -> Vec<u8> {
    let mark = (4 * words.len() as u32) | (1 << 31);
    std::iter::once(&mark).chain(words).flat_map(|w| w.to_be_bytes()).collect()
}

/// A call with AUTH_NONE.
fn call(procedure: u32, args: &[u32]) -> Vec<u8> {
    record(&[&[7, 0, 2, 0x2000_0001, 1, procedure, 0, 0, 0, 0][..], args].concat())
}

fn accepted(rest: &[u32]) -> Vec<u8> {
    record(&[&[7, 1, 0, 0, 0][..], rest].concat())
}

#[test]
fn results_follow_the_header() {
    let mut wire = Wire::new(&service());
    assert_eq!(wire.feed(&call(1, &[40, 2])), accepted(&[0, 42]));
}

#[test]
fn arguments_that_cannot_be_decoded_are_garbage() {
    let service = service();
    let mut wire = Wire::new(&service);
    for args in [&[40][..], &[], &[40, 2, 0]] {
        assert_eq!(wire.feed(&call(1, args)), accepted(&[4]), "{args:?}");
    }
    assert_eq!(counter(&*service, "garbage_args"), 3);
}

#[test]
fn what_a_failed_procedure_wrote_is_taken_back() {
    let service = service();
    let mut wire = Wire::new(&service);
    let stream = [call(1, &[1, 1]), call(2, &[]), call(1, &[2, 2])].concat();
    let expected = [accepted(&[0, 2]), accepted(&[5]), accepted(&[0, 4])].concat();
    assert_eq!(wire.feed(&stream), expected, "and replies before it stay");
    assert_eq!(counter(&*service, "system_err"), 1);
}

#[test]
fn a_procedure_can_ask_for_a_stronger_credential() {
    let service = service();
    let mut wire = Wire::new(&service);
    assert_eq!(wire.feed(&call(3, &[])), record(&[7, 1, 1, 1, 5]));
    assert_eq!(counter(&*service, "auth_error"), 1);
    let sys = [1, 20, 0, 0, 1000, 100, 0, 0, 0];
    let with_sys = record(&[&[7, 0, 2, 0x2000_0001, 1, 3][..], &sys].concat());
    assert_eq!(wire.feed(&with_sys), accepted(&[0, 1000]));
}

/// The results of procedures 4 to 6: a length, that many bytes, and zeros up to a multiple of four.
fn with_data(bytes: u32) -> Vec<u8> {
    let mut body: Vec<u8> = [7, 1, 0, 0, 0, 0, bytes].into_iter().flat_map(u32::to_be_bytes).collect();
    body.extend_from_slice(&data(bytes));
    body.resize(body.len().next_multiple_of(4), 0);
    let mark = body.len() as u32 | 1 << 31;
    [&mark.to_be_bytes()[..], &body].concat()
}

#[test]
fn data_leaves_from_where_it_lies_and_is_padded() {
    let mut wire = Wire::new(&service());
    for bytes in [0, 1, 2, 3, 4, 2047, 2048, 2049, 100_001] {
        assert_eq!(wire.feed(&call(5, &[bytes])), with_data(bytes), "{bytes} bytes at once");
        assert_eq!(wire.feed(&call(6, &[bytes])), b"");
        assert_eq!(wire.deliver(), with_data(bytes), "{bytes} bytes later");
    }
}

/// With threads for tasks, and without.
#[test]
fn results_are_taken_off_the_budget_before_the_work_begins() {
    let limits = Limits { connection_bytes_max: 100_000, ..Limits::default() };
    for tasks in [None, Some(TaskPool::new(TaskOptions::default()))] {
        let tasks = tasks.map(Arc::new);
        for (bytes, reads_on) in [(90_000, true), (100_000, false)] {
            let mut wire = Wire::with_limits(&service(), limits.clone());
            wire.set_tasks(tasks.clone());
            assert_eq!(wire.feed(&call(6, &[bytes])), b"");
            // However fast the answer comes: it is delivered only when the test asks for it.
            assert_eq!(wire.wants_bytes(), reads_on, "{bytes} bytes, {tasks:?}");
        }
    }
}

/// The results of procedures 9 and 10.
fn with_data_twice(bytes: u32) -> Vec<u8> {
    let mut body: Vec<u8> = [7, 1, 0, 0, 0, 0].into_iter().flat_map(u32::to_be_bytes).collect();
    body.put_opaque(&data(bytes));
    body.put_u32(99);
    body.put_opaque(&data(bytes + 1));
    let mark = body.len() as u32 | 1 << 31;
    [&mark.to_be_bytes()[..], &body].concat()
}

#[test]
fn several_data_leave_from_where_they_lie_and_are_padded() {
    let mut wire = Wire::new(&service());
    for bytes in [0, 1, 2, 3, 4, 2047, 2048, 2049, 100_001] {
        assert_eq!(wire.feed(&call(9, &[bytes])), with_data_twice(bytes), "{bytes} bytes at once");
        assert_eq!(wire.feed(&call(10, &[bytes])), b"");
        assert_eq!(wire.deliver(), with_data_twice(bytes), "{bytes} bytes later");
    }
}

/// No range of a file leaves from a worker. The call can still be answered, once, and nothing of the first try is left.
#[test]
fn workers_send_several_data_and_no_range_of_a_file() {
    let mut wire = Wire::new(&Arc::new(RpcOnWorkers::new(service()).unwrap()));
    let taken = wire.on_worker();
    for bytes in [0, 1, 2, 3, 4, 2047, 2048, 2049, 100_001] {
        assert_eq!(wire.feed(&call(9, &[bytes])), with_data_twice(bytes), "{bytes} bytes at once");
        assert_eq!(wire.feed(&call(10, &[bytes])), b"");
        assert_eq!(wire.deliver_taken(&taken), with_data_twice(bytes), "{bytes} bytes later");
        assert_eq!(wire.feed(&call(11, &[bytes])), accepted(&[5]), "{bytes} bytes and a file at once");
        assert_eq!(wire.feed(&call(12, &[bytes])), b"");
        assert_eq!(wire.deliver_taken(&taken), accepted(&[5]), "{bytes} bytes and a file later");
    }
}

#[test]
fn a_call_goes_on_on_its_connection() {
    let mut wire = Wire::new(&service());
    assert_eq!(wire.feed(&call(7, &[])), b"");
    assert_eq!(wire.deliver(), accepted(&[0, 77]));
}

#[test]
fn a_program_knows_where_a_call_came_from_and_keeps_its_arguments() {
    let mut wire = Wire::new(&service());
    assert_eq!(wire.feed(&call(8, &[1, 2, 3])), accepted(&[0, 0, 1, 2, 3]));
    let long: Vec<u32> = (0..700).collect();
    assert_eq!(wire.feed(&call(8, &long)), accepted(&[&[0, 0][..], &long].concat()));
}

/// Answers how many calls the shard and the connection had. It takes TCP connections; the others it refuses, or it panics.
struct Guests {
    number: u32,
    strict: bool,
    open: Arc<AtomicU32>,
}

impl ShardProgram for Guests {
    type Shard = u32;
    type Conn = u32;

    fn name(&self) -> &str {
        "guests"
    }

    fn number(&self) -> u32 {
        self.number
    }

    fn versions(&self) -> RangeInclusive<u32> {
        1..=1
    }

    fn start(&self, _: &mut RpcTurn<'_, '_>) -> std::io::Result<u32> {
        Ok(0)
    }

    fn accept(&self, _: &mut u32, peer: &Peer) -> Result<u32, Refused> {
        match peer {
            Peer::Unnamed if self.strict => return Err(Refused),
            Peer::Unix if self.strict => panic!("as the test wants it"),
            _ => self.open.fetch_add(1, Ordering::Relaxed),
        };
        Ok(0)
    }

    fn call(&self, shard: &mut u32, conn: &mut u32, _: &RpcCall<'_>, reply: RpcReply<'_, '_>) -> Answered {
        (*shard, *conn) = (*shard + 1, *conn + 1);
        reply.results(|out| {
            out.put_u32(*shard);
            out.put_u32(*conn);
            Ok(())
        })
    }

    fn close(&self, _: &mut u32, _: u32) {
        self.open.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Two programs with state, on one shard.
struct Shard {
    env: Env,
    on: OnShard<RpcService>,
    open: [Arc<AtomicU32>; 2],
}

impl Shard {
    fn new() -> Self {
        let mut table = ProgramTable::new();
        let open = [Arc::default(), Arc::default()];
        for (number, open) in [0x2000_0001, 0x2000_0002].into_iter().zip(&open) {
            table.register(Guests { number, strict: number % 2 == 0, open: Arc::clone(open) }).unwrap();
        }
        let service = Arc::new(RpcService::new("guests", table));
        let mut env = Env::new(Limits::default(), Pool::new(Memory::Anonymous, SLOT_BYTES as u32, 8).unwrap()).unwrap();
        let state = service.start(&mut Turn::new(&mut env)).unwrap();
        Self { env, on: OnShard::new(service, state), open }
    }

    fn connect(&self, index: u32, peer: Peer) -> Result<Box<Connection>, Refused> {
        Connection::new(self.on.clone(), peer, ConnKey { index, generation: 0 }, Time(0))
    }

    fn receive(&mut self, connection: &mut Connection, bytes: &[u8]) {
        let mut slot = self.env.pool.take().unwrap();
        slot.as_mut_slice()[..bytes.len()].copy_from_slice(bytes);
        connection.receive(slot.freeze(bytes.len()), &mut self.env);
    }

    /// The reply to a call of the first program.
    fn ask(&mut self, connection: &mut Connection) -> Vec<u8> {
        self.receive(connection, &call(1, &[]));
        let batch = connection.take_batch(Time(0), &mut self.env.spares).unwrap();
        let mut slices = [&[][..]; 4];
        let filled = batch.slices(&mut slices);
        connection.sent(batch.len(), true, &mut self.env);
        slices[..filled].concat()
    }

    /// States of connections that the programs have.
    fn open(&self) -> [u32; 2] {
        [0, 1].map(|at| self.open[at].load(Ordering::Relaxed))
    }
}

const TCP: Peer = Peer::Tcp(std::net::SocketAddr::V4(std::net::SocketAddrV4::new(std::net::Ipv4Addr::LOCALHOST, 9)));

#[test]
fn states_of_a_connection_come_and_go_with_it() {
    let mut shard = Shard::new();
    let mut connections = [0, 1].map(|index| shard.connect(index, TCP).unwrap());
    assert_eq!(shard.open(), [2, 2]);
    // Calls of the shard, calls of the connection.
    for (at, expected) in [(0, [1, 1]), (1, [2, 1]), (0, [3, 2])] {
        assert_eq!(shard.ask(&mut connections[at]), accepted(&[0, expected[0], expected[1]]));
    }
    connections.into_iter().for_each(|connection| connection.end(&mut shard.env));
    assert_eq!(shard.open(), [0, 0]);
    // A slot that was used has none of it left.
    let mut again = shard.connect(2, TCP).unwrap();
    assert_eq!(shard.ask(&mut again), accepted(&[0, 4, 1]));
    again.end(&mut shard.env);
}

/// A turn costs a table without state what it costs a service without state.
#[test]
fn programs_without_state_want_no_turn_end() {
    let mut shard = Shard::new();
    let mut connection = shard.connect(0, TCP).unwrap();
    shard.ask(&mut connection);
    assert!(shard.on.waits_for_turn_end());
    let mut table = ProgramTable::new();
    table.register(nfs_null()).unwrap();
    let service = Arc::new(RpcService::new("null", table));
    let state = service.start(&mut Turn::new(&mut shard.env)).unwrap();
    shard.on = OnShard::new(service, state);
    let mut connection = shard.connect(0, TCP).unwrap();
    assert_eq!(shard.ask(&mut connection), accepted(&[1]));
    assert!(!shard.on.waits_for_turn_end());
}

#[test]
fn a_connection_that_one_program_refuses_leaves_nothing_with_the_others() {
    let mut shard = Shard::new();
    assert!(shard.connect(0, Peer::Unnamed).is_err());
    assert_eq!(shard.open(), [0, 0]);
    // After a panic the state is closed when its slot is taken again.
    assert!(shard.connect(0, Peer::Unix).is_err());
    assert_eq!(shard.open(), [1, 0]);
    let connection = shard.connect(0, TCP).unwrap();
    assert_eq!(shard.open(), [1, 1]);
    connection.end(&mut shard.env);
    assert_eq!(shard.open(), [0, 0]);
}

#[test]
fn a_call_with_states_allocates_nothing() {
    let mut shard = Shard::new();
    let mut connection = shard.connect(0, TCP).unwrap();
    let calls = call(1, &[]).repeat(20);
    let mut one = |shard: &mut Shard| {
        shard.receive(&mut connection, &calls);
        while let Some(batch) = connection.take_batch(Time(0), &mut shard.env.spares) {
            let bytes = batch.len();
            batch.recycle(&mut shard.env.spares);
            connection.sent(bytes, true, &mut shard.env);
        }
    };
    (0..10).for_each(|_| one(&mut shard));
    let before = allocations();
    (0..1000).for_each(|_| one(&mut shard));
    assert_eq!(allocations() - before, 0, "20,000 calls");
}

#[test]
fn workers_take_programs_without_state_alone() {
    let mut table = ProgramTable::new();
    table.register(nfs_null()).unwrap();
    let on_workers = RpcOnWorkers::new(Arc::new(RpcService::new("null", table.clone()))).unwrap();
    assert_eq!(Service::name(&on_workers), "null");
    let mut wire = Wire::new(&Arc::new(on_workers));
    let null = record(&[7, 0, 2, 100_003, 3, 0, 0, 0, 0, 0]);
    assert_eq!(wire.feed(&[&null[..], &call(1, &[])].concat()), [accepted(&[0]), accepted(&[1])].concat());
    let strict = false;
    table.register(Guests { number: 5, strict, open: Arc::default() }).unwrap();
    let error = RpcOnWorkers::new(Arc::new(RpcService::new("guests", table))).unwrap_err();
    let expected = "the program guests has state on shards, which workers do not have: run it without workers";
    assert_eq!(error.to_string(), expected);
}
