//! What a measurement leaves behind: the JSON document and the files.

pub(crate) mod hdr;
pub mod json;
pub(crate) mod raw;
pub(crate) mod svg;
