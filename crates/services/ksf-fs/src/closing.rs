//! Descriptors released by a shard, and open files. A shard closes neither: closing the last descriptor of a removed file frees its
//! blocks, which may wait for the disk. Lanes do it, and a thread of the export where no lane does: an answer may come after the end
//! of its connection, and a job after the end of the lanes.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use crate::descriptors::Gone;

/// Descriptors that a lane closes together.
const BATCH: usize = 64;
/// Most descriptors that wait to be closed, with those in the queue of a lane. Beyond that shards open nothing.
const WAITING_MAX: usize = 256;

type Dropped = Box<dyn Send>;

/// The way to the thread that closes descriptors of an export. The thread ends after the last clone.
#[derive(Clone, Debug)]
pub(crate) struct Closer(Sender<Dropped>);

impl Closer {
    /// Starts the thread.
    pub(crate) fn start() -> io::Result<Self> {
        let (closer, dropped) = Self::new();
        thread::Builder::new().name("ksf-fs-closer".to_owned()).spawn(move || dropped.into_iter().for_each(drop))?;
        Ok(closer)
    }

    /// A closer whose thread is the receiver's.
    fn new() -> (Self, Receiver<Dropped>) {
        let (sender, receiver) = mpsc::channel();
        (Self(sender), receiver)
    }

    /// Has the thread drop a value.
    pub(crate) fn drop_there(&self, value: impl Send + 'static) {
        // The thread outlives this. If it has panicked, the value is dropped here.
        drop(self.0.send(Box::new(value)));
    }
}

/// Descriptors of one export that lanes have to close.
#[derive(Debug)]
pub(crate) struct Closing {
    next: Mutex<Vec<Gone>>,
    waiting: Arc<AtomicUsize>,
    closer: Closer,
}

/// Descriptors for one job.
#[derive(Debug)]
pub(crate) struct Batch {
    /// `None` when they are closed.
    counted: Option<Counted>,
    closer: Closer,
}

/// Descriptors that wait; dropping it closes them.
#[derive(Debug)]
struct Counted {
    gone: Vec<Gone>,
    waiting: Arc<AtomicUsize>,
}

impl Closing {
    pub(crate) fn new(closer: Closer) -> Self {
        Self { next: Mutex::default(), waiting: Arc::default(), closer }
    }

    pub(crate) fn closer(&self) -> &Closer {
        &self.closer
    }

    /// False: too many descriptors wait.
    pub(crate) fn has_room(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) < WAITING_MAX
    }

    /// Adds released descriptors. Returns all waiting ones when a lane should close them: they are enough for a job, or one is
    /// open for writing and prevents execution of its file.
    pub(crate) fn add(&self, gone: Gone) -> Option<Batch> {
        let count = gone.count();
        if count == 0 {
            return None;
        }
        self.waiting.fetch_add(count, Ordering::Relaxed);
        let is_urgent = gone.is_writable();
        let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
        next.push(gone);
        (is_urgent || next.len() >= BATCH).then(|| self.batch(std::mem::take(&mut *next)))
    }

    /// All waiting descriptors, after the last call of many.
    pub(crate) fn take(&self) -> Option<Batch> {
        let gone = std::mem::take(&mut *self.next.lock().unwrap_or_else(PoisonError::into_inner));
        (!gone.is_empty()).then(|| self.batch(gone))
    }

    fn batch(&self, gone: Vec<Gone>) -> Batch {
        let counted = Some(Counted { gone, waiting: Arc::clone(&self.waiting) });
        Batch { counted, closer: self.closer.clone() }
    }
}

impl Batch {
    /// Closes them on this thread, which may wait for a disk.
    pub(crate) fn close(mut self) {
        drop(self.counted.take());
    }
}

impl Drop for Batch {
    fn drop(&mut self) {
        if let Some(counted) = self.counted.take() {
            self.closer.drop_there(counted);
        }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        let count = self.gone.iter().map(Gone::count).sum();
        self.gone.clear();
        self.waiting.fetch_sub(count, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;

    use super::*;

    fn gone() -> Gone {
        Gone::of(OwnedFd::from(std::fs::File::open("/dev/null").unwrap()))
    }

    #[test]
    fn what_waits_is_bounded_until_it_is_closed() {
        let (closer, dropped) = Closer::new();
        let closing = Closing::new(closer);
        assert!(closing.add(Gone::default()).is_none() && closing.take().is_none());
        let mut batches: Vec<Batch> = (0..WAITING_MAX).filter_map(|_| closing.add(gone())).collect();
        assert_eq!(batches.len(), WAITING_MAX / BATCH);
        assert!(!closing.has_room(), "a lane has not closed them yet");
        batches.drain(1..).for_each(Batch::close);
        assert_eq!(closing.waiting.load(Ordering::Relaxed), BATCH);
        // Without a lane the thread does it.
        drop(batches);
        assert_eq!(closing.waiting.load(Ordering::Relaxed), BATCH);
        assert_eq!(dropped.try_iter().count(), 1);
        assert!(closing.has_room());
        assert!(closing.add(gone()).is_none(), "the first of the next ones");
        closing.take().unwrap().close();
        assert_eq!(closing.waiting.load(Ordering::Relaxed), 0);
    }
}
