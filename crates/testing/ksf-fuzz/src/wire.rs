//! Decoders: what is read writes back to the bytes it was read from.

use ksf_proto::oncrpc::{
    Accepted, AuthSys, Call, CallHeader, Credential, OpaqueAuth, Reply, ReplyStatus, auth_sys_body, flavor, put_reply,
    rpcbind,
};
use ksf_proto::xdr::{XdrReader, XdrWrite};

/// The body of an AUTH_SYS credential. XDR has one encoding for each value, so a
/// body that is accepted has to be the one that is written.
pub fn auth_sys(input: &[u8]) {
    let Ok(sys) = AuthSys::parse(input) else { return };
    let gids: Vec<u32> = sys.gids.iter().collect();
    assert_eq!(gids.len(), sys.gids.len());
    let written = auth_sys_body(sys.stamp, sys.machine_name, sys.uid, sys.gid, &gids);
    assert_eq!(written.expect("what was accepted is within the limits"), input);
}

/// A call: accepted, refused with a reply that names it, or not answerable.
pub fn oncrpc_call(input: &[u8]) {
    match Call::parse(input) {
        Ok(call) => accepted_call(input, &call),
        Err(error) => {
            let mut out = Vec::new();
            if error.put_reply(&mut out) {
                let reply = Reply::parse(&out).expect("an own reply can be read");
                assert!(input.starts_with(&reply.xid.to_be_bytes()));
                assert!(matches!(reply.status, ReplyStatus::Denied(_)));
            } else {
                assert!(out.is_empty());
            }
        }
    }
}

fn accepted_call(input: &[u8], call: &Call<'_>) {
    assert!(input.ends_with(call.args));
    let body;
    let credential = match call.credential {
        // The body of AUTH_NONE and that of its verifier are not kept: rewriting is for those without.
        Credential::None => OpaqueAuth::NONE,
        Credential::Sys(sys) => {
            let gids: Vec<u32> = sys.gids.iter().collect();
            body = auth_sys_body(sys.stamp, sys.machine_name, sys.uid, sys.gid, &gids).expect("within the limits");
            OpaqueAuth { flavor: flavor::AUTH_SYS, body: &body }
        }
    };
    let Call { xid, program, version, procedure, .. } = *call;
    let mut written = Vec::new();
    CallHeader { xid, program, version, procedure, credential }.put(&mut written);
    written.extend_from_slice(call.args);
    assert_eq!(Call::parse(&written).as_ref(), Ok(call), "what is written reads as the same call");
    if written.len() == input.len() {
        assert_eq!(written, input);
    }
}

/// A reply.
pub fn oncrpc_reply(input: &[u8]) {
    let Ok(reply) = Reply::parse(input) else { return };
    assert!(input.ends_with(reply.results));
    if !matches!(reply.status, ReplyStatus::Accepted(Accepted::Success)) {
        assert!(reply.results.is_empty());
    }
    if reply.verifier == OpaqueAuth::NONE {
        let mut written = Vec::new();
        put_reply(&mut written, reply.xid, reply.status);
        written.extend_from_slice(reply.results);
        assert_eq!(written, input);
    }
}

/// Results of rpcbind.
pub fn rpcbind_results(input: &[u8]) {
    if let Ok(value) = rpcbind::parse_bool(input) {
        let mut written = Vec::new();
        written.put_bool(value);
        assert_eq!(written, input);
    }
    if let Ok(port) = rpcbind::parse_port(input) {
        assert_eq!(u32::from(port.unwrap_or(0)).to_be_bytes(), input);
    }
    if let Ok(Some(address)) = rpcbind::parse_address(input)
        && let Some(socket) = rpcbind::parse_universal_address(address)
    {
        // Not always the same text (zeros in front), but the same socket.
        let written = rpcbind::universal_address(socket);
        assert_eq!(rpcbind::parse_universal_address(&written), Some(socket));
    }
    if let Ok(list) = rpcbind::parse_list(input) {
        let mut written = Vec::new();
        for binding in list {
            written.put_bool(true);
            binding.put(&mut written);
        }
        written.put_bool(false);
        assert_eq!(written, input);
    }
}

/// XDR items: the first byte says how many items, that many bytes say which, and
/// the rest is what they are read from.
pub fn xdr(input: &[u8]) {
    let Some((&count, input)) = input.split_first() else { return };
    let (kinds, data) = input.split_at(usize::from(count).min(input.len()));
    let mut r = XdrReader::new(data);
    let mut written = Vec::new();
    for kind in kinds {
        if !copy_item(*kind, &mut r, &mut written) {
            // The reader is given up after an error.
            return;
        }
        assert_eq!(written, &data[..r.offset()], "kind {kind}");
        assert_eq!(r.offset() + r.rest().len(), data.len());
    }
}

/// Reads an item and writes it; false if there is none.
fn copy_item(kind: u8, r: &mut XdrReader<'_>, out: &mut Vec<u8>) -> bool {
    let limit = u32::from(kind);
    match kind % 10 {
        0 => r.u32().map(|v| out.put_u32(v)).is_ok(),
        1 => r.i32().map(|v| out.put_i32(v)).is_ok(),
        2 => r.u64().map(|v| out.put_u64(v)).is_ok(),
        3 => r.i64().map(|v| out.put_i64(v)).is_ok(),
        4 => r.bool().map(|v| out.put_bool(v)).is_ok(),
        5 => r.opaque(limit).map(|v| out.put_opaque(v)).is_ok(),
        6 => r.utf8(u32::MAX).map(|v| out.put_opaque(v.as_bytes())).is_ok(),
        7 => r.opaque_fixed(usize::from(kind)).map(|v| out.put_opaque_fixed(v)).is_ok(),
        8 => r.array(limit, XdrReader::u32).map(|v| out.put_array(&v, |w, &i| w.put_u32(i))).is_ok(),
        _ => r.option(XdrReader::i64).map(|v| out.put_option(v, |w, i| w.put_i64(i))).is_ok(),
    }
}
