//! What an author of RPC programs can rely on: results are whole or not there at
//! all, and each call has exactly one answer.

mod common;

use std::ops::RangeInclusive;
use std::sync::Arc;

use common::{Wire, counter};
use ksf_proto::oncrpc::{AuthStat, Call, Credential};
use ksf_proto::xdr::{XdrReader, XdrWrite};
use ksf_services::rpc::{Answered, ProcError, Program, ProgramTable, RpcReply, RpcService};

/// Procedures: 1 adds two numbers, 2 fails after it wrote something, 3 is for
/// AUTH_SYS only and answers the user, 4 asks for the thread pool.
struct Sample;

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

    fn call(&self, call: &Call<'_>, reply: RpcReply<'_, '_>) -> Answered {
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
            _ => reply.error(ProcError::ProcUnavail),
        }
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

#[test]
fn without_room_in_the_thread_pool_the_answer_is_system_err() {
    // The connection of these tests has no thread pool at all.
    let service = service();
    let mut wire = Wire::new(&service);
    assert_eq!(wire.feed(&call(4, &[])), accepted(&[5]));
    assert_eq!(counter(&*service, "system_err"), 1);
}
