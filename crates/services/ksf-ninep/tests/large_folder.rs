//! A folder with very many entries, listed by Treaddir.

use std::collections::HashMap;
use std::fs;

use crate::common::{Client, Place, ROOT};
use ksf_proto::p9::Request;
use ksf_test::effort;

/// Names and offsets of the folder that is open as fid 1, in their order. `between` runs after each piece.
fn list(client: &mut Client, mut between: impl FnMut(&mut Client, &str)) -> Vec<(String, u64)> {
    let (mut from, mut all) = (0, Vec::new());
    loop {
        let piece = client.list(1, from, 32 << 10).unwrap();
        let Some((last, offset, _)) = piece.last() else { return all };
        from = *offset;
        between(client, last);
        all.extend(piece.into_iter().map(|(name, offset, _)| (name, offset)));
    }
}

#[test]
fn each_of_very_many_entries_comes_once_and_from_every_offset_the_listing_goes_on() {
    let place = Place::new();
    let count = effort(100_000, 1_000_000);
    (0..count).for_each(|number| drop(fs::File::create(place.path(&format!("stays {number}"))).unwrap()));
    let serving = place.serve();
    let mut client = serving.client();
    client.open(1, "", 0).unwrap();
    let entries = list(&mut client, |_, _| ());
    assert_eq!(entries.len(), count + 2, "with '.' and '..'");
    let names: HashMap<&str, usize> = entries.iter().enumerate().map(|(at, entry)| (entry.0.as_str(), at)).collect();
    assert_eq!(names.len(), entries.len());
    assert!((0..count).all(|number| names.contains_key(format!("stays {number}").as_str())));

    // From every offset, of which `make test` tries some.
    for at in (0..entries.len()).step_by(effort(311, 1)).chain([entries.len() - 1]) {
        let next = client.list(1, entries[at].1, 1024).unwrap();
        let wanted = entries.get(at + 1).map(|next| next.0.as_str());
        assert_eq!(next.first().map(|(name, ..)| name.as_str()), wanted, "behind entry {at}");
    }

    // Names are made and removed while they are listed, among them those by whose offset the listing goes on: what stays comes once.
    let (mut pieces, mut removed) = (0, Vec::new());
    let more = list(&mut client, |client, last| {
        pieces += 1;
        fs::write(place.path(&format!("new {pieces}")), "").unwrap();
        if last.starts_with("stays") {
            client.does(Request::Unlinkat { dirfid: ROOT, name: last.as_bytes(), flags: 0 }).unwrap();
            removed.push(last.to_owned());
        }
    });
    let mut times: HashMap<&str, usize> = HashMap::new();
    more.iter().for_each(|entry| *times.entry(entry.0.as_str()).or_default() += 1);
    assert!(removed.len() > 10 && times.values().all(|times| *times == 1), "{pieces} pieces");
    assert!(names.keys().all(|name| times.contains_key(name)));
    let rest = list(&mut client, |_, _| ());
    assert_eq!(rest.len(), entries.len() - removed.len() + pieces);
    assert!(removed.iter().all(|gone| rest.iter().all(|(name, _)| name != gone)));

    // All are removed while they are listed, as `rm -r` does; in the gate the most of them before, here.
    let here =
        rest.iter().map(|(name, _)| name).filter(|name| name.starts_with("stays")).take(effort(count * 4 / 5, 0));
    let removed_here = here.map(|name| fs::remove_file(place.path(name)).unwrap()).count();
    let mut left = rest.len() - 2 - removed_here;
    client.walk(ROOT, 2, "").unwrap();
    list_and_remove(&mut client, &mut left);
    assert_eq!((left, fs::read_dir(place.path("")).unwrap().count()), (0, 0));
    serving.stop();
}

/// Lists the folder that is open as fid 1, and removes what each piece names before the next one.
fn list_and_remove(client: &mut Client, left: &mut usize) {
    let mut from = 0;
    loop {
        let piece = client.list(1, from, 32 << 10).unwrap();
        let Some((_, offset, _)) = piece.last() else { return };
        from = *offset;
        for (name, ..) in piece.iter().filter(|(name, ..)| name != "." && name != "..") {
            client.does(Request::Unlinkat { dirfid: 2, name: name.as_bytes(), flags: 0 }).unwrap();
            *left -= 1;
        }
    }
}
