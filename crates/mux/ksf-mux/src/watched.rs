//! The locks of debug builds: a library in a program whose handlers may interrupt it checks at each that none can.

use std::sync::{LockResult, MutexGuard, OnceLock, RwLockReadGuard, RwLockWriteGuard, TryLockResult};

static CHECK: OnceLock<fn()> = OnceLock::new();

/// From now on `check` is called before a lock of a multiplexor is taken, in debug builds. The first call counts.
pub fn check_locks(check: fn()) {
    let _ = CHECK.set(check);
}

fn check() {
    if let Some(check) = CHECK.get() {
        check();
    }
}

#[derive(Debug, Default)]
pub(crate) struct Mutex<T>(std::sync::Mutex<T>);

impl<T> Mutex<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self(std::sync::Mutex::new(value))
    }

    pub(crate) fn lock(&self) -> LockResult<MutexGuard<'_, T>> {
        check();
        self.0.lock()
    }

    pub(crate) fn try_lock(&self) -> TryLockResult<MutexGuard<'_, T>> {
        check();
        self.0.try_lock()
    }
}

#[derive(Debug, Default)]
pub(crate) struct RwLock<T>(std::sync::RwLock<T>);

impl<T> RwLock<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self(std::sync::RwLock::new(value))
    }

    pub(crate) fn read(&self) -> LockResult<RwLockReadGuard<'_, T>> {
        check();
        self.0.read()
    }

    pub(crate) fn write(&self) -> LockResult<RwLockWriteGuard<'_, T>> {
        check();
        self.0.write()
    }
}
