//! The services that come with ksf.
//!
//! * [`echo`]: bytes or messages come back as they are;
//! * [`rpc`]: ONC RPC, a table of programs that others extend;
//! * [`work`]: answers from other threads, for tests and measurements.
//!
//! A service holds no socket. It is handed to a [`ksf`] server, or driven by a
//! test through [`ksf::connection::Connection`].

#![forbid(unsafe_code)]

pub mod echo;
pub mod http;
pub mod rpc;
pub mod work;
