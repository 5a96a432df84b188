use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::sync::mpsc;

use ksf::engine::EngineKind;
use ksf::framing::{Framing, LengthPrefix};
use ksf::limits::Limits;
use ksf::listener::ListenAddr;
use ksf::{Message, Reply, Server, Service};
use ksf_test::{Folder, wait_until};
use rustix::thread::gettid;

use super::*;

/// Returns each message.
struct Echo;

impl Service for Echo {
    ksf::stateless!();

    fn profile(&self) -> Profile<'_> {
        Profile::new("echo", Framing::LengthPrefix(LengthPrefix::big_endian(4)))
    }

    fn call(&self, (): &mut (), (): &mut (), message: &Message<'_>, reply: &mut Reply<'_>) {
        reply.bytes(message.bytes());
    }
}

/// The timer thread gives the messages of a worker that is held up to others, before that worker begins the first one. The
/// connection has one state, which the other worker needs then.
#[test]
fn a_worker_that_has_begun_nothing_keeps_no_state() {
    let (workers, by_hand) =
        Workers::without_threads(Arc::new(Echo), WorkersOptions::new(2, Limits::default())).unwrap();
    let workers = Arc::new(workers);
    let [(slow, mut slow_worker), (quick, mut quick_worker)] = <[_; 2]>::try_from(by_hand).ok().unwrap();
    let folder = Folder::new();
    let builder = Server::builder().engine(EngineKind::Epoll);
    let builder = builder.listen(ListenAddr::Unix(folder.path("socket")), Arc::new(Echo), None);
    let _server = builder.adopt(Arc::clone(&workers) as _).start().unwrap();
    let mut client = UnixStream::connect(folder.path("socket")).unwrap();
    let message = *b"\0\0\0\x04text";
    client.write_all(&message).unwrap();

    let batch = slow.recv_in_place().unwrap();
    let state = slow.lock();
    thread::scope(|scope| {
        let (tell, told) = mpsc::channel();
        let slow = &slow;
        scope.spawn(move || {
            tell.send(gettid()).unwrap();
            slow_worker.work(slow, &batch);
        });
        let file = format!("/proc/self/task/{}/stat", told.recv().unwrap().as_raw_nonzero());
        wait_until("the worker waits for its socket", || std::fs::read_to_string(&file).unwrap().contains(") S "));
        let mut state = state;
        let shared = &workers.mux.0.0;
        state.check();
        let (_, revoked) = state.check();
        shared.wake(shared.scheduler.give_back(revoked.into_iter()));
        let batch = quick.recv_in_place().unwrap();
        quick_worker.work(&quick, &batch);
        drop(state);
    });
    let mut answer = [0; 8];
    client.read_exact(&mut answer).unwrap();
    assert_eq!(answer, message);
    assert_eq!(workers.stats.iter().map(|stats| stats.messages.value()).sum::<u64>(), 1);
}
