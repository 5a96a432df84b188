//! The command `ksf`.

fn main() {}
