//! Event loops on real descriptors: how often they are told, and that they are.

use std::io::Write;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Barrier, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use ksf::framing::{Framing, LengthPrefix};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, epoll, eventfd};

use crate::{ConnectionId, Message, MessageSocket, Mux, MuxOptions, RecvError};

/// Far more than anything here takes: a guard against hanging, not a measure.
const PATIENCE: Duration = Duration::from_secs(30);
const NOW: Duration = Duration::ZERO;

/// How a program waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Level,
    Edge,
    Poll,
}

const WAYS: [Way; 3] = [Way::Level, Way::Edge, Way::Poll];

/// A program's event loop, with a message socket in it and something else.
struct Loop<'a> {
    way: Way,
    set: OwnedFd,
    fds: [BorrowedFd<'a>; 2],
}

impl<'a> Loop<'a> {
    const SOCKET: u64 = 0;

    fn new(way: Way, socket: &'a MessageSocket, stop: &'a OwnedFd) -> Self {
        use std::os::fd::AsFd;
        let set = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
        let flags = if way == Way::Edge { epoll::EventFlags::ET } else { epoll::EventFlags::empty() };
        let fds = [socket.poll_fd().unwrap(), stop.as_fd()];
        for (at, fd) in fds.iter().enumerate() {
            let flags = if at == 0 { flags } else { epoll::EventFlags::empty() };
            epoll::add(&set, fd, epoll::EventData::new_u64(at as u64), epoll::EventFlags::IN | flags).unwrap();
        }
        Self { way, set, fds }
    }

    /// True if the socket was announced within this time; false also if something else was.
    fn wait(&self, timeout: Duration) -> bool {
        let timeout = Timespec { tv_sec: timeout.as_secs() as _, tv_nsec: timeout.subsec_nanos().into() };
        if self.way == Way::Poll {
            let mut polled = self.fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
            rustix::event::poll(&mut polled, Some(&timeout)).unwrap();
            return !polled[0].revents().is_empty();
        }
        let mut event = [epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(9) }];
        let count = epoll::wait(&self.set, &mut event, Some(&timeout)).unwrap();
        count == 1 && event[0].data.u64() == Self::SOCKET
    }
}

struct World {
    mux: Mux,
    clients: Vec<UnixStream>,
    connections: Vec<ConnectionId>,
    stop: OwnedFd,
}

impl World {
    fn new(connections: usize) -> Self {
        let mux = Mux::new(MuxOptions::new(Framing::LengthPrefix(LengthPrefix::big_endian(2)))).unwrap();
        let stop = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let mut world = Self { mux, clients: Vec::new(), connections: Vec::new(), stop };
        for _ in 0..connections {
            let (client, server) = UnixStream::pair().unwrap();
            world.connections.push(world.mux.attach(server.into()).unwrap());
            world.clients.push(client);
        }
        // That a connection can be sent on is an event, too.
        assert!(matches!(world.mux.socket().unwrap().try_recv(), Err(RecvError::WouldBlock)));
        world
    }

    /// A socket whose program found nothing.
    fn sleeper(&self) -> MessageSocket {
        let socket = self.mux.socket().unwrap();
        socket.poll_fd().unwrap();
        assert!(matches!(socket.try_recv(), Err(RecvError::WouldBlock)));
        socket
    }

    fn send(&self, connection: usize, number: u16) {
        let [high, low] = number.to_be_bytes();
        (&self.clients[connection]).write_all(&[0, 2, high, low]).unwrap();
    }

    fn until_asleep(&self, count: usize) {
        self.until(|| self.mux.shared().wait_set.asleep() == count, "not all fall asleep");
    }

    fn until(&self, condition: impl Fn() -> bool, what: &str) {
        let start = Instant::now();
        while !condition() {
            assert!(start.elapsed() < PATIENCE, "{what}");
            thread::yield_now();
        }
    }

    fn replaced(&self) -> usize {
        self.mux.shared().wait_set.replaced() as usize
    }

    fn stop(&self) {
        rustix::io::write(&self.stop, &1u64.to_ne_bytes()).unwrap();
    }
}

fn number(message: &Message) -> u16 {
    u16::from_be_bytes(message.bytes().try_into().unwrap())
}

fn drain(socket: &MessageSocket) -> Vec<u16> {
    let mut numbers = Vec::new();
    loop {
        match socket.try_recv() {
            Ok(message) => numbers.push(number(&message)),
            Err(RecvError::WouldBlock) => return numbers,
            Err(error) => panic!("{error}"),
        }
    }
}

fn is_readable(socket: &MessageSocket) -> bool {
    let fd = socket.poll_fd().unwrap();
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    rustix::event::poll(&mut [PollFd::from_borrowed_fd(fd, PollFlags::IN)], Some(&now)).unwrap() > 0
}

/// How much a program receives each time it is told.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Takes {
    All,
    One,
}

/// Event loops in threads of their own, while `test` runs; it gets how often they were told, and what they receive.
fn with_loops(world: &World, ways: &[Way], takes: Takes, test: impl FnOnce(&AtomicUsize, &mpsc::Receiver<u16>)) {
    let wakes = AtomicUsize::new(0);
    let (send, received) = mpsc::channel();
    thread::scope(|scope| {
        for way in ways {
            let (send, wakes) = (send.clone(), &wakes);
            scope.spawn(move || {
                let socket = world.mux.socket().unwrap();
                let events = Loop::new(*way, &socket, &world.stop);
                while events.wait(PATIENCE * 10) {
                    wakes.fetch_add(1, Ordering::SeqCst);
                    while let Ok(message) = socket.try_recv() {
                        send.send(number(&message)).unwrap();
                        if takes == Takes::One {
                            break;
                        }
                    }
                }
            });
        }
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| test(&wakes, &received)));
        world.stop();
        result.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    });
}

#[test]
fn one_event_loop_wakes_per_message() {
    const LOOPS: usize = 4;
    const MESSAGES: u16 = 200;
    for way in WAYS {
        let world = World::new(3);
        with_loops(&world, &[way; LOOPS], Takes::All, |wakes, received| {
            world.until_asleep(LOOPS);
            let (wakes_before, late_before) = (wakes.load(Ordering::SeqCst), world.replaced());
            for at in 0..MESSAGES {
                world.send(usize::from(at) % 3, at);
                assert_eq!(received.recv_timeout(PATIENCE), Ok(at), "{way:?}");
                world.until_asleep(LOOPS);
            }
            let woken = wakes.load(Ordering::SeqCst) - wakes_before;
            // One that a busy machine did not run in time is told once more, and so is another.
            let late = world.replaced() - late_before;
            let (least, most) = (usize::from(MESSAGES), usize::from(MESSAGES) + 2 * late);
            assert!((least..=most).contains(&woken), "{way:?}: {woken} wake-ups for {MESSAGES}, {late} late");
        });
    }
}

#[test]
fn messages_that_come_together_wake_one_event_loop_each() {
    // Each keeps its message until all have one: every one of them must be told.
    const LOOPS: usize = 4;
    for way in WAYS {
        for connections in [1, LOOPS] {
            let world = World::new(connections);
            let together = Barrier::new(LOOPS);
            let all = Mutex::new(Vec::new());
            thread::scope(|scope| {
                for _ in 0..LOOPS {
                    scope.spawn(|| {
                        let socket = world.sleeper();
                        let events = Loop::new(way, &socket, &world.stop);
                        let message = loop {
                            assert!(events.wait(PATIENCE), "{way:?}: not told");
                            match socket.try_recv() {
                                Ok(message) => break message,
                                Err(error) => assert!(matches!(error, RecvError::WouldBlock), "{error}"),
                            }
                        };
                        all.lock().unwrap().push(number(&message));
                        together.wait();
                    });
                }
                world.until_asleep(LOOPS);
                for at in 0..LOOPS {
                    world.send(at % connections, at as u16);
                }
            });
            let mut all = all.into_inner().unwrap();
            all.sort_unstable();
            assert_eq!(all, (0..LOOPS as u16).collect::<Vec<_>>());
        }
    }
}

#[test]
fn a_leader_that_never_receives_holds_nothing_up() {
    const MESSAGES: u16 = 20;
    for way in WAYS {
        let world = World::new(2);
        // The first to sleep leads.
        let idle = world.sleeper();
        with_loops(&world, &[way; 2], Takes::All, |_, received| {
            world.until_asleep(3);
            world.send(0, 0);
            assert!(is_readable(&idle), "another one leads");
            for at in 0..MESSAGES {
                assert_eq!(received.recv_timeout(PATIENCE), Ok(at), "{way:?}");
                world.send(usize::from(at + 1) % 2, at + 1);
            }
            assert_eq!(received.recv_timeout(PATIENCE), Ok(MESSAGES), "{way:?}");
            assert!(is_readable(&idle), "its program could come any time");
            assert!(world.replaced() > 0);
        });
        // It is as good as the others.
        assert_eq!(drain(&idle), []);
        assert!(!is_readable(&idle));
        world.send(1, 7);
        assert!(is_readable(&idle));
        assert_eq!(drain(&idle), [7]);
    }
}

#[test]
fn several_that_never_receive_are_passed_over_in_turn() {
    let world = World::new(1);
    let idle: Vec<_> = (0..4).map(|_| world.sleeper()).collect();
    let last = world.sleeper();
    let events = Loop::new(Way::Edge, &last, &world.stop);
    world.send(0, 5);
    // The last to sleep leads second; so only one other is passed over. Then all others have to be.
    assert!(events.wait(PATIENCE));
    world.until(|| world.replaced() >= 4, "a sleeper that was told and does not come still leads");
    assert!(idle.iter().all(is_readable));
    assert_eq!(drain(&last), [5]);
}

#[test]
fn what_a_leader_was_told_of_goes_to_others_when_it_ends() {
    for end in 0..3 {
        for way in WAYS {
            let world = World::new(2);
            let leader = world.sleeper();
            let next = world.sleeper();
            let events = Loop::new(way, &next, &world.stop);
            assert!(!events.wait(NOW));
            world.send(0, 3);
            assert!(is_readable(&leader));
            match end {
                0 => drop(leader),
                1 => leader.set_receiving(false),
                _ => {
                    // The connection goes, with what it brought.
                    let detached = world.mux.detach(world.connections[0]).unwrap();
                    drop(detached);
                    drop(leader);
                    world.send(1, 3);
                }
            }
            assert!(events.wait(PATIENCE), "{end} {way:?}");
            assert_eq!(drain(&next), [3], "{end} {way:?}");
        }
    }
}

#[test]
fn a_socket_that_receives_again_is_told() {
    for way in WAYS {
        let world = World::new(1);
        let socket = world.sleeper();
        let events = Loop::new(way, &socket, &world.stop);
        socket.set_receiving(false);
        world.send(0, 1);
        assert!(!events.wait(NOW), "it receives nothing");
        socket.set_receiving(true);
        assert!(events.wait(NOW), "{way:?}");
        assert_eq!(drain(&socket), [1]);
        world.send(0, 2);
        assert!(events.wait(NOW), "{way:?}");
        assert_eq!(drain(&socket), [2]);
    }
}

#[test]
fn whoever_leads_anew_is_told_of_what_is_there() {
    for way in WAYS {
        let world = World::new(3);
        let (first, second) = (world.sleeper(), world.sleeper());
        let (of_first, of_second) = (Loop::new(way, &first, &world.stop), Loop::new(way, &second, &world.stop));
        world.send(0, 1);
        assert!(of_first.wait(PATIENCE));
        assert_eq!(drain(&first), [1]);
        assert!(!of_first.wait(NOW) && !of_second.wait(NOW));
        // The second one leads now. It takes one of two, so the first one must hear of the other.
        world.send(1, 2);
        world.send(2, 3);
        assert!(of_second.wait(PATIENCE));
        let one = number(&second.try_recv().unwrap());
        assert!(of_first.wait(PATIENCE), "{way:?}");
        assert_eq!(drain(&first), [5 - one], "{way:?}");
    }
}

#[test]
fn a_loop_that_starts_late_is_told() {
    for way in WAYS {
        let world = World::new(1);
        let (leader, other) = (world.sleeper(), world.sleeper());
        world.send(0, 1);
        assert!(Loop::new(way, &leader, &world.stop).wait(NOW), "{way:?}");
        // The leader does not come.
        assert!(Loop::new(way, &other, &world.stop).wait(PATIENCE), "{way:?}");
        let fresh = world.mux.socket().unwrap();
        assert!(Loop::new(way, &fresh, &world.stop).wait(NOW), "{way:?}");
        assert_eq!(drain(&fresh), [1]);
    }
}

#[test]
fn a_program_need_not_wait_to_be_told() {
    let world = World::new(1);
    let (leader, other) = (world.sleeper(), world.sleeper());
    world.send(0, 1);
    assert!(is_readable(&leader) && !is_readable(&other));
    assert_eq!(drain(&other), [1]);
    assert_eq!(drain(&leader), []);
}

#[test]
fn bytes_without_a_message_leave_a_leader_listening() {
    for way in WAYS {
        let world = World::new(2);
        let (leader, _other) = (world.sleeper(), world.sleeper());
        let events = Loop::new(way, &leader, &world.stop);
        (&world.clients[0]).write_all(&[0]).unwrap();
        (&world.clients[1]).write_all(&[0]).unwrap();
        assert!(events.wait(PATIENCE));
        assert_eq!(drain(&leader), []);
        assert!(!events.wait(NOW), "{way:?}: nothing is left to read");
        (&world.clients[0]).write_all(&[2, 0, 8]).unwrap();
        assert!(events.wait(PATIENCE), "{way:?}");
        assert_eq!(drain(&leader), [8]);
    }
}

#[test]
fn programs_that_take_one_message_at_a_time_get_them_all() {
    const MESSAGES: u16 = 300;
    for way in [Way::Level, Way::Poll] {
        for burst in [1, 5] {
            let world = World::new(2);
            with_loops(&world, &[way; 3], Takes::One, |_, received| {
                for start in (0..MESSAGES).step_by(burst) {
                    (start..start + burst as u16).for_each(|at| world.send(usize::from(at) % 2, at));
                    let mut got: Vec<_> = (0..burst).map(|_| received.recv_timeout(PATIENCE).unwrap()).collect();
                    got.sort_unstable();
                    assert!(got.iter().copied().eq(start..start + burst as u16), "{got:?} from {start}");
                }
            });
        }
    }
}

#[test]
fn one_that_waits_without_having_found_nothing_is_told() {
    for way in WAYS {
        let world = World::new(2);
        let (first, second) = (world.sleeper(), world.sleeper());
        let events = Loop::new(way, &first, &world.stop);
        world.send(0, 1);
        assert!(events.wait(PATIENCE));
        assert_eq!(number(&first.try_recv().unwrap()), 1);
        // It waits now, and the second one leads and does nothing.
        world.send(1, 2);
        assert!(is_readable(&second));
        assert!(events.wait(PATIENCE), "{way:?}");
        assert_eq!(drain(&first), [2]);
    }
}

#[test]
fn a_sleeper_listens_in_place_of_one_at_work() {
    for way in WAYS {
        let world = World::new(2);
        let first = world.sleeper();
        world.send(0, 1);
        assert_eq!(number(&first.try_recv().unwrap()), 1);
        // The first one works on it from here on, and never comes again.
        let second = world.sleeper();
        let events = Loop::new(way, &second, &world.stop);
        world.send(1, 2);
        assert!(events.wait(PATIENCE), "{way:?}");
        assert_eq!(drain(&second), [2]);
    }
}

#[test]
fn an_event_loop_hears_of_what_a_blocking_worker_leaves() {
    for way in WAYS {
        let world = World::new(1);
        let socket = world.sleeper();
        let events = Loop::new(way, &socket, &world.stop);
        world.send(0, 1);
        assert!(events.wait(PATIENCE));
        // Not all there is, as far as its program knows.
        assert_eq!(number(&socket.try_recv().unwrap()), 1);
        let (took, taken) = mpsc::channel();
        thread::scope(|scope| {
            let (finish, finished) = mpsc::channel::<()>();
            let world = &world;
            scope.spawn(move || {
                let worker = world.mux.socket().unwrap();
                let message = worker.recv().unwrap();
                took.send(number(&message)).unwrap();
                let _ = finished.recv_timeout(PATIENCE);
            });
            (&world.clients[0]).write_all(&[0, 2, 0, 2, 0, 2, 0, 3]).unwrap();
            assert_eq!(taken.recv_timeout(PATIENCE), Ok(2));
            assert!(events.wait(PATIENCE), "{way:?}: not told");
            let got = drain(&socket);
            assert_eq!(got, [3], "{way:?}");
            drop(finish);
        });
    }
}

#[test]
fn blocking_workers_and_event_loops_share_messages() {
    const MESSAGES: u16 = 500;
    const BURST: u16 = 5;
    for takes in [Takes::All, Takes::One] {
        let world = World::new(3);
        let done = AtomicBool::new(false);
        let blocking = Mutex::new(Vec::new());
        thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    let socket = world.mux.socket().unwrap();
                    while !done.load(Ordering::SeqCst) {
                        match socket.recv_timeout(Duration::from_millis(20)) {
                            Ok(message) => blocking.lock().unwrap().push(number(&message)),
                            Err(error) => assert!(matches!(error, RecvError::TimedOut(_)), "{error}"),
                        }
                    }
                });
            }
            let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                with_loops(&world, &[Way::Level, Way::Level, Way::Poll], takes, |_, received| {
                    let mut got = Vec::new();
                    for start in (0..MESSAGES).step_by(usize::from(BURST)) {
                        (start..start + BURST).for_each(|at| world.send(usize::from(at) % 3, at));
                        let start = Instant::now();
                        let wanted = got.len() + usize::from(BURST);
                        while got.len() < wanted {
                            got.extend(received.try_iter());
                            got.append(&mut blocking.lock().unwrap());
                            assert!(start.elapsed() < PATIENCE, "{} of {wanted}", got.len());
                            thread::yield_now();
                        }
                    }
                    got.sort_unstable();
                    assert!(got.iter().copied().eq(0..MESSAGES), "{got:?}");
                });
            }));
            done.store(true, Ordering::SeqCst);
            result.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        });
    }
}

#[test]
fn the_end_of_the_multiplexor_reaches_every_event_loop() {
    let world = World::new(1);
    let sockets: Vec<_> = (0..3).map(|_| world.sleeper()).collect();
    world.mux.stop();
    for socket in &sockets {
        assert!(is_readable(socket));
        assert!(matches!(socket.try_recv(), Err(RecvError::Stopped)));
    }
}

#[test]
fn a_hundred_event_loops_can_share_connections() {
    // The kernel allows 100 paths of three sets to a file (path_limits in fs/eventpoll.c).
    const LOOPS: usize = 100;
    let world = World::new(1);
    let sockets: Vec<_> = (0..LOOPS).map(|_| world.sleeper()).collect();
    let loops: Vec<_> = sockets.iter().map(|socket| Loop::new(Way::Edge, socket, &world.stop)).collect();
    let (client, server) = UnixStream::pair().unwrap();
    world.mux.attach(server.into()).unwrap();
    (&client).write_all(&[0, 2, 0, 1]).unwrap();
    let told = loops.iter().filter(|events| events.wait(NOW)).count();
    assert!(told >= 1);
}
