//! Arguments and results of NFSv3 and MOUNT (RFC 1813), as lists of their parts. The decoders of the server are not used here.

use ksf_proto::oncrpc::{MOUNT_PROGRAM, NFS_PROGRAM};
use ksf_proto::xdr::{XdrError, XdrReader};

/// A part of arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    Handle,
    Name,
    Path,
    Target,
    U32,
    U64,
    SetAttr,
    Guard,
    CreateHow,
    Node,
    /// `count`, `stable_how` and the data of WRITE.
    Data,
}

use Part::{CreateHow, Data, Guard, Handle, Name, Node, Path, SetAttr, Target, U32, U64};

/// The arguments of a procedure. `None`: it takes none, and looks at none that come.
pub(super) fn arguments(program: u32, procedure: u32) -> Option<&'static [Part]> {
    if program == MOUNT_PROGRAM {
        return matches!(procedure, 1 | 3).then_some(&[Path]);
    }
    Some(match procedure {
        1 | 5 | 18..=20 => &[Handle],
        2 => &[Handle, SetAttr, Guard],
        3 | 12 | 13 => &[Handle, Name],
        4 => &[Handle, U32],
        6 | 21 => &[Handle, U64, U32],
        7 => &[Handle, U64, Data],
        8 => &[Handle, Name, CreateHow],
        9 => &[Handle, Name, SetAttr],
        10 => &[Handle, Name, SetAttr, Target],
        11 => &[Handle, Name, Node],
        14 => &[Handle, Name, Handle, Name],
        15 => &[Handle, Handle, Name],
        16 => &[Handle, U64, U64, U32],
        17 => &[Handle, U64, U64, U32, U32],
        _ => return None,
    })
}

/// Whether bytes are arguments of these parts and nothing else.
pub(super) fn are_arguments(parts: &[Part], args: &[u8]) -> bool {
    let mut r = XdrReader::new(args);
    parts.iter().all(|part| skip(&mut r, *part).is_ok()) && r.rest().is_empty()
}

fn skip(r: &mut XdrReader<'_>, part: Part) -> Result<(), XdrError> {
    match part {
        Handle => r.opaque(64).map(drop),
        Name => r.opaque(4096).map(drop),
        Path => r.opaque(1024).map(drop),
        Target => r.opaque(65_536).map(drop),
        U32 => r.u32().map(drop),
        U64 => r.u64().map(drop),
        SetAttr => skip_set_attr(r),
        Guard => r.option(XdrReader::u64).map(drop),
        CreateHow => match below(r, 3)? {
            2 => r.u64().map(drop),
            _ => skip_set_attr(r),
        },
        Node => match below(r, 8)? {
            0 => Err(wrong(r)),
            3 | 4 => skip_set_attr(r).and_then(|()| r.u64()).map(drop),
            6 | 7 => skip_set_attr(r),
            _ => Ok(()),
        },
        Data => {
            let (count, _stable) = (r.u32()?, below(r, 3)?);
            // Section 3.3.7: no more is written than is counted, and what is counted must be there.
            if r.opaque(u32::MAX)?.len() < count as usize { Err(wrong(r)) } else { Ok(()) }
        }
    }
}

fn skip_set_attr(r: &mut XdrReader<'_>) -> Result<(), XdrError> {
    for _ in 0..3 {
        r.option(XdrReader::u32)?;
    }
    r.option(XdrReader::u64)?;
    for _ in 0..2 {
        if below(r, 3)? == 2 {
            r.u64()?;
        }
    }
    Ok(())
}

/// A word that is below `limit`.
fn below(r: &mut XdrReader<'_>, limit: u32) -> Result<u32, XdrError> {
    let value = r.u32()?;
    if value < limit { Ok(value) } else { Err(wrong(r)) }
}

fn wrong(r: &XdrReader<'_>) -> XdrError {
    XdrError::Value { offset: r.offset(), value: 0, kind: "a part of arguments" }
}

/// A part of results.
#[derive(Clone, Copy)]
enum Told {
    /// `fattr3`.
    Attr,
    /// `post_op_attr`.
    MaybeAttr,
    /// `wcc_data`.
    Wcc,
    Handle,
    MaybeHandle,
    Words(u8),
    Bytes,
    Entries,
    EntriesPlus,
}

/// What results of a procedure have behind their status, where it is OK and where it is an error.
fn results(procedure: u32) -> (&'static [Told], &'static [Told]) {
    use Told::{Attr, Bytes, Entries, EntriesPlus, Handle, MaybeAttr, MaybeHandle, Wcc, Words};
    match procedure {
        1 => (&[Attr], &[]),
        2 | 12 | 13 => (&[Wcc], &[Wcc]),
        3 => (&[Handle, MaybeAttr, MaybeAttr], &[MaybeAttr]),
        4 => (&[MaybeAttr, Words(1)], &[MaybeAttr]),
        5 => (&[MaybeAttr, Bytes], &[MaybeAttr]),
        6 => (&[MaybeAttr, Words(2), Bytes], &[MaybeAttr]),
        7 => (&[Wcc, Words(4)], &[Wcc]),
        8..=11 => (&[MaybeHandle, MaybeAttr, Wcc], &[Wcc]),
        14 => (&[Wcc, Wcc], &[Wcc, Wcc]),
        15 => (&[MaybeAttr, Wcc], &[MaybeAttr, Wcc]),
        16 => (&[MaybeAttr, Words(2), Entries], &[MaybeAttr]),
        17 => (&[MaybeAttr, Words(2), EntriesPlus], &[MaybeAttr]),
        18 => (&[MaybeAttr, Words(13)], &[MaybeAttr]),
        19 => (&[MaybeAttr, Words(12)], &[MaybeAttr]),
        20 => (&[MaybeAttr, Words(6)], &[MaybeAttr]),
        21 => (&[Wcc, Words(2)], &[Wcc]),
        other => panic!("procedure {other} has no results"),
    }
}

/// `nfsstat3`.
const STATUSES: [u32; 29] = [
    0, 1, 2, 5, 6, 13, 17, 18, 19, 20, 21, 22, 27, 28, 30, 31, 63, 66, 69, 70, 71, 10_001, 10_002, 10_003, 10_004,
    10_005, 10_006, 10_007, 10_008,
];

/// Reads results of a procedure of NFS, all of them, and returns their status. Handles that they tell are put into `handles`.
pub(super) fn read_results(procedure: u32, results_: &[u8], handles: &mut Vec<Vec<u8>>) -> Result<u32, XdrError> {
    let mut r = XdrReader::new(results_);
    let status = r.u32()?;
    assert!(STATUSES.contains(&status), "{status} is no status of NFS");
    let (fine, failed) = results(procedure);
    for told in if status == 0 { fine } else { failed } {
        read_told(&mut r, *told, handles)?;
    }
    r.finish()?;
    Ok(status)
}

fn read_told(r: &mut XdrReader<'_>, told: Told, handles: &mut Vec<Vec<u8>>) -> Result<(), XdrError> {
    match told {
        Told::Attr => r.opaque_fixed(84).map(drop),
        Told::MaybeAttr => r.option(|r| r.opaque_fixed(84)).map(drop),
        Told::Wcc => {
            r.option(|r| r.opaque_fixed(24))?;
            r.option(|r| r.opaque_fixed(84)).map(drop)
        }
        Told::Handle => r.opaque(64).map(|handle| handles.push(handle.to_vec())),
        Told::MaybeHandle => r.option(|r| read_told(r, Told::Handle, handles)).map(drop),
        Told::Words(count) => r.opaque_fixed(4 * usize::from(count)).map(drop),
        Told::Bytes => r.opaque(u32::MAX).map(drop),
        Told::Entries | Told::EntriesPlus => {
            while r.bool()? {
                r.u64()?;
                assert!(!r.opaque(255)?.is_empty(), "an entry without a name");
                r.u64()?;
                if matches!(told, Told::EntriesPlus) {
                    read_told(r, Told::MaybeAttr, handles)?;
                    read_told(r, Told::MaybeHandle, handles)?;
                }
            }
            r.bool().map(drop)
        }
    }
}

/// Reads results of a procedure of MOUNT, all of them.
pub(super) fn read_mount_results(procedure: u32, results: &[u8], handles: &mut Vec<Vec<u8>>) -> Result<(), XdrError> {
    let mut r = XdrReader::new(results);
    match procedure {
        1 if r.u32()? == 0 => {
            read_told(&mut r, Told::Handle, handles)?;
            r.array(9, XdrReader::u32)?;
        }
        2 => {
            while r.bool()? {
                r.opaque(255)?;
                r.opaque(1024)?;
            }
        }
        5 => {
            while r.bool()? {
                r.opaque(1024)?;
                while r.bool()? {
                    r.opaque(255)?;
                }
            }
        }
        _ => {}
    }
    r.finish()
}

/// Whether there is such a procedure.
pub(super) fn is_procedure(program: u32, procedure: u32) -> bool {
    (program == NFS_PROGRAM && procedure < 22) || (program == MOUNT_PROGRAM && procedure < 6)
}
