use ksf_proto::oncrpc::{AuthSys, NFS_PROGRAM};

use super::*;

const CLIENT: &str = "192.0.2.7:700";

fn client() -> ClientAddress {
    ClientAddress::of_stream(CLIENT.parse().unwrap())
}

fn call(xid: u32, args: &[u8]) -> Call<'_> {
    Call { xid, program: NFS_PROGRAM, version: 3, procedure: 12, credential: Credential::None, args }
}

fn started(begun: Begun<u32>) -> Ticket<u32> {
    match begun {
        Begun::Started(ticket, _) => ticket,
        other => panic!("{other:?}"),
    }
}

#[track_caller]
fn is_replay(begun: &Begun<u32>, way: u32, results: &[u8]) {
    assert!(matches!(begun, Begun::Replay(known, reply) if *known == way && **reply == *results), "{begun:?}");
}

#[test]
fn a_second_try_gets_the_reply_to_the_first() {
    let drc = Drc::new(DrcLimits::default());
    let (first, second) = (Origin::new(), Origin::new());
    let key = drc.key(client(), &call(1, b"args"));
    let ticket = started(drc.begin(key, &first, true, 0, 1));
    assert!(ticket.end(b"done", 5).is_empty());
    is_replay(&drc.begin(key, &first, true, 6, 2), 2, b"done");
    is_replay(&drc.begin(key, &second, true, 6, 3), 3, b"done");
    assert_eq!(drc.sizes().entries, 1);
}

#[test]
fn calls_that_differ_in_the_middle_of_long_arguments_are_not_one() {
    let drc = Drc::<u32>::new(DrcLimits::default());
    // A RENAME with two long names has the handle of its target directory in the middle.
    let (one, mut other) = ([7; 592], [7; 592]);
    other[300] = 8;
    assert_ne!(drc.key(client(), &call(1, &one)), drc.key(client(), &call(1, &other)));
}

#[test]
fn what_runs_is_not_run_twice_and_no_try_of_it_is_refused() {
    let drc = Drc::new(DrcLimits::default());
    let origins: Vec<Origin> = (0..10).map(|_| Origin::new()).collect();
    let key = drc.key(client(), &call(1, b"args"));
    let ticket = started(drc.begin(key, &origins[0], true, 0, 0));
    for round in 0..100 {
        let begun = drc.begin(key, &origins[round % 10], true, 0, round as u32);
        assert!(matches!(begun, Begun::Waits), "{begun:?}");
    }
    // Connections that have ended do not count.
    for way in 100..200 {
        let begun = drc.begin(key, &Origin::new(), true, 0, way);
        assert!(matches!(begun, Begun::Waits), "{begun:?}");
    }
    let waiting = ticket.end(b"done", 0);
    assert_eq!(waiting, (0..100).collect::<Vec<_>>());
    is_replay(&drc.begin(key, &origins[0], true, 0, 5), 5, b"done");
}

#[test]
fn tries_that_wait_cost_the_same_however_many_there_are_and_go_with_their_connections() {
    for count in [100, 10_000] {
        let (mut waiting, stays) = (Waiting::default(), Origin::new());
        let mut origins: VecDeque<Origin> = (0..count).map(|_| Origin::new()).collect();
        let mut looked_at: usize = origins.iter().map(|origin| waiting.add(origin, 0)).sum();
        for _ in 0..count {
            // One ends for each that comes.
            origins.pop_front();
            looked_at += waiting.add(&stays, 1);
        }
        for _ in 0..10 * count {
            looked_at += waiting.add(&Origin::new(), 2);
        }
        assert!(waiting.0.len() <= 4 * count, "{} wait after {count}", waiting.0.len());
        assert!(looked_at <= 4 * 12 * count, "{looked_at} looked at by {} tries", 12 * count);
        assert_eq!(waiting.end(), vec![1; count]);
    }
}

#[test]
fn what_a_nameless_client_has_under_way_is_neither_run_nor_refused_for_another_connection() {
    let drc = Drc::new(DrcLimits::default());
    let (first, second) = (Origin::new(), Origin::new());
    let key = drc.key(client(), &call(1, b"args"));
    let ticket = started(drc.begin(key, &first, false, 0, 1));
    assert!(matches!(drc.begin(key, &second, false, 0, 2), Begun::Foreign(2)));
    assert!(matches!(drc.begin(key, &first, false, 0, 3), Begun::Waits));
    assert_eq!(ticket.end(b"first", 0), [3]);
}

#[test]
fn writes_do_not_push_out_the_replies_that_tell_of_a_remove() {
    let drc = Drc::new(DrcLimits::default());
    let origin = Origin::new();
    let remove = drc.key(client(), &call(1, b"args"));
    started(drc.begin(remove, &origin, true, 0, 0)).end(b"removed", 0);
    for xid in 2..100_002 {
        let write = drc.key(client(), &Call { procedure: 7, ..call(xid, b"data") });
        started(drc.begin(write, &origin, true, 0, 0)).end(&[0; 136], 0);
    }
    is_replay(&drc.begin(remove, &origin, true, 0, 1), 1, b"removed");
    assert!(drc.sizes().entries > 8000, "{:?}", drc.sizes());
    // Where there is nothing but others, the oldest of them go.
    for xid in 100_002..200_002 {
        let other = drc.key(client(), &call(xid, b"args"));
        started(drc.begin(other, &origin, true, 0, 0)).end(b"removed", 0);
    }
    assert!(matches!(drc.begin(remove, &origin, true, 0, 1), Begun::Started(..)));
}

#[test]
fn a_client_that_sends_much_does_not_push_out_the_replies_to_others() {
    let drc = Drc::new(DrcLimits::default());
    let origin = Origin::new();
    let quiet = ClientAddress::of_stream("192.0.2.8:700".parse().unwrap());
    let keys: Vec<RequestKey> = (0..1000).map(|xid| drc.key(quiet, &call(xid, b"args"))).collect();
    for key in &keys {
        started(drc.begin(*key, &origin, true, 0, 0)).end(b"quiet", 0);
    }
    for xid in 0..100_000 {
        let key = drc.key(client(), &call(xid, b"args"));
        started(drc.begin(key, &origin, true, 0, 0)).end(b"loud", 0);
    }
    for key in &keys {
        is_replay(&drc.begin(*key, &origin, true, 0, 1), 1, b"quiet");
    }
}

#[test]
fn requests_under_way_neither_keep_others_from_beginning_nor_push_out_replies() {
    let drc = Drc::new(DrcLimits::default());
    let origin = Origin::new();
    let address = |number| ClientAddress::of_stream(SocketAddr::new([192, 0, 2, number].into(), 700));
    let begin = |client, xid| drc.begin(drc.key(client, &call(xid, b"hang")), &origin, true, 0, xid);
    started(begin(address(1), 0)).end(b"kept", 0);
    let hanging: Vec<_> =
        (1..20_000).flat_map(|xid| [2, 3].map(|number| started(begin(address(number), xid)))).collect();
    let others: Vec<_> = (1..1000).map(|xid| started(begin(address(4), xid))).collect();
    is_replay(&begin(address(1), 0), 0, b"kept");
    // Each is found again.
    assert!((1..20_000).all(|xid| matches!(begin(address(2), xid), Begun::Waits)));
    assert_eq!(drc.sizes().under_way, hanging.len() + others.len());
    // When they have ended, the bounds of replies hold.
    for ticket in hanging.into_iter().chain(others) {
        ticket.end(b"done", 0);
    }
    let (sizes, limits) = (drc.sizes(), DrcLimits::default());
    assert!(
        sizes.under_way == 0 && sizes.entries <= limits.entries_max && sizes.bytes <= limits.bytes_max,
        "{sizes:?}"
    );
    is_replay(&begin(address(1), 0), 0, b"kept");
}

#[test]
fn each_part_of_a_call_tells_it_from_others() {
    let drc = Drc::<u32>::new(DrcLimits::default());
    let groups = ksf_test::rpc::words(&[9, 4, u32::from_be_bytes(*b"host"), 1000, 100, 1, 7]);
    let sys = |stamp: u32, uid: u32| {
        let mut body = groups.clone();
        body[..4].copy_from_slice(&stamp.to_be_bytes());
        body[12..16].copy_from_slice(&uid.to_be_bytes());
        body
    };
    let key = |client: ClientAddress, call: &Call<'_>| drc.key(client, call);
    let plain = key(client(), &call(1, b"args"));
    assert_eq!(plain, key(client(), &call(1, b"args")));
    assert_eq!(plain, key(ClientAddress::of_stream("192.0.2.7:701".parse().unwrap()), &call(1, b"args")));
    assert_ne!(plain, key(ClientAddress::of_stream("192.0.2.8:700".parse().unwrap()), &call(1, b"args")));
    assert_ne!(plain, key(client(), &call(2, b"args")));
    assert_ne!(plain, key(client(), &call(1, b"argt")));
    assert_ne!(plain, key(client(), &Call { procedure: 13, ..call(1, b"args") }));
    let of_user = |stamp, uid| {
        let body = sys(stamp, uid);
        let credential = Credential::Sys(AuthSys::parse(&body).unwrap());
        key(client(), &Call { credential, ..call(1, b"args") })
    };
    assert_eq!(of_user(1, 1000), of_user(2, 1000), "a stamp is any number");
    assert_ne!(of_user(1, 1000), of_user(1, 1001));
    assert_ne!(of_user(1, 1000), plain);
    // Every byte of long arguments, and their length, also of a WRITE.
    let long = vec![1; 1000];
    for procedure in [Procedure::Write, Procedure::Rename] {
        let key_of = |args: &[u8]| key(client(), &Call { procedure: procedure as u32, ..call(1, args) });
        let whole = key_of(&long);
        assert_eq!(whole, key_of(&long.clone()));
        assert_ne!(whole, key_of(&long[..999]));
        for at in 0..long.len() {
            let mut args = long.clone();
            args[at] = 2;
            assert_ne!(whole, key_of(&args), "byte {at} of {procedure:?}");
        }
    }
}

#[test]
fn a_client_without_a_name_gets_no_reply_of_a_connection_that_is_open() {
    let drc = Drc::new(DrcLimits::default());
    let (first, second) = (Origin::new(), Origin::new());
    let key = drc.key(client(), &call(1, b"args"));
    started(drc.begin(key, &first, false, 0, 1)).end(b"first", 0);
    // The other client is carried out, and its reply stands in the place.
    started(drc.begin(key, &second, false, 0, 2)).end(b"second", 0);
    is_replay(&drc.begin(key, &second, false, 0, 3), 3, b"second");
    drop(second);
    is_replay(&drc.begin(key, &first, false, 0, 4), 4, b"second");
}

#[test]
fn what_was_not_carried_out_is_tried_again() {
    let drc = Drc::new(DrcLimits::default());
    let (first, second) = (Origin::new(), Origin::new());
    let key = drc.key(client(), &call(1, b"args"));
    let ticket = started(drc.begin(key, &first, true, 0, 1));
    assert!(matches!(drc.begin(key, &second, true, 0, 2), Begun::Waits));
    assert_eq!(ticket.forget(), [2]);
    // A task that panicked drops its ticket.
    drop(started(drc.begin(key, &second, true, 0, 3)));
    started(drc.begin(key, &second, true, 0, 4)).end(b"done", 0);
    assert_eq!(drc.sizes(), DrcSizes { entries: 1, under_way: 0, bytes: ENTRY_BYTES + 4 });
}

#[test]
fn old_replies_go_and_what_is_under_way_stays() {
    let limits = DrcLimits { entries_max: STRIPES, bytes_max: STRIPES * (ENTRY_BYTES + 100), age_max_ms: 1000 };
    let drc = Drc::new(limits);
    let origin = Origin::new();
    let keys: Vec<RequestKey> = (0..1000).map(|xid| drc.key(client(), &call(xid, b"args"))).collect();
    // None that is under way is refused or given up, and one reply in each part stays.
    let tickets: Vec<_> = keys.iter().map(|key| started(drc.begin(*key, &origin, true, 0, 0))).collect();
    assert_eq!(drc.sizes(), DrcSizes { entries: 1000, under_way: 1000, bytes: 1000 * ENTRY_BYTES });
    for ticket in tickets {
        ticket.end(&[0; 100], 0);
    }
    assert_eq!(drc.sizes(), DrcSizes { entries: STRIPES, under_way: 0, bytes: limits.bytes_max });
    // Replies make room, and too long ones do not stay.
    for key in &keys[500..] {
        if let Begun::Started(ticket, _) = drc.begin(*key, &origin, true, 500, 0) {
            ticket.end(&[0; 101], 500);
        }
    }
    let sizes = drc.sizes();
    assert!(sizes.under_way == 0 && sizes.bytes <= limits.bytes_max, "{sizes:?}");
    // After their time they go.
    let key = keys[0];
    if let Begun::Started(ticket, _) = drc.begin(key, &origin, true, 500, 0) {
        ticket.end(b"x", 500);
    }
    is_replay(&drc.begin(key, &origin, true, 1500, 7), 7, b"x");
    let again = drc.begin(key, &origin, true, 1501, 7);
    assert!(matches!(again, Begun::Started(..)), "{again:?}");
}

#[test]
fn a_panic_does_not_lock_the_cache() {
    let drc = Drc::new(DrcLimits::default());
    let origin = Origin::new();
    let key = drc.key(client(), &call(1, b"args"));
    let ticket = started(drc.begin(key, &origin, true, 0, 1));
    let panicked = std::thread::spawn(move || {
        let _ticket = ticket;
        panic!("of the test");
    });
    assert!(panicked.join().is_err());
    started(drc.begin(key, &origin, true, 0, 2)).end(b"done", 0);
}
