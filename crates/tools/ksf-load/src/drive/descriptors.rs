//! Descriptors for all connections.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::error::LoadError;

/// Descriptors that are no connections: epoll instances, files, streams.
const OTHER_DESCRIPTORS: u64 = 64;

/// Lets the process have as many descriptors as the connections need.
pub(crate) fn raise_descriptors(connections: u64) -> Result<(), LoadError> {
    let needed = connections + OTHER_DESCRIPTORS;
    let limit = getrlimit(Resource::Nofile);
    if limit.current.is_none_or(|current| current >= needed) {
        return Ok(());
    }
    match limit.maximum.is_none_or(|maximum| maximum >= needed) {
        true => setrlimit(Resource::Nofile, Rlimit { current: Some(needed), ..limit })
            .map_err(|error| LoadError::system(format!("cannot have {needed} descriptors (RLIMIT_NOFILE)"), error)),
        false => Err(LoadError::Exhausted(format!(
            "{connections} connections need {needed} descriptors, and the limit is {}; use fewer connections, or raise it \
             (ulimit -Hn)",
            limit.maximum.unwrap_or(0)
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_descriptors_than_there_may_be_are_refused() {
        raise_descriptors(1).unwrap();
        assert_eq!(raise_descriptors(1 << 40).unwrap_err().exit_code(), 69);
    }
}
