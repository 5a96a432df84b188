//! The clock of a file layer.

use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::Duration;

use crate::lanes::Lanes;
use crate::layer::Fs;

/// How often the file layer is told that a second has passed.
const EVERY: Duration = Duration::from_secs(1);

/// A thread that tells the file layer each second ([`Fs::close_idle`]), and leaves the syncs that are due to the lanes. It serves all
/// exports, so it calls no file system: a disk may hang. It ends when this is dropped, which does not wait for it.
#[derive(Debug)]
pub struct FsClock(Arc<(Mutex<bool>, Condvar)>);

impl FsClock {
    /// Starts the thread.
    ///
    /// # Errors
    ///
    /// The system refused it.
    pub fn start(fs: Arc<Fs>, lanes: Weak<Lanes>) -> std::io::Result<Self> {
        let ended = Arc::<(Mutex<bool>, Condvar)>::default();
        let told = Arc::clone(&ended);
        let run = move || {
            let (ended, told) = &*told;
            let mut is_ended = ended.lock().unwrap_or_else(PoisonError::into_inner);
            while !*is_ended {
                let woken = told.wait_timeout(is_ended, EVERY).unwrap_or_else(PoisonError::into_inner);
                is_ended = woken.0;
                if woken.1.timed_out() {
                    // Without the lock: dropping the last of the lanes waits for their jobs.
                    drop(is_ended);
                    let owed = fs.close_idle();
                    if let Some(lanes) = lanes.upgrade() {
                        lanes.settle(&fs, owed);
                    }
                    is_ended = ended.lock().unwrap_or_else(PoisonError::into_inner);
                }
            }
        };
        ksf::threads::start("ksf-fs-clock", run)?;
        Ok(Self(ended))
    }
}

impl Drop for FsClock {
    fn drop(&mut self) {
        let (ended, told) = &*self.0;
        *ended.lock().unwrap_or_else(PoisonError::into_inner) = true;
        told.notify_all();
    }
}
