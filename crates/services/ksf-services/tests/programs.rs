//! What an author of RPC programs can rely on: results are whole or not there at
//! all, and each call has exactly one answer.

mod common;

use std::any::Any;
use std::sync::Arc;

use common::{SLOT_BYTES, Wire, counter};
use ksf::connection::Connection;
use ksf::env::Env;
use ksf::files::{File, FileRange};
use ksf::framing::Framing;
use ksf::limits::{Limits, Time};
use ksf::pool::{Chunk, Memory, Pool};
use ksf::service::ConnKey;
use ksf::session::OnShard;
use ksf::tasks::{TaskOptions, TaskPool};
use ksf::{Message, Order, Peer, Profile, Reply, Service};
use ksf_proto::oncrpc::{AuthStat, Credential};
use ksf_proto::xdr::{XdrReader, XdrWrite};
use ksf_services::rpc::{Answered, ProcError, Program, ProgramTable, ResultPieces, RpcCall, RpcDeferred, RpcReply};
use ksf_test::alloc::{Counting, allocations};

#[global_allocator]
static COUNTING: Counting = Counting;

/// Procedures: 1 adds two numbers, 2 fails after it wrote something, 3 is for
/// AUTH_SYS only and answers the user, 4 answers with data of a length from the thread
/// pool, 5 the same at once, 6 from a thread that may block, 7 goes on on its
/// connection, 8 tells what it knows of the call and gives its arguments back, 9
/// answers with data of the length twice, and 10 the same from another thread; 11
/// and 12 as 9 and 10, with a range of a file between both.
struct Sample {
    programs: ProgramTable,
}

/// Data that tells one place from another.
fn data(bytes: u32) -> Chunk {
    Chunk::from_vec((0..bytes).map(|at| at as u8).collect())
}

impl Sample {
    fn answer(call: &RpcCall<'_>, reply: RpcReply<'_>) -> Answered {
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
}

impl Service for Sample {
    ksf::stateless!();

    fn profile(&self) -> Profile<'_> {
        Profile { order: Order::Free, ..Profile::new("sample", Framing::RecordMark) }
    }

    fn call(&self, (): &mut (), (): &mut (), message: &Message<'_>, reply: &mut Reply<'_>) {
        self.programs.call(message, reply, Self::answer);
    }

    fn resume(&self, (): &mut (), (): &mut (), state: Box<dyn Any + Send>, reply: &mut Reply<'_>) {
        self.programs.resume(state, reply, |state, reply| {
            let Ok(number) = state.downcast::<u32>() else { return reply.error(ProcError::SystemErr) };
            reply.results(|out| {
                out.put_u32(*number + 7);
                Ok(())
            })
        });
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        self.programs.counters()
    }
}

fn service() -> Arc<Sample> {
    let mut programs = ProgramTable::new();
    programs.register(Program::new("sample", 0x2000_0001, 1..=1)).unwrap();
    Arc::new(Sample { programs })
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
    let mut wire = Wire::new(&service());
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

#[test]
fn a_call_allocates_nothing() {
    let mut env = Env::new(Limits::default(), Pool::new(Memory::Anonymous, SLOT_BYTES as u32, 8).unwrap()).unwrap();
    let on = OnShard::from(service());
    let key = ConnKey { index: 0, generation: 0 };
    let mut connection = Connection::new(on, Peer::Unix, key, Time(0)).unwrap();
    let calls = call(1, &[40, 2]).repeat(20);
    let mut one = |env: &mut Env| {
        let mut slot = env.pool.take().unwrap();
        slot.as_mut_slice()[..calls.len()].copy_from_slice(&calls);
        connection.receive(slot.freeze(calls.len()), env);
        while let Some(batch) = connection.take_batch(Time(0), &mut env.spares) {
            let bytes = batch.len();
            batch.recycle(&mut env.spares);
            connection.sent(bytes, true, env);
        }
    };
    (0..10).for_each(|_| one(&mut env));
    let before = allocations();
    (0..1000).for_each(|_| one(&mut env));
    assert_eq!(allocations() - before, 0, "20,000 calls");
}
