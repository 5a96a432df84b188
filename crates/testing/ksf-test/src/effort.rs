//! How much a test tries: little in `make test`, everything in `make soak`.

/// `gate` where the environment variable `KSF_SOAK` is not set, else `soak`: numbers of seeds, schedules or rounds.
pub fn effort<T>(gate: T, soak: T) -> T {
    if std::env::var_os("KSF_SOAK").is_some() { soak } else { gate }
}
