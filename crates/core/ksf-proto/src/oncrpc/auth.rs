//! Credentials and verifiers (RFC 5531 section 8.2, AUTH_SYS in appendix A).

use crate::xdr::{XdrError, XdrReader, XdrWrite};

/// Greatest length of the body of a credential or verifier (`opaque body<400>`).
pub const AUTH_BODY_LIMIT_BYTES: u32 = 400;
/// Greatest length of the machine name in AUTH_SYS (`string machinename<255>`).
pub const MACHINE_NAME_LIMIT_BYTES: u32 = 255;
/// Greatest number of supplementary groups in AUTH_SYS (`gids<16>`).
pub const GIDS_LIMIT: u32 = 16;

/// Numbers of authentication flavours (RFC 5531 section 8.2, IANA registry).
pub mod flavor {
    /// No authentication.
    pub const AUTH_NONE: u32 = 0;
    /// User and groups, as the client states them. Also called AUTH_UNIX.
    pub const AUTH_SYS: u32 = 1;
    /// Shorthand that a server hands out for a longer credential.
    pub const AUTH_SHORT: u32 = 2;
    /// Diffie-Hellman; historic.
    pub const AUTH_DH: u32 = 3;
    /// GSS-API (RFC 2203).
    pub const RPCSEC_GSS: u32 = 6;
}

/// Why a call was refused before its program was looked at: `auth_stat`
/// (RFC 5531 section 9).
///
/// A number rather than an enum, because replies may carry codes of flavours
/// that are not known here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AuthStat(pub u32);

impl AuthStat {
    /// Bad credential: its bytes are not what its flavour demands.
    pub const BADCRED: Self = Self(1);
    /// The credential cannot be used; the client must begin a new session.
    pub const REJECTEDCRED: Self = Self(2);
    /// Bad verifier: its bytes are not what its flavour demands.
    pub const BADVERF: Self = Self(3);
    /// The verifier is expired or replayed.
    pub const REJECTEDVERF: Self = Self(4);
    /// The credential proves too little for this procedure.
    pub const TOOWEAK: Self = Self(5);
    /// The client found the server's verifier bogus.
    pub const INVALIDRESP: Self = Self(6);
    /// The reason is unknown.
    pub const FAILED: Self = Self(7);

    /// The RFC's name of the code without its `AUTH_`, for people.
    pub const fn name(self) -> &'static str {
        match self.0 {
            0 => "OK",
            1 => "BADCRED",
            2 => "REJECTEDCRED",
            3 => "BADVERF",
            4 => "REJECTEDVERF",
            5 => "TOOWEAK",
            6 => "INVALIDRESP",
            7 => "FAILED",
            8 => "KERB_GENERIC",
            9 => "TIMEEXPIRE",
            10 => "TKT_FILE",
            11 => "DECODE",
            12 => "NET_ADDR",
            13 => "RPCSEC_GSS_CREDPROBLEM",
            14 => "RPCSEC_GSS_CTXPROBLEM",
            _ => "unknown",
        }
    }
}

impl std::fmt::Display for AuthStat {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "AUTH_{} ({})", self.name(), self.0)
    }
}

/// A credential or verifier as it lies on the wire: `opaque_auth`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpaqueAuth<'a> {
    /// What kind of body this is; see [`flavor`].
    pub flavor: u32,
    /// At most [`AUTH_BODY_LIMIT_BYTES`] bytes, meant for the flavour alone.
    pub body: &'a [u8],
}

impl<'a> OpaqueAuth<'a> {
    /// AUTH_NONE with an empty body.
    pub const NONE: Self = Self { flavor: flavor::AUTH_NONE, body: &[] };

    /// Reads flavour and body.
    #[inline]
    pub fn read(r: &mut XdrReader<'a>) -> Result<Self, XdrError> {
        Ok(Self { flavor: r.u32()?, body: r.opaque(AUTH_BODY_LIMIT_BYTES)? })
    }

    /// Appends flavour and body.
    pub fn put(&self, out: &mut impl XdrWrite) {
        out.put_u32(self.flavor);
        out.put_opaque(self.body);
    }
}

/// The caller, as far as the flavours served here can say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Credential<'a> {
    /// AUTH_NONE: the caller says nothing of itself.
    None,
    /// AUTH_SYS: user and groups, as the client states them.
    Sys(AuthSys<'a>),
}

impl<'a> Credential<'a> {
    /// Reads the meaning out of a credential, or says how to refuse it.
    ///
    /// AUTH_BADCRED is for a body that is not what its flavour demands. A
    /// flavour that is not served gets AUTH_REJECTEDCRED, "client must begin new
    /// session": nothing is wrong with the bytes, so BADCRED ("seal broken")
    /// would be untrue, and TOOWEAK would ask for more where RPCSEC_GSS was
    /// already offered. It is also what RFC 5531 appendix A prescribes for an
    /// AUTH_SHORT that a server does not know (the client then sends the full
    /// AUTH_SYS again), and what libtirpc answers.
    #[inline]
    pub fn from_opaque(auth: OpaqueAuth<'a>) -> Result<Self, AuthStat> {
        match auth.flavor {
            // Section 10: the body of AUTH_NONE is undefined, its length only
            // recommended to be zero. So it is skipped.
            flavor::AUTH_NONE => Ok(Self::None),
            flavor::AUTH_SYS => AuthSys::parse(auth.body).map(Self::Sys).map_err(|_| AuthStat::BADCRED),
            _ => Err(AuthStat::REJECTEDCRED),
        }
    }
}

/// Body of an AUTH_SYS credential: `authsys_parms` (RFC 5531 appendix A).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AuthSys<'a> {
    /// Any number the client chose.
    pub stamp: u32,
    /// Name of the client's machine, at most [`MACHINE_NAME_LIMIT_BYTES`] bytes.
    pub machine_name: &'a [u8],
    /// Effective user.
    pub uid: u32,
    /// Effective group.
    pub gid: u32,
    /// Supplementary groups, at most [`GIDS_LIMIT`].
    pub gids: Gids<'a>,
}

impl<'a> AuthSys<'a> {
    /// Reads a whole body; bytes after the groups are an error.
    #[inline]
    pub fn parse(body: &'a [u8]) -> Result<Self, XdrError> {
        let mut r = XdrReader::new(body);
        let stamp = r.u32()?;
        let machine_name = r.string(MACHINE_NAME_LIMIT_BYTES)?;
        let uid = r.u32()?;
        let gid = r.u32()?;
        let count = r.array_len(GIDS_LIMIT)? as usize;
        let gids = Gids { raw: r.opaque_fixed(count * 4)? };
        r.finish()?;
        Ok(Self { stamp, machine_name, uid, gid, gids })
    }
}

/// Supplementary groups, read from the message when asked for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Gids<'a> {
    /// Big-endian, four bytes each.
    raw: &'a [u8],
}

impl<'a> Gids<'a> {
    /// How many groups there are.
    pub const fn len(&self) -> usize {
        self.raw.len() / 4
    }

    /// True if there is none.
    pub const fn is_empty(&self) -> bool {
        self.raw.is_empty()
    }

    /// The groups in the order they were sent.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = u32> + use<'a> {
        let (chunks, _) = self.raw.as_chunks::<4>();
        chunks.iter().map(|gid| u32::from_be_bytes(*gid))
    }
}

impl std::fmt::Debug for Gids<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

/// Encodes the body of an AUTH_SYS credential, to be put in an [`OpaqueAuth`].
pub fn auth_sys_body(
    stamp: u32,
    machine_name: &[u8],
    uid: u32,
    gid: u32,
    gids: &[u32],
) -> Result<Vec<u8>, AuthSysTooLong> {
    if machine_name.len() > MACHINE_NAME_LIMIT_BYTES as usize || gids.len() > GIDS_LIMIT as usize {
        return Err(AuthSysTooLong { machine_name_bytes: machine_name.len(), gids: gids.len() });
    }
    let mut body = Vec::new();
    body.put_u32(stamp);
    body.put_opaque(machine_name);
    body.put_u32(uid);
    body.put_u32(gid);
    body.put_array(gids, |w, &gid| w.put_u32(gid));
    Ok(body)
}

/// What was to be put in an AUTH_SYS credential does not fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "AUTH_SYS holds a machine name of at most {MACHINE_NAME_LIMIT_BYTES} bytes and at most \
     {GIDS_LIMIT} groups, not {machine_name_bytes} bytes and {gids} groups"
)]
pub struct AuthSysTooLong {
    /// Length of the name that was given.
    pub machine_name_bytes: usize,
    /// Number of groups that were given.
    pub gids: usize,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// stamp 0x5eed, machine "box", uid 1000, gid 100, gids 4 and 24.
    const BODY: &[u8] = &[
        0, 0, 0x5e, 0xed, // stamp
        0, 0, 0, 3, b'b', b'o', b'x', 0, // machine name
        0, 0, 3, 0xe8, // uid
        0, 0, 0, 100, // gid
        0, 0, 0, 2, 0, 0, 0, 4, 0, 0, 0, 24, // gids
    ];

    #[test]
    fn parses_and_builds_the_body() {
        let sys = AuthSys::parse(BODY).unwrap();
        assert_eq!((sys.stamp, sys.machine_name, sys.uid, sys.gid), (0x5eed, &b"box"[..], 1000, 100));
        assert_eq!(sys.gids.iter().collect::<Vec<_>>(), [4, 24]);
        assert_eq!((sys.gids.len(), sys.gids.is_empty()), (2, false));
        assert_eq!(format!("{:?}", sys.gids), "[4, 24]");
        assert_eq!(auth_sys_body(0x5eed, b"box", 1000, 100, &[4, 24]).unwrap(), BODY);
    }

    #[test]
    fn every_prefix_and_any_suffix_is_refused() {
        for len in 0..BODY.len() {
            assert!(AuthSys::parse(&BODY[..len]).is_err(), "{len} bytes");
        }
        let mut longer = BODY.to_vec();
        longer.push(0);
        assert!(matches!(AuthSys::parse(&longer), Err(XdrError::Trailing { left: 1, .. })));
    }

    #[test]
    fn limits_hold_at_their_edge() {
        let name = [b'n'; 256];
        let gids = [7; 17];
        let body = auth_sys_body(0, &name[..255], 0, 0, &gids[..16]).unwrap();
        // 4 + 4 + 256 + 4 + 4 + 4 + 64: the greatest AUTH_SYS is below the 400 bytes allowed.
        assert_eq!(body.len(), 340);
        assert_eq!(AuthSys::parse(&body).unwrap().gids.len(), 16);
        assert!(auth_sys_body(0, &name, 0, 0, &[]).is_err());
        assert!(auth_sys_body(0, b"", 0, 0, &gids).is_err());

        let mut name_256 = vec![0, 0, 0, 0, 0, 0, 1, 0];
        name_256.extend_from_slice(&name);
        name_256.extend_from_slice(&[0; 12]);
        assert!(matches!(AuthSys::parse(&name_256), Err(XdrError::TooLong { len: 256, limit: 255, .. })));
        let mut gids_17 = vec![0; 16];
        gids_17.extend_from_slice(&[0, 0, 0, 17]);
        gids_17.extend_from_slice(&[0; 17 * 4]);
        assert!(matches!(AuthSys::parse(&gids_17), Err(XdrError::TooLong { len: 17, limit: 16, .. })));
    }

    #[test]
    fn flavours_map_to_the_codes_of_the_rfc() {
        let auth = |flavor, body| Credential::from_opaque(OpaqueAuth { flavor, body });
        assert_eq!(auth(flavor::AUTH_NONE, &[]), Ok(Credential::None));
        assert_eq!(auth(flavor::AUTH_NONE, &[1, 2, 3]), Ok(Credential::None));
        assert!(matches!(auth(flavor::AUTH_SYS, BODY), Ok(Credential::Sys(_))));
        assert_eq!(auth(flavor::AUTH_SYS, &[]), Err(AuthStat::BADCRED));
        for other in [2, 3, 4, 5, 6, 7, 390_000, u32::MAX] {
            assert_eq!(auth(other, &[]), Err(AuthStat::REJECTEDCRED), "{other}");
        }
        assert_eq!(AuthStat::TOOWEAK.to_string(), "AUTH_TOOWEAK (5)");
    }
}
