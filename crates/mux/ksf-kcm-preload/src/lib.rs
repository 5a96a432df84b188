//! A library for LD_PRELOAD that gives a program the sockets of AF_KCM on a kernel without them: `ksf kcm-run`.
//!
//! Each function of libc that may be called on such a socket is defined here once more ([`hooks`]); it looks the
//! descriptor up ([`table`]) and either does the call on a [`ksf_mux::kcm::KcmSocket`] or hands it to libc.
//!
//! The number a program sees is a real descriptor, of an epoll set that is readable while a message may be there. So
//! O_NONBLOCK, FD_CLOEXEC, dup and event loops work as they do, and close is all that must be noticed.
//!
//! Calls to the kernel from here go through rustix, which makes them without libc: a function of libc would come back
//! to the one defined here. For the same reason none of the locks that `close` takes, of the table, of epoll sets and of the
//! library's descriptors, is held while `close` is called.
//!
//! The library's own descriptors have high numbers, and the program's calls pass over them ([`descriptor`]). A panic ends the
//! process at once: the thread may hold a lock.
//!
//! A message socket belongs to the process that opened it ([`ownership`]). Signals end calls as they do on sockets of
//! the kernel ([`signals`]).
//!
//! Signal handlers may call every function defined here that POSIX allows them to call (signal-safety(7)). Each call on a
//! descriptor of the table therefore blocks signals from its start to its end and opens them only while it waits in the
//! kernel without a lock ([`signals::Blocked`]). Its memory comes from the library's own allocator: a handler may have
//! interrupted libc's. glibc allocates no block for thread-locals at their first use: LD_PRELOAD alone loads the library, at
//! the start of the program, so their place is in the static block of each thread. The library starts and ends no thread: it
//! has one of its own ([`keeper`]).

mod attached;
mod descriptor;
mod events;
pub mod hooks;
mod kcm;
mod keeper;
mod message;
mod notice;
mod ownership;
mod passed;
mod procfs;
mod program;
mod real;
mod signals;
mod table;
mod watch;
#[cfg(debug_assertions)]
mod watched;

/// All code that allocates runs with signals blocked, so no handler meets the lock of this allocator.
#[cfg(not(debug_assertions))]
#[global_allocator]
static ALLOCATOR: dlmalloc::GlobalDlmalloc = dlmalloc::GlobalDlmalloc;
#[cfg(debug_assertions)]
#[global_allocator]
static ALLOCATOR: watched::WatchedDlmalloc = watched::WatchedDlmalloc;
