//! Real connections over a veth: replies are processed on the CPU that opened the connection.

use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::thread;

use super::common::*;
use ksf_accel::flow::{CpuMask, FlowError, Layout, Mode, ModeWish, Policy, PortRange, Proof, Steering, Trial};
use ksf_test::{NEAR, PATIENCE, in_new_network, ip, on_cpu, pin, wait_until};

const CONNECTIONS: usize = 20;

fn layout(cpus: [usize; 2]) -> Layout {
    let cpus: CpuMask = cpus.into_iter().collect();
    Layout::new(PortRange::of_this_network().unwrap(), &cpus).unwrap()
}

/// Opens connections on `cpu` and exchanges something over each: how many replies were processed there, and how many
/// connections have a port of its chunk.
fn opened_on(cpu: usize, layout: &Layout, to: &str) -> (usize, usize) {
    let to: SocketAddr = to.parse().unwrap();
    on_cpu(cpu, || {
        let (mut local, mut chosen) = (0, 0);
        for round in 0..CONNECTIONS {
            let socket = tcp_socket(&to);
            connect_by_library(layout, false, socket.as_raw_fd(), &to).expect("the peer answers");
            let mut stream = TcpStream::from(socket);
            // From one byte to several segments.
            exchange(&mut stream, 1 + 300 * round);
            local += usize::from(incoming_cpu(&stream) == cpu);
            chosen += usize::from(layout.cpu_of_port(stream.local_addr().unwrap().port()) == Some(cpu));
        }
        (local, chosen)
    })
}

/// Opens connections on a CPU that the peer does not run on until one of them is told that the peer's CPU processed its
/// reply. Without steering that is the rule. It is not so each time: a reply that arrives while its socket is in use is
/// kept until the socket is free, and this CPU processes it then, as it does what the acknowledgement of ours sets off.
fn assert_the_senders_cpu_processes(cpu: usize, layout: &Layout) {
    wait_until("another CPU processes a reply", || {
        let (local, chosen) = opened_on(cpu, layout, ECHO4);
        assert_eq!(chosen, CONNECTIONS);
        local < CONNECTIONS
    });
}

fn frames_steered(steering: &Steering) -> u64 {
    steering.targets().unwrap().iter().map(|(_, frames)| frames).sum()
}

fn counter(steering: &Steering, name: &str) -> u64 {
    steering.counters().unwrap().iter().find(|counter| counter.name == name).expect("a counter").total()
}

/// The peer runs on the second CPU, and a veth's receiver where its sender runs: so without steering every reply is
/// processed on the second CPU.
fn with_peer(cpus: [usize; 2], checksum_offload: bool, test: impl FnOnce() + Send) {
    in_new_network(|| {
        // Threads of the peer inherit it.
        pin(cpus[1]);
        let peer = start_peer(checksum_offload);
        test();
        drop(peer);
    });
}

#[test]
fn without_steering_the_senders_cpu_does_all() {
    let Some(cpus) = root_on_two_cpus() else { return };
    with_peer(cpus, true, || {
        let layout = layout(cpus);
        assert_the_senders_cpu_processes(cpus[0], &layout);
        assert_eq!(opened_on(cpus[1], &layout, ECHO4), (CONNECTIONS, CONNECTIONS));
    });
}

#[test]
fn replies_are_processed_where_the_connection_was_opened() {
    let Some(cpus) = root_on_two_cpus() else { return };
    for (wish, offload, mode) in [
        (ModeWish::Auto, false, Mode::Native),
        (ModeWish::Native, false, Mode::Native),
        (ModeWish::Generic, true, Mode::Generic),
        (ModeWish::Generic, false, Mode::Generic),
    ] {
        with_peer(cpus, offload, || {
            let layout = layout(cpus);
            let mut steering = Steering::load(&layout, &[Policy::Ports]).unwrap();
            assert_eq!(steering.attach(NEAR.0, wish).unwrap(), mode);
            for to in [ECHO4, ECHO6] {
                for cpu in cpus {
                    assert_eq!(opened_on(cpu, &layout, to), (CONNECTIONS, CONNECTIONS), "{wish:?}, CPU {cpu}, {to}");
                }
            }
            assert_eq!(steering.settle().unwrap(), None);
            let proof = if mode == Mode::Native { Proof::Whole } else { Proof::NotNeeded };
            assert_eq!(steering.proof().unwrap(), proof);
            assert!(counter(&steering, "redirected") >= CONNECTIONS as u64);
            assert!(counter(&steering, "local") >= CONNECTIONS as u64);
            let targets = steering.targets().unwrap();
            assert_eq!(targets.iter().map(|(cpu, _)| *cpu).collect::<Vec<_>>(), cpus);
            assert!(targets.iter().all(|(_, frames)| *frames >= 2 * CONNECTIONS as u64), "{targets:?}");
            // And back.
            steering.detach();
            let steered = frames_steered(&steering);
            assert_the_senders_cpu_processes(cpus[0], &layout);
            assert_eq!(frames_steered(&steering), steered, "a program that is detached sees no frame");
        });
    }
}

/// A veth whose peer leaves checksums to the device, which is how every veth is made: in native mode a redirected frame
/// would be dropped by the stack. No connection may notice.
#[test]
fn a_veth_is_steered_behind_the_driver_and_loses_nothing() {
    let Some(cpus) = root_on_two_cpus() else { return };
    with_peer(cpus, true, || {
        let layout = layout(cpus);
        // A connection from before, whose first frame is long.
        let mut old = TcpStream::connect(ECHO4).unwrap();
        let mut steering = Steering::load(&layout, &[Policy::Ports, Policy::Hash]).unwrap();
        assert_eq!(steering.attach(NEAR.0, ModeWish::Auto).unwrap(), Mode::Native);
        exchange(&mut old, 3000);
        // Native mode says that it cannot, and all work.
        for cpu in cpus {
            assert_eq!(opened_on(cpu, &layout, ECHO4).1, CONNECTIONS);
        }
        assert_eq!(steering.proof().unwrap(), Proof::Broken);
        assert_eq!(counter(&steering, "redirected"), 0);

        assert_eq!(steering.settle().unwrap(), Some(Mode::Generic));
        assert_eq!(steering.mode(), Some(Mode::Generic));
        assert_eq!(steering.settle().unwrap(), None);
        exchange(&mut old, 3000);
        for cpu in cpus {
            assert_eq!(opened_on(cpu, &layout, ECHO4), (CONNECTIONS, CONNECTIONS), "CPU {cpu}");
        }
        exchange(&mut old, 100_000);
    });
}

#[test]
fn who_wants_native_mode_only_gets_no_other() {
    let Some(cpus) = root_on_two_cpus() else { return };
    with_peer(cpus, true, || {
        let layout = layout(cpus);
        let mut steering = Steering::load(&layout, &[Policy::Ports]).unwrap();
        steering.attach(NEAR.0, ModeWish::Native).unwrap();
        assert_the_senders_cpu_processes(cpus[0], &layout);
        assert_eq!(counter(&steering, "redirected"), 0);
        assert_eq!(steering.settle().unwrap(), None);
        assert_eq!((steering.mode(), steering.proof().unwrap()), (Some(Mode::Native), Proof::Broken));
    });
}

#[test]
fn somebody_elses_program_is_left_alone() {
    let Some(cpus) = network_on_two_cpus() else { return };
    ip("link add near type veth peer name far");
    let layout = layout(cpus);
    for (theirs, ours) in [
        (ModeWish::Native, ModeWish::Auto),
        (ModeWish::Native, ModeWish::Native),
        (ModeWish::Generic, ModeWish::Auto),
        (ModeWish::Generic, ModeWish::Generic),
    ] {
        let mut other = Steering::load(&layout, &[Policy::Pass]).unwrap();
        let mode = other.attach("near", theirs).unwrap();
        let mut steering = Steering::load(&layout, &[Policy::Ports]).unwrap();
        let error = steering.attach("near", ours).unwrap_err();
        let FlowError::Busy { interface, program } = &error else { panic!("{theirs:?}, {ours:?}: {error}") };
        assert_eq!(interface, "near");
        assert!(program.starts_with("ksf_flow (id "), "{program}");
        assert_eq!((steering.mode(), other.mode()), (None, Some(mode)));
        // It is still there, and its end makes room.
        assert!(matches!(steering.attach("near", ours), Err(FlowError::Busy { .. })));
        drop(other);
        // Who lists the links of the machine holds each of them for a moment, as other tests do: it ends with that.
        wait_until("there is room", || {
            let attached = steering.attach("near", ours);
            assert!(matches!(attached, Ok(_) | Err(FlowError::Busy { .. })), "{attached:?}");
            attached.is_ok()
        });
    }
    let mut steering = Steering::load(&layout, &[]).unwrap();
    for name in ["nosuch", "", "a\0b"] {
        let error = steering.attach(name, ModeWish::Auto).unwrap_err();
        assert!(matches!(error, FlowError::NoInterface { .. }), "{error}");
    }
}

#[test]
fn lo_is_steered_in_generic_mode() {
    let Some(cpus) = network_on_two_cpus() else { return };
    let layout = layout(cpus);
    let mut steering = Steering::load(&layout, &[Policy::Hash]).unwrap();
    assert_eq!(steering.attach("lo", ModeWish::Auto).unwrap(), Mode::Generic, "lo has no native mode");
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (mut server, _) = listener.accept().unwrap();
    let echo = thread::spawn(move || io::copy(&mut server.try_clone().unwrap(), &mut server));
    exchange(&mut client, 100_000);
    drop(client);
    echo.join().unwrap().unwrap();
    assert!(counter(&steering, "redirected") + counter(&steering, "local") > 0);
}

#[test]
fn a_refused_connection_is_refused() {
    let Some(cpus) = root_on_two_cpus() else { return };
    with_peer(cpus, false, || {
        let layout = layout(cpus);
        let mut steering = Steering::load(&layout, &[Policy::Ports]).unwrap();
        steering.attach(NEAR.0, ModeWish::Native).unwrap();
        let to: SocketAddr = CLOSED.parse().unwrap();
        let socket = tcp_socket(&to);
        let error = connect_by_library(&layout, false, socket.as_raw_fd(), &to).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
    });
}

/// The self-check: a real connection from each CPU.
#[test]
fn a_trial_says_where_answers_are_processed() {
    let Some(cpus) = root_on_two_cpus() else { return };
    for (offload, mode) in [(false, Mode::Native), (true, Mode::Generic)] {
        with_peer(cpus, offload, || {
            let layout = layout(cpus);
            // Of the thread of the peer.
            rustix::thread::sched_setaffinity(None, &{
                let mut both = rustix::thread::CpuSet::new();
                cpus.iter().for_each(|&cpu| both.set(cpu));
                both
            })
            .unwrap();
            let mut steering = Steering::load(&layout, &[Policy::Ports]).unwrap();
            steering.attach(NEAR.0, ModeWish::Auto).unwrap();
            let trials = steering.prove(ECHO4.parse().unwrap(), PATIENCE).unwrap();
            assert_eq!(trials.iter().map(|trial| trial.cpu).collect::<Vec<_>>(), cpus);
            assert!(trials.iter().all(Trial::is_local), "{trials:?}");
            assert_eq!(steering.mode(), Some(mode));

            let refused = steering.prove(CLOSED.parse().unwrap(), PATIENCE).unwrap();
            assert!(refused.iter().all(|trial| trial.processed_on.is_err()), "{refused:?}");
            assert_eq!(steering.mode(), Some(Mode::Generic), "a failure is blamed on native mode first");
            // Without steering the peer's CPU processes both. Not seen each time: its end may meet, on its way into the
            // socket, the acknowledgement of ours, which this CPU processes; the later one leaves its CPU's number.
            steering.detach();
            wait_until("the peer's CPU processes both", || {
                let trials = steering.prove(ECHO6.parse().unwrap(), PATIENCE).unwrap();
                trials.iter().map(Trial::is_local).eq([false, true])
            });
        });
    }
}
