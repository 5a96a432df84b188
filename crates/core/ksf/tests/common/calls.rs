//! A service that is one function. The tests inside of the crate have this file, too.

use std::sync::Arc;

use ksf::{Message, Peer, Profile, Refused, Reply, Service, Turn, Unlogged};

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
    type Shard = ();
    type Conn = ();
    type Mode = Unlogged;

    fn profile(&self) -> Profile<'_> {
        self.profile
    }

    fn start(&self, _: &mut Turn<'_>) -> std::io::Result<()> {
        Ok(())
    }

    fn accept(&self, (): &mut (), _: &Peer) -> Result<(), Refused> {
        Ok(())
    }

    fn call(&self, (): &mut (), (): &mut (), message: &Message<'_>, reply: &mut Reply<'_>) {
        (self.call)(message, reply);
    }
}
