//! A service that is one function. The tests inside of the crate have this file, too.

use std::sync::Arc;

use ksf::{Message, Profile, Reply, Service};

/// [`calls`].
pub(crate) struct Calls<F> {
    profile: Profile<'static>,
    call: F,
}

/// A service without state that calls a function with each message.
pub(crate) fn calls<F>(profile: Profile<'static>, call: F) -> Arc<Calls<F>>
where
    F: Fn(&Message<'_>, &mut Reply<'_>) + Send + Sync + 'static,
{
    Arc::new(Calls { profile, call })
}

impl<F: Fn(&Message<'_>, &mut Reply<'_>) + Send + Sync + 'static> Service for Calls<F> {
    ksf::stateless!();

    fn profile(&self) -> Profile<'_> {
        self.profile
    }

    fn call(&self, (): &mut (), (): &mut (), message: &Message<'_>, reply: &mut Reply<'_>) {
        (self.call)(message, reply);
    }
}
