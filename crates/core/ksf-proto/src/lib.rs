//! Wire formats, sans-IO: bytes in, values out, and back.
//!
//! Nothing here owns a socket, a clock or a thread, and nothing here panics on
//! bytes a peer sent. Parsers borrow from the buffer they are given, so a
//! message that lies in a receive slot is read where it lies.
//!
//! * [`xdr`]: the External Data Representation, RFC 4506;
//! * [`http1`]: heads and bodies of HTTP/1, RFC 9112;
//! * [`oncrpc`]: ONC RPC version 2, RFC 5531, with record marks, AUTH_SYS and
//!   the calls of rpcbind (RFC 1833);
//! * [`p9`]: 9P2000.L, the file protocol of Linux;
//! * [`resp`]: the protocol of Redis, commands and replies;
//! * [`rdb`]: the snapshots of Redis.

#![forbid(unsafe_code)]

pub mod http1;
mod looked;
pub mod oncrpc;
pub mod p9;
pub mod rdb;
pub mod resp;
pub mod xdr;
