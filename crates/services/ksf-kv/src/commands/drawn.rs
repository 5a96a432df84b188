//! Cells that are drawn at random: `HRANDFIELD`, `SRANDMEMBER`, `SPOP`. What is not drawn is not copied.

use ksf_store::update::View;

use super::{Call, Failed, Result, random};

/// Most cells that are drawn if each may come again.
const DRAWN_MAX: u64 = 1 << 20;
/// So many are drawn one by one; more by going through all cells once.
const ONE_BY_ONE_MAX: u64 = 16;

/// A subkey and its value.
pub(super) type Cell = (Vec<u8>, Vec<u8>);

/// How many are asked for by an argument.
pub(super) fn count(call: &Call<'_, '_>, at: usize) -> Result<i64> {
    let count = call.integer(at)?;
    if count == i64::MIN {
        let (min, max) = (-i64::MAX, i64::MAX);
        return Err(Failed::from(format!("ERR value is out of range, value must between {min} and {max}")));
    }
    Ok(count)
}

/// So many cells of a key: each at most once if `count` is positive, else any of them, again and again. `takes` takes room
/// for one, and is not asked again once there is none.
pub(super) fn drawn(
    view: &mut View<'_, '_>,
    key: &[u8],
    count: i64,
    mut takes: impl FnMut(&[u8], &[u8]) -> bool,
) -> Result<Vec<Cell>> {
    let (there, wanted) = (view.get(key).map_or(0, |got| got.count), count.unsigned_abs());
    let mut found: Vec<Cell> = Vec::new();
    if there == 0 || wanted == 0 {
        return Ok(found);
    }
    if count < 0 && wanted > DRAWN_MAX {
        return Err(Failed::from(format!("ERR at most {DRAWN_MAX} elements can be drawn at a time")));
    }
    let few = wanted <= ONE_BY_ONE_MAX;
    if few && (count < 0 || wanted * 4 <= there) {
        while (found.len() as u64) < wanted {
            let Some((subkey, value)) = view.draw(key, random) else { break };
            if count > 0 && found.iter().any(|(known, _)| *known == subkey) {
                continue;
            }
            if !takes(&subkey, &value) {
                break;
            }
            found.push((subkey, value));
        }
    } else if count > 0 {
        // Each is taken with the chance that makes as many as are wanted of those that are left.
        let (mut left, mut wanted) = (there, wanted.min(there));
        view.walk(key, &[], |subkey, value| {
            let is_drawn = random() % left.max(1) < wanted;
            left = left.saturating_sub(1);
            if is_drawn {
                if !takes(subkey, value) {
                    return false;
                }
                found.push((subkey.to_vec(), value.to_vec()));
                wanted -= 1;
            }
            wanted > 0
        });
    } else {
        let mut places: Vec<u64> = (0..wanted).map(|_| random() % there).collect();
        places.sort_unstable();
        let (mut places, mut at) = (places.into_iter().peekable(), 0);
        view.walk(key, &[], |subkey, value| {
            while places.next_if_eq(&at).is_some() {
                if !takes(subkey, value) {
                    return false;
                }
                found.push((subkey.to_vec(), value.to_vec()));
            }
            at += 1;
            places.peek().is_some()
        });
        for at in (1..found.len()).rev() {
            found.swap(at, random() as usize % (at + 1));
        }
    }
    Ok(found)
}
