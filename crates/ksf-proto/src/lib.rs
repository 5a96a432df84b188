//! Wire formats, sans-IO.
