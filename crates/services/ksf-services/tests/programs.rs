//! What an author of RPC programs can rely on: results are whole or not there at
//! all, and each call has exactly one answer.

mod common;

use std::any::Any;
use std::ops::RangeInclusive;
use std::sync::Arc;

use common::{Wire, counter};
use ksf::pool::Chunk;
use ksf_proto::oncrpc::{AuthStat, Credential};
use ksf_proto::xdr::{XdrReader, XdrWrite};
use ksf_services::rpc::{Answered, ProcError, Program, ProgramTable, RpcCall, RpcReply, RpcService};

/// Procedures: 1 adds two numbers, 2 fails after it wrote something, 3 is for
/// AUTH_SYS only and answers the user, 4 asks for the thread pool, 5 answers with
/// data of a length, 6 the same from a thread that may block, 7 goes on on its
/// connection, 8 tells what it knows of the call and gives its arguments back.
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
            4 => reply.offload(|deferred| deferred.error(ProcError::ProcUnavail)),
            5 | 6 => {
                let Ok(bytes) = XdrReader::new(call.args).u32() else { return reply.error(ProcError::GarbageArgs) };
                if call.procedure == 5 {
                    return reply.results_with(|out| out.put_u32(bytes), data(bytes));
                }
                reply.block(bytes as usize, move |deferred| {
                    deferred.results_with(|out| out.put_u32(bytes), data(bytes));
                })
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

/// A client would take SYSTEM_ERR for the answer.
#[test]
fn a_full_queue_is_no_answer() {
    // The connection of these tests has no thread pool at all: work is done at once.
    let service = service();
    let mut wire = Wire::new(&service);
    assert_eq!(wire.feed(&call(4, &[])), b"");
    assert_eq!(wire.deliver(), accepted(&[3]));
    assert_eq!(counter(&*service, "system_err"), 0);
}

/// The results of procedures 5 and 6: a length, that many bytes, and zeros up to a multiple of four.
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
