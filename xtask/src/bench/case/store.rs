//! Key-value servers: store.
//!
//! Not every size is measured with every number of clients: a full matrix would take hours. Each value of each axis is there,
//! with what it changes most.
//!
//! ```text
//!   value bytes       64                     256    1024   1400
//!   clients           1  50  1000            50     100    50, HTTP: 1, 100
//!   in flight each    1, of 50 clients 16    16     1      1
//!   reads             none, all, 90 %        none   none   none
//! ```
//!
//! SET of 64 bytes by 50 clients is also measured unpinned. Starts over five million keys are left out for their time.

use super::super::contestant::Contestant::{
    self, HttpAppend, HttpNone, HttpSync, Redis, RedisAlways, RedisAlwaysThreads, RedisBenchmark, RedisEverysec,
    RedisThreads, Store, StoreBenchmark, StoreEpoll, StoreNone, StoreRoomy, StoreTmpfs,
};
use super::super::store::StoreLoad;
use super::{Case, Metric, ONE, Row, Service};

/// The case of the store with every way of Redis to be durable, which is also measured unpinned.
pub(crate) const STORE_MAIN: &str = "store-set-50";
const STORE_POST: &str = "store-post-100";

/// Those whose system calls are counted.
pub(super) const STORE_COUNTED: [&str; 2] = [STORE_MAIN, STORE_POST];

const STORE_SET: &[Contestant] = &[Store, RedisAlways, Redis];

static SET_64: StoreLoad = set(64);
static SET_256: StoreLoad = set(256);
static SET_1024: StoreLoad = set(1024);
static SET_1400: StoreLoad = set(1400);
static GET_64: StoreLoad = StoreLoad::Commands { gets: 1, sets: 0, value_bytes: 64 };
static MIXED_64: StoreLoad = StoreLoad::Commands { gets: 90, sets: 10, value_bytes: 64 };
static OVERWRITE_1024: StoreLoad = StoreLoad::Overwrite { value_bytes: 1024 };
static MILLION_KEYS: StoreLoad = StoreLoad::Keys { count: 1_000_000, value_bytes: 8 };
static LONG_VALUES: StoreLoad = StoreLoad::Keys { count: 200_000, value_bytes: 1400 };
/// What PASTE's slides show: requests of 1,400 bytes, answers of 64.
static POST_1400: StoreLoad = StoreLoad::Post { request_bytes: 1400 };

const fn set(value_bytes: u32) -> StoreLoad {
    StoreLoad::Commands { gets: 0, sets: 1, value_bytes }
}

/// Clients of a store, each with so many commands in flight.
const fn store(
    name: &'static str,
    title: &'static str,
    load: &'static StoreLoad,
    [connections, in_flight]: [u32; 2],
    contestants: &'static [Contestant],
) -> Case {
    Case {
        name,
        title,
        row: Row::Store,
        service: Service::Store(load),
        in_flight,
        connections,
        contestants,
        metric: Metric::MessagesPerS,
        ..ONE
    }
}

/// Keys that are written, and a start after them.
const fn keys(
    name: &'static str,
    title: &'static str,
    load: &'static StoreLoad,
    contestants: &'static [Contestant],
    metric: Metric,
) -> Case {
    Case { metric, ..store(name, title, load, [1, 1], contestants) }
}

pub(super) const CASES: &[Case] = &[
    store(
        STORE_MAIN,
        "SET of 64 bytes, 50 clients",
        &SET_64,
        [50, 1],
        &[Store, StoreEpoll, RedisAlways, RedisAlwaysThreads, RedisEverysec, Redis, RedisThreads],
    ),
    store("store-set-50-16", "SET of 64 bytes, 50 clients with 16 in flight", &SET_64, [50, 16], STORE_SET),
    store("store-set-1", "SET of 64 bytes, 1 client", &SET_64, [1, 1], STORE_SET),
    store("store-set-1000", "SET of 64 bytes, 1,000 clients", &SET_64, [1000, 1], STORE_SET),
    store("store-set-256-16", "SET of 256 bytes, 50 clients with 16 in flight", &SET_256, [50, 16], STORE_SET),
    store("store-set-1024-100", "SET of 1,024 bytes, 100 clients", &SET_1024, [100, 1], STORE_SET),
    store("store-set-1400", "SET of 1,400 bytes, 50 clients", &SET_1400, [50, 1], STORE_SET),
    store("store-get-50", "GET of 64 bytes, 50 clients", &GET_64, [50, 1], &[Store, Redis]),
    store("store-get-50-16", "GET of 64 bytes, 50 clients with 16 in flight", &GET_64, [50, 16], &[Store, Redis]),
    store("store-mixed-50", "GET and SET of 64 bytes, 90:10, 50 clients", &MIXED_64, [50, 1], STORE_SET),
    store(
        "store-generators",
        "SET of 64 bytes, 50 clients with 16 in flight, by two generators",
        &SET_64,
        [50, 16],
        &[RedisAlways, RedisBenchmark, StoreBenchmark],
    ),
    Case {
        metric: Metric::RttP99Us,
        ..store(
            "store-cleaning",
            "SET of 1,024 bytes, 50 clients, to keys that fill 70 % of the log",
            &OVERWRITE_1024,
            [50, 1],
            &[Store, StoreRoomy],
        )
    },
    keys(
        "store-keys",
        "A million keys of 8 bytes with values of 8 bytes, and a start after them",
        &MILLION_KEYS,
        &[Store, RedisAlways],
        Metric::RecoveredKeysPerS,
    ),
    keys(
        "store-keys-1400",
        "200,000 keys of 8 bytes with values of 1,400 bytes, and a start after them",
        &LONG_VALUES,
        &[Store],
        Metric::RecoveredBytesPerS,
    ),
    store(
        "store-post-1",
        "POST of 1,400 bytes, answers of 64, 1 connection",
        &POST_1400,
        [1, 1],
        &[HttpNone, HttpSync, StoreNone, StoreTmpfs, Store],
    ),
    store(
        STORE_POST,
        "POST of 1,400 bytes, answers of 64, 100 connections",
        &POST_1400,
        [100, 1],
        &[HttpNone, HttpAppend, HttpSync, StoreNone, StoreTmpfs, Store],
    ),
];

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn each_value_of_each_axis_is_measured() {
        let (mut sizes, mut mixes) = (BTreeSet::new(), BTreeSet::new());
        let (mut clients, mut depths) = (BTreeSet::new(), BTreeSet::new());
        for case in CASES {
            let Service::Store(StoreLoad::Commands { gets, sets, value_bytes }) = case.service else { continue };
            sizes.insert(*value_bytes);
            mixes.insert([*gets, *sets]);
            clients.insert(case.connections);
            depths.insert(case.in_flight);
        }
        assert_eq!(sizes, BTreeSet::from([64, 256, 1024, 1400]));
        assert_eq!(mixes, BTreeSet::from([[0, 1], [1, 0], [90, 10]]));
        assert_eq!(clients, BTreeSet::from([1, 50, 100, 1000]));
        assert_eq!(depths, BTreeSet::from([1, 16]));
        for name in &STORE_COUNTED {
            assert!(CASES.iter().any(|case| case.name == *name), "{name}");
        }
    }
}
