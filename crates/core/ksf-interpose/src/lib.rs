//! What ksf's libraries for LD_PRELOAD have in common: the functions of libc behind those that they define once more
//! ([`Next`]), the program's `errno`, which signals end a call that waits ([`Handlers`]), what they know of descriptors
//! ([`Marks`]) and which ones are theirs ([`OwnDescriptors`]), and how they end after a panic ([`abort_on_panic`]).
//!
//! Nothing here allocates or takes a lock, so a signal handler and a child of `fork` may call all of it. The exceptions are
//! the first look-up of a function, which calls dlsym, and [`abort_on_panic`], for the start of a library.

pub mod errno;
mod marks;
mod next;
mod own;
mod panic;
mod signals;

pub use marks::Marks;
pub use next::Next;
pub use own::OwnDescriptors;
pub use panic::abort_on_panic;
pub use signals::{Handlers, Signals};
