//! What a measurement leaves behind: tables, the JSON document and the files.

pub(crate) mod columns;
pub(crate) mod hdr;
pub mod json;
pub(crate) mod progress;
pub(crate) mod raw;
pub(crate) mod session;
pub(crate) mod svg;
pub(crate) mod tool;
pub(crate) mod warn;
