//! Running a service's function from user space.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::{NonNull, addr_of, addr_of_mut};
use std::sync::{Arc, Mutex};

use crate::KernelError;
use crate::abi::{BYTES_MAX, CallArea};
use crate::sys::{self, Map, Mapping};

/// What a service's function said about a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Not for it. User space has no other answer either: the connection is closed, or the message left.
    Pass,
    /// Answered; the reply was appended, without the framing.
    Reply,
    /// Answered by the message itself.
    Echo,
}

/// Areas shared with the `ksf_call` program, and which are free.
#[derive(Debug)]
pub(crate) struct CallerPool {
    memory: Mapping,
    program: OwnedFd,
    free: Mutex<Vec<u32>>,
}

impl CallerPool {
    pub(crate) fn new(calls: &Map, program: BorrowedFd<'_>, callers: u32) -> io::Result<Self> {
        let memory = Mapping::new(calls.as_fd(), 0, calls.entries() as usize * size_of::<CallArea>(), true)?;
        let free = Mutex::new((0..callers).rev().collect());
        Ok(Self { memory, program: program.try_clone_to_owned()?, free })
    }

    pub(crate) fn take(self: &Arc<Self>) -> Option<Caller> {
        let index = self.free.lock().expect("no panic while it is held").pop()?;
        Some(Caller { pool: Arc::clone(self), index })
    }
}

/// Runs the service's function on messages the kernel passed: the same code, checked by the verifier.
#[derive(Debug)]
pub struct Caller {
    pool: Arc<CallerPool>,
    index: u32,
}

impl Caller {
    /// Has the function answer `message` (without framing) and appends the reply (without framing) to `reply`.
    ///
    /// # Errors
    /// The message is longer than [`crate::KernelService::message_bytes_max`], or the program cannot be run.
    pub fn call(&mut self, message: &[u8], reply: &mut Vec<u8>) -> Result<Verdict, KernelError> {
        if message.len() > BYTES_MAX {
            return Err(KernelError::BadOption {
                option: "message",
                problem: format!("{} bytes; the function takes {BYTES_MAX}", message.len()),
            });
        }
        let area = self.area().as_ptr();
        // SAFETY: the area belongs to this Caller alone (the pool gave out its index once), `&mut self` keeps other
        // threads out, and the kernel touches it only during the run below. The message fits `input` (checked above).
        unsafe {
            addr_of_mut!((*area).len).write(message.len() as u32);
            let input = addr_of_mut!((*area).input).cast::<u8>();
            std::ptr::copy_nonoverlapping(message.as_ptr(), input, message.len());
        }
        let verdict = sys::run(self.pool.program.as_fd(), &self.index.to_ne_bytes())
            .map_err(|error| KernelError::system("running the service's function", error))?;
        match verdict {
            1 => {
                // SAFETY: as above; the program keeps out_len within BYTES_MAX, and `min` does not rely on it.
                let bytes = unsafe {
                    let len = (addr_of!((*area).out_len).read() as usize).min(BYTES_MAX);
                    std::slice::from_raw_parts(addr_of!((*area).out).cast::<u8>(), len)
                };
                reply.extend_from_slice(bytes);
                Ok(Verdict::Reply)
            }
            2 => Ok(Verdict::Echo),
            _ => Ok(Verdict::Pass),
        }
    }

    fn area(&self) -> NonNull<CallArea> {
        self.pool.memory.at(self.index as usize * size_of::<CallArea>())
    }
}

impl Drop for Caller {
    fn drop(&mut self) {
        if let Ok(mut free) = self.pool.free.lock() {
            free.push(self.index);
        }
    }
}
