//! A service with its types erased, before a shard runs it and on a shard.

use std::rc::Rc;
use std::sync::Arc;

use super::datagrams::DatagramService;
use crate::connection::Connection;
use crate::env::Env;
use crate::files::FileDone;
use crate::service::{ConnKey, Peer, Profile, Refused, Service};
use crate::session::{OnShard, ServiceInfo};
use crate::turn::Turn;

/// A service with its types erased, before any shard runs it.
pub(crate) trait AnyService: Send + Sync {
    /// Makes the service's state for the shard of this thread.
    fn start(&self, env: &mut Env) -> Result<Rc<dyn LocalService>, crate::Error>;
    fn profile(&self) -> Profile<'_>;
    fn counters(&self) -> Vec<(&'static str, u64)>;
    /// The same for every listener that serves the same value.
    fn identity(&self) -> usize;
}

impl<S: Service> AnyService for Arc<S> {
    fn start(&self, env: &mut Env) -> Result<Rc<dyn LocalService>, crate::Error> {
        let state = Service::start(&**self, &mut Turn::new(env));
        let name = || Service::profile(&**self).name.to_owned();
        let state = state.map_err(|source| crate::Error::ServiceStart { service: name(), source })?;
        let on = OnShard::new(Self::clone(self), state);
        on.info().note_files(env);
        Ok(Rc::new(on))
    }

    fn profile(&self) -> Profile<'_> {
        Service::profile(&**self)
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        Service::counters(&**self)
    }

    fn identity(&self) -> usize {
        Arc::as_ptr(self).addr()
    }
}

/// A service on one shard: it makes connections, and hears of what belongs to none.
pub(crate) trait LocalService {
    fn info(&self) -> &ServiceInfo;
    /// A connection of the listener of this number.
    fn open(&self, peer: Peer, key: ConnKey, listener: u32, env: &Env) -> Result<Box<Connection>, Refused>;
    fn open_datagrams(&self, local: Peer, socket: u32) -> Result<Box<DatagramService>, Refused>;
    fn turn_end(&self, env: &mut Env);
    /// An operation of its own ended.
    fn file_done(&self, done: FileDone, env: &mut Env);
    /// Operations on files are not refused any more.
    fn files_have_room(&self, env: &mut Env);
    fn stop(self: Rc<Self>);
}

impl<S: Service> LocalService for OnShard<S> {
    fn info(&self) -> &ServiceInfo {
        Self::info(self)
    }

    fn open(&self, peer: Peer, key: ConnKey, listener: u32, env: &Env) -> Result<Box<Connection>, Refused> {
        Ok(Connection::new(self.clone(), peer, key, env.now)?.of_listener(listener))
    }

    fn open_datagrams(&self, local: Peer, socket: u32) -> Result<Box<DatagramService>, Refused> {
        DatagramService::open(self.clone(), &local, socket)
    }

    fn turn_end(&self, env: &mut Env) {
        Self::turn_end(self, env);
    }

    fn file_done(&self, done: FileDone, env: &mut Env) {
        self.with_turn(env, |service, shard, turn| service.file_done(shard, done, turn));
    }

    fn files_have_room(&self, env: &mut Env) {
        self.with_turn(env, |service, shard, turn| service.files_have_room(shard, turn));
    }

    fn stop(self: Rc<Self>) {
        if let Ok(on) = Rc::try_unwrap(self) {
            Self::stop(on);
        }
    }
}
