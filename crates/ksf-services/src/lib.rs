//! The services that come with ksf.
