//! Keys in the order of their bytes, by range and prefix: `KSF.KEYS`, and lists over HTTP.

use ksf_store::store::{Needs, Store};

use super::{Call, NOT_AN_INTEGER, Result, SYNTAX, integer};

/// Keys that are shown, if nothing is said.
pub(crate) const COUNT: usize = 1000;

/// Which keys.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KeyRange<'a> {
    /// The first one, whether it is there or not.
    pub(crate) from: &'a [u8],
    /// The one behind the last, whether it is there or not; `None`: up to the end.
    pub(crate) to: Option<&'a [u8]>,
    /// What they all begin with.
    pub(crate) prefix: &'a [u8],
    /// At most so many.
    pub(crate) count: usize,
}

/// Some keys of a range.
#[derive(Debug)]
pub(crate) struct Listed {
    pub(crate) keys: Vec<Vec<u8>>,
    /// The key to go on from; `None`: there are no more.
    pub(crate) next: Option<Vec<u8>>,
    pub(crate) needs: Needs,
    /// False: there is no room for two keys, so that no list would ever end.
    pub(crate) fits: bool,
}

/// The first keys of a range. `takes` takes room for one, and is not asked again once there is none.
pub(crate) fn list(store: &Store, range: &KeyRange<'_>, now_ms: u64, mut takes: impl FnMut(&[u8]) -> bool) -> Listed {
    let (mut keys, mut next, mut fits): (Vec<Vec<u8>>, _, _) = (Vec::new(), None, true);
    let needs = store.scan(range.from.max(range.prefix), now_ms, |key, _| {
        if !key.starts_with(range.prefix) || range.to.is_some_and(|to| key >= to) {
            return false;
        }
        if !takes(key) {
            // The room of the last one is that of the key to go on from.
            next = keys.pop();
            fits = !keys.is_empty();
            return false;
        }
        if keys.len() == range.count {
            next = Some(key.to_vec());
            return false;
        }
        keys.push(key.to_vec());
        true
    });
    Listed { keys, next, needs, fits }
}

pub(super) fn ksf_keys(call: &mut Call<'_, '_>) -> Result {
    let mut range = KeyRange { from: b"", to: None, prefix: b"", count: COUNT };
    let (pairs, rest) = call.args[1..].as_chunks::<2>();
    for [option, value] in pairs {
        match &option.to_ascii_uppercase()[..] {
            b"FROM" => range.from = value,
            b"TO" => range.to = Some(value),
            b"PREFIX" => range.prefix = value,
            b"COUNT" => {
                let count = integer(value).ok_or(NOT_AN_INTEGER)?;
                range.count = usize::try_from(count).ok().filter(|count| *count > 0).ok_or(SYNTAX)?;
            }
            _ => return Err(SYNTAX.into()),
        }
    }
    if !rest.is_empty() {
        return Err(SYNTAX.into());
    }
    let mut room = call.room();
    let listed = list(call.shard.shard.store(), &range, call.clock.now_ms, |key| room.takes(key.len()));
    call.done.needs = listed.needs;
    if !listed.fits {
        room.check()?;
    }
    let mut to = call.write();
    to.array(2);
    to.bulk_or_null(listed.next.as_deref());
    to.array(listed.keys.len());
    listed.keys.iter().for_each(|key| to.bulk(key));
    Ok(())
}
