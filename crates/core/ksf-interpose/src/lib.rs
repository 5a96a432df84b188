//! What ksf's libraries for LD_PRELOAD have in common: the functions of libc behind those that they define once more
//! ([`Next`]), the program's `errno`, which signals end a call that waits ([`Handlers`]), and which descriptor numbers
//! are theirs ([`Marks`]).
//!
//! Nothing here allocates or takes a lock, so a signal handler and a child of `fork` may call all of it. The exception is
//! the first look-up of a function, which calls dlsym.

pub mod errno;
mod marks;
mod next;
mod signals;

pub use marks::Marks;
pub use next::Next;
pub use signals::{Handlers, Signals};
