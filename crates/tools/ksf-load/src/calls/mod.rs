//! What echotest and rpctest share: the options, iterations and tables of the FreeBSD originals.

pub(crate) mod args;
pub(crate) mod columns;
mod progress;
pub mod report;
pub(crate) mod session;

pub use args::{CallArgs, NoDelay};
