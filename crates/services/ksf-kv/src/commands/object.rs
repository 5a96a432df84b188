//! `OBJECT`: how Redis would keep a value. A store of records has nothing of the kind, but clients ask.

use ksf_store::cells::Shape;
use ksf_store::update::View;

use super::{Call, Result, integer};

const HELP: &[&str] = &[
    "OBJECT <subcommand> [<arg> [value] [opt] ...]. Subcommands are:",
    "ENCODING <key>",
    "    Return the kind of internal representation used in order to store the value",
    "    associated with a <key>.",
    "FREQ <key>",
    "    Return the access frequency index of the <key>. The returned integer is",
    "    proportional to the logarithm of the recent access frequency of the key.",
    "IDLETIME <key>",
    "    Return the idle time of the <key>, that is the approximated number of",
    "    seconds elapsed since the last access to the key.",
    "REFCOUNT <key>",
    "    Return the number of references of the value associated with the specified",
    "    <key>.",
    "HELP",
    "    Prints this help.",
];

/// Redis' own: by default it counts no frequency either.
const NO_FREQUENCY: &str = "ERR An LFU maxmemory policy is not selected, access frequency not tracked. Please note that \
                            when switching between policies at runtime LRU and LFU data will take some time to adjust.";
const NO_IDLE_TIME: &str = "ERR idle time not tracked: the store does not keep when a key was read";

/// The limits of Redis 7.0, up to which a value is packed.
const EMBEDDED_BYTES_MAX: usize = 44;
const PACKED_BYTES_MAX: usize = 64;
const FIELDS_MAX: u64 = 512;
const INTEGERS_MAX: u64 = 512;
const MEMBERS_MAX: u64 = 128;

/// The name of what Redis would make of a value that it gets whole.
pub(super) fn encoding(view: &mut View<'_, '_>, key: &[u8]) -> Option<&'static str> {
    let got = view.get(key)?;
    let (shape, count) = (got.shape, got.count);
    let of_string = match got.value_bytes() {
        bytes if bytes > EMBEDDED_BYTES_MAX => "raw",
        _ if integer(got.value()).is_some() => "int",
        _ => "embstr",
    };
    let is_short = |text: &[u8]| text.len() <= PACKED_BYTES_MAX;
    let mut all = |count_max: u64, is_packed: &dyn Fn(&[u8], &[u8]) -> bool| {
        let mut packed = count <= count_max;
        if packed {
            view.walk(key, &[], |subkey, value| {
                packed = is_packed(subkey, value);
                packed
            });
        }
        packed
    };
    Some(match shape {
        Shape::String => of_string,
        Shape::List => "quicklist",
        Shape::Hash if all(FIELDS_MAX, &|field, value| is_short(field) && is_short(value)) => "listpack",
        Shape::Set if all(INTEGERS_MAX, &|member, _| integer(member).is_some()) => "intset",
        Shape::Hash | Shape::Set => "hashtable",
        Shape::SortedSet if all(MEMBERS_MAX, &|member, _| is_short(member)) => "listpack",
        Shape::SortedSet => "skiplist",
    })
}

pub(super) fn object(call: &mut Call<'_, '_>) -> Result {
    let subcommand = String::from_utf8_lossy(call.args[1]).to_ascii_lowercase();
    let Some(key) = call.args.get(2).copied() else {
        let mut to = call.write();
        to.array(HELP.len());
        HELP.iter().for_each(|line| to.simple(line));
        return Ok(());
    };
    let Some(encoding) = call.read(&[key], |view| encoding(view, key)) else {
        call.write().null();
        return Ok(());
    };
    match &subcommand[..] {
        "freq" => return Err(NO_FREQUENCY.into()),
        "idletime" => return Err(NO_IDLE_TIME.into()),
        "refcount" => call.write().integer(1),
        _ => call.write().bulk(encoding.as_bytes()),
    }
    Ok(())
}
