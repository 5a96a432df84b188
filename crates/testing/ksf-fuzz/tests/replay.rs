//! Replays the corpora of `fuzz/`, whole, cut short, and with bytes changed, so
//! that every target runs in an ordinary test as well.

use std::fs;
use std::path::Path;

use ksf_fuzz::{TARGETS, nfs_calls, ninep_requests};
use ksf_test::{Random, TestRandom, effort};

fn corpus(target: &str) -> Vec<(String, Vec<u8>)> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../fuzz/corpus").join(target);
    let entries = fs::read_dir(&dir).unwrap_or_else(|error| panic!("{}: {error}", dir.display()));
    let mut files: Vec<_> = entries
        .map(|entry| {
            let path = entry.unwrap().path();
            (path.display().to_string(), fs::read(&path).unwrap())
        })
        .collect();
    files.sort();
    files
}

#[test]
fn every_target_has_a_corpus_and_a_wrapper() {
    let fuzz = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../fuzz");
    let manifest = fs::read_to_string(fuzz.join("Cargo.toml")).unwrap();
    for (name, _) in TARGETS {
        assert!(!corpus(name).is_empty(), "{name} has no corpus");
        assert!(fuzz.join(format!("fuzz_targets/{name}.rs")).exists(), "{name} has no wrapper");
        assert!(manifest.contains(&format!("name = \"{name}\"")), "{name} is not in fuzz/Cargo.toml");
    }
    for (what, count) in [("fuzz_targets", TARGETS.len()), ("corpus", TARGETS.len())] {
        assert_eq!(fs::read_dir(fuzz.join(what)).unwrap().count(), count, "{what} has one too many");
    }
}

#[test]
fn corpora() {
    for (name, check) in TARGETS {
        for (file, bytes) in corpus(name) {
            println!("{file}");
            check(&bytes);
        }
    }
}

#[test]
fn corpora_cut_short() {
    for (name, check) in TARGETS {
        for (file, bytes) in corpus(name) {
            println!("{file}");
            for len in (0..bytes.len().min(512)).step_by(effort(3, 1)) {
                check(&bytes[..len]);
            }
        }
    }
}

#[test]
fn mutants_of_the_corpora() {
    for (name, check) in TARGETS {
        let files = corpus(name);
        for (at, (file, bytes)) in files.iter().enumerate() {
            println!("{file}");
            let (_, other) = &files[(at + 1) % files.len()];
            // Always the same ones: a finding can be repeated.
            for seed in 1..=effort(60, 300) {
                check(&mutant(bytes, other, seed));
            }
        }
    }
}

/// Sequences of calls that no corpus has.
#[test]
fn random_calls_of_nfs() {
    random_inputs(nfs_calls, Random::of_test(28));
}

#[test]
fn random_requests_of_9p() {
    random_inputs(ninep_requests, Random::of_test(29));
}

fn random_inputs(check: fn(&[u8]), mut random: TestRandom) {
    for _ in 0..effort(1_500, 500_000) {
        let length = random.within(8..=400);
        check(&(0..length).map(|_| random.bits() as u8).collect::<Vec<_>>());
    }
}

/// A copy with some bytes changed, removed, doubled, or followed by another file.
fn mutant(bytes: &[u8], other: &[u8], seed: u32) -> Vec<u8> {
    // Xorshift (Marsaglia 2003).
    let mut state = seed.wrapping_mul(0x9e37_79b1) | 1;
    let mut next = |limit: usize| {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state as usize % limit.max(1)
    };
    let mut mutant = bytes.to_vec();
    for _ in 0..=next(4) {
        let at = next(mutant.len());
        match next(6) {
            0 => mutant.extend_from_slice(other),
            1 => mutant.truncate(at),
            2 => mutant.insert(at, next(256) as u8),
            _ if mutant.is_empty() => {}
            3 => mutant[at] ^= 1 << next(8),
            4 => mutant[at] = [0, 1, 0x7f, 0x80, 0xff][next(5)],
            _ => {
                let end = (at + 1 + next(16)).min(mutant.len());
                mutant.extend_from_within(at..end);
            }
        }
    }
    mutant
}
