//! A folder with very many entries, listed by READDIR and READDIRPLUS.

use std::collections::HashMap;
use std::fs;

use crate::common::{Attr, Client, Place, handle};
use ksf_proto::xdr::{XdrReader, XdrWrite};
use ksf_test::effort;

/// A reply to READDIR or READDIRPLUS.
struct Page {
    verifier: u64,
    /// Names and cookies.
    entries: Vec<(String, u64)>,
    eof: bool,
    /// Bytes of the results.
    bytes: usize,
}

/// What comes behind a cookie.
fn page(client: &mut Client, dir: &[u8], plus: bool, (cookie, verifier): (u64, u64), count: u32) -> Page {
    let mut args = handle(dir);
    args.put_u64(cookie);
    args.put_u64(verifier);
    if plus {
        args.put_u32(count);
    }
    args.put_u32(count);
    let rest = client.done(if plus { 17 } else { 16 }, &args);
    let mut r = XdrReader::new(&rest);
    assert!(Attr::read_option(&mut r).is_some());
    let (verifier, mut entries) = (r.u64().unwrap(), Vec::new());
    while r.bool().unwrap() {
        r.u64().unwrap();
        let name = r.utf8(255).unwrap().to_owned();
        entries.push((name.clone(), r.u64().unwrap()));
        if plus {
            let has_attr = Attr::read_option(&mut r).is_some();
            let has_handle = r.option(|r| r.opaque(64)).unwrap().is_some();
            assert!(has_attr && has_handle || name == "..", "{name}");
        }
    }
    let eof = r.bool().unwrap();
    r.finish().unwrap();
    Page { verifier, entries, eof, bytes: rest.len() }
}

/// All entries in their order, and the verifier, which all pages have. `between` runs after each page.
fn list(client: &mut Client, dir: &[u8], plus: bool, mut between: impl FnMut()) -> (Vec<(String, u64)>, u64) {
    let (mut from, mut all) = ((0, 0), Vec::new());
    loop {
        let Page { verifier, entries, eof, .. } = page(client, dir, plus, from, 32 << 10);
        assert!(from.1 == 0 || from.1 == verifier, "the verifier changed after {} entries", all.len());
        all.extend(entries);
        if eof {
            return (all, verifier);
        }
        from = (all.last().expect("an entry at least").1, verifier);
        between();
    }
}

#[test]
fn each_of_very_many_entries_comes_once_and_from_every_cookie_the_listing_goes_on() {
    let place = Place::new();
    let count = effort(100_000, 1_000_000);
    (0..count).for_each(|number| drop(fs::File::create(place.path(&format!("stays {number}"))).unwrap()));
    let serving = place.serve();
    let (mut client, root) = serving.mount(&place.path(""));
    let (entries, verifier) = list(&mut client, &root, false, || ());
    assert_eq!(entries.len(), count + 2, "with '.' and '..'");
    // Where each name and each cookie is: there are as many of each as entries.
    let names: HashMap<&str, usize> = entries.iter().enumerate().map(|(at, entry)| (entry.0.as_str(), at)).collect();
    let cookies: HashMap<u64, usize> = entries.iter().enumerate().map(|(at, entry)| (entry.1, at)).collect();
    assert_eq!((names.len(), cookies.len()), (entries.len(), entries.len()));
    assert!((0..count).all(|number| names.contains_key(format!("stays {number}").as_str())));

    // From every cookie, of which `make test` tries some.
    let next_of = |client: &mut Client, at: usize| {
        let page = page(client, &root, false, (entries[at].1, verifier), 1024);
        assert_eq!(page.verifier, verifier);
        assert_eq!(page.entries.is_empty(), page.eof && at + 1 == entries.len(), "behind entry {at}");
        page.entries.into_iter().map(|entry| entry.0).find(|name| names.contains_key(name.as_str()))
    };
    let every = |stride: usize| (0..entries.len()).step_by(stride).chain([entries.len() - 1]);
    for at in every(effort(311, 1)) {
        assert_eq!(next_of(&mut client, at).as_ref(), entries.get(at + 1).map(|next| &next.0), "behind entry {at}");
    }

    // The folder grows while it is listed: what stays comes once, what is new at most once.
    let mut grown = 0;
    let (more, _) = list(&mut client, &root, true, || {
        grown += 1;
        fs::write(place.path(&format!("new {grown}")), "").unwrap();
    });
    let mut times: HashMap<&str, usize> = HashMap::new();
    more.iter().for_each(|entry| *times.entry(entry.0.as_str()).or_default() += 1);
    assert!(grown > 10 && times.values().all(|times| *times == 1), "{grown} pages");
    assert!(names.keys().all(|name| times.contains_key(name)));
    // And the cookies of before lead to where they led.
    for at in every(count / 100).filter(|at| at + 1 < entries.len()) {
        let next = next_of(&mut client, at);
        assert!(next.is_none_or(|next| next == entries[at + 1].0), "behind entry {at}");
    }
    serving.stop();
}

#[test]
fn a_reply_has_at_most_the_preferred_bytes_whatever_is_asked_for() {
    let place = Place::new();
    (0..3000).for_each(|number| drop(fs::File::create(place.path(&number.to_string())).unwrap()));
    let serving = place.serve();
    let (mut client, root) = serving.mount(&place.path(""));
    for plus in [false, true] {
        let Page { entries, eof, bytes, .. } = page(&mut client, &root, plus, (0, 0), 1 << 20);
        assert!(!eof && bytes <= 64 << 10, "{} entries in {bytes} bytes", entries.len());
        // It is as long as it may be.
        assert!(bytes > 63 << 10, "{} entries in {bytes} bytes", entries.len());
        assert_eq!(list(&mut client, &root, plus, || ()).0.len(), 3000 + 2);
    }
    serving.stop();
}
