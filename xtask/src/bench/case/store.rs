//! Key-value servers: store.

use super::super::contestant::Contestant::{
    self, Redis, RedisAlways, RedisBenchmark, RedisEverysec, Store, StoreEpoll,
};
use super::super::store::StoreLoad;
use super::{Case, Metric, ONE, Row, Service};

/// The case of the store that is also measured unpinned, and whose system calls are counted.
pub(crate) const STORE_MAIN: &str = "store-set-50";

const STORE_SET: &[Contestant] = &[Store, RedisAlways, Redis];

static SET_64: StoreLoad = StoreLoad::Set { value_bytes: 64 };
static SET_1400: StoreLoad = StoreLoad::Set { value_bytes: 1400 };
static GET_64: StoreLoad = StoreLoad::Get { value_bytes: 64 };
static KEYS: StoreLoad = StoreLoad::Keys;

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

pub(super) const CASES: &[Case] = &[
    store(
        STORE_MAIN,
        "SET of 64 bytes, 50 clients",
        &SET_64,
        [50, 1],
        &[Store, StoreEpoll, RedisAlways, RedisEverysec, Redis],
    ),
    store("store-set-50-16", "SET of 64 bytes, 50 clients with 16 in flight", &SET_64, [50, 16], STORE_SET),
    store("store-set-1", "SET of 64 bytes, 1 client", &SET_64, [1, 1], STORE_SET),
    store("store-set-1000", "SET of 64 bytes, 1,000 clients", &SET_64, [1000, 1], STORE_SET),
    store("store-set-1400", "SET of 1,400 bytes, 50 clients", &SET_1400, [50, 1], STORE_SET),
    store("store-get-50", "GET of 64 bytes, 50 clients", &GET_64, [50, 1], &[Store, Redis]),
    store(
        "store-generators",
        "SET of 64 bytes, 50 clients with 16 in flight, by two generators",
        &SET_64,
        [50, 16],
        &[RedisAlways, RedisBenchmark],
    ),
    Case {
        metric: Metric::RecoveredKeysPerS,
        ..store(
            "store-keys",
            "A million keys of 8 bytes with values of 8 bytes, and a start after them",
            &KEYS,
            [1, 1],
            &[Store, RedisAlways],
        )
    },
];
