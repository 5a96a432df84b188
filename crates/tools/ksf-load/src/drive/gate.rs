//! Lets the threads of a run go together.

use std::sync::{Condvar, Mutex};

/// Where the threads wait until all are ready.
#[derive(Default)]
pub(crate) struct Gate {
    go: Mutex<Option<bool>>,
    changed: Condvar,
}

impl Gate {
    /// Waits, and tells whether to go.
    pub(crate) fn wait(&self) -> bool {
        let go = self.go.lock().expect("no thread panics while it holds the gate");
        let go = self.changed.wait_while(go, |go| go.is_none()).expect("no thread panics while it holds the gate");
        *go == Some(true)
    }
}

/// Opens the gate; when dropped before, turns everybody away.
pub(crate) struct GateOpener<'a>(&'a Gate);

impl<'a> GateOpener<'a> {
    pub(crate) fn new(gate: &'a Gate) -> Self {
        GateOpener(gate)
    }

    pub(crate) fn open(&self, go: bool) {
        let mut state = self.0.go.lock().expect("no thread panics while it holds the gate");
        state.get_or_insert(go);
        self.0.changed.notify_all();
    }
}

impl Drop for GateOpener<'_> {
    fn drop(&mut self) {
        self.open(false);
    }
}
