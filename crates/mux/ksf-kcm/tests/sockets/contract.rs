//! Rows of AF_KCM's contract, on either kind of multiplexor, against the records.

use ksf_kcm::{AnyMux, Backend};
use ksf_mux::kcm::{KcmOptions, KcmSocket, Kind};

use crate::common::clients::{answer_many, answer_one, serve};
use crate::common::contract::{self, Open, Rows, attached};
use crate::support::{open, options};

const OURS: &str = include_str!("../../../../../lab/kcm/ours.txt");
const ON_AF_KCM: &str = include_str!("../../../../../lab/kcm/ours_on_af_kcm.txt");
const DOCUMENT: &str = include_str!("../../../../../docs/kcm.md");

fn socket(backend: Backend, kind: Kind, kcm: KcmOptions) -> KcmSocket<AnyMux> {
    KcmSocket::on(open(backend, options()), kind, kcm).unwrap()
}

/// Observes all rows, and compares them with the records.
pub(crate) fn rows(backend: Backend) {
    let steps: [fn(Open<'_, AnyMux>, &mut Rows); 16] = [
        contract::attach_and_unattach,
        contract::whole_messages,
        contract::splice,
        contract::many_at_once,
        contract::one_segment,
        contract::clones,
        contract::receive_disable,
        contract::ends_of_messages,
        contract::several_sent_at_once,
        contract::connections_take_turns,
        contract::nobody_gets_what_was_for_another,
        contract::answers,
        contract::errors_of_connections,
        contract::end_of_stream,
        contract::unattach_with_bytes,
        contract::statistics,
    ];
    let mut rows = Rows::default();
    for step in steps {
        step(&|kind, options| socket(backend, kind, options), &mut rows);
    }
    let differs = lines(ON_AF_KCM);
    let mut wrong = Vec::new();
    for (row, observed) in &rows.0 {
        let on_af_kcm = differs.iter().find(|(name, _)| backend == Backend::Kernel && name == row);
        let ours = || lines(OURS).into_iter().find(|(name, _)| name == row).unwrap_or_else(|| panic!("no row {row}"));
        let wanted = on_af_kcm.map_or_else(|| ours().1, |(_, what)| what);
        if observed != wanted {
            wrong.push(format!("{row}\nrecorded  {wanted}\nobserved  {observed}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
    for (row, _) in &differs {
        assert!(rows.0.iter().any(|(name, _)| name == row), "nobody observes {row}");
    }
}

/// The document says what the record says.
#[test]
fn the_document_has_the_rows_that_differ_on_af_kcm() {
    let table = DOCUMENT.lines().skip_while(|line| !line.starts_with("| Row, on AF_KCM |")).skip(2);
    let rows: Vec<String> = table.take_while(|line| line.starts_with('|')).map(str::to_owned).collect();
    let wanted: Vec<String> = lines(ON_AF_KCM)
        .into_iter()
        .map(|(row, what)| {
            let (_, ours) = lines(OURS).into_iter().find(|(name, _)| *name == row).unwrap();
            format!("| {row} | {ours} | {what} |")
        })
        .collect();
    assert_eq!(rows, wanted);
}

/// Lines "row: what happened".
fn lines(text: &'static str) -> Vec<(&'static str, &'static str)> {
    text.lines().map(|line| line.split_once(": ").unwrap_or_else(|| panic!("{line}"))).collect()
}

/// Eight clients, four clones: each client gets its own answers, of sockets that name no connection.
pub(crate) fn servers(backend: Backend, requests: usize) {
    println!("{backend:?}: every client gets its own answers");
    let mux = socket(backend, Kind::Dgram, KcmOptions::default());
    serve(&mux, requests, || attached(&mux).far, answer_one);
    let mux = socket(backend, Kind::Seqpacket, KcmOptions::default());
    serve(&mux, requests, || attached(&mux).far, answer_many);
}
