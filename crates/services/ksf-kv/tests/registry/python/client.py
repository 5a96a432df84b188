"""What redis-py's own examples do, on the server at 127.0.0.1:PORT; every answer is checked.

Usage: client.py PORT PASSWORD (empty: none)
"""

import sys
import threading
import time

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

PORT, PASSWORD = int(sys.argv[1]), sys.argv[2] or None


def same(got, wanted):
    if got != wanted:
        raise AssertionError(f"got {got!r}, not {wanted!r}")


def refused(kind, words, act):
    try:
        got = act()
    except kind as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"got {got!r}, not an error with {words!r}")


def connect(protocol, **how):
    return redis.Redis(
        host="127.0.0.1", port=PORT, password=PASSWORD, protocol=protocol, decode_responses=True, socket_timeout=30, **how
    )


def strings(r):
    same(r.ping(), True)
    same(r.set("foo", "bar"), True)
    same(r.get("foo"), "bar")
    same(r.get("absent"), None)
    same(r.set("foo", "baz", nx=True), None)
    same(r.set("foo", "baz", xx=True, get=True), "bar")
    same(r.mset({"a": 1, "b": 2}), True)
    same(r.mget(["a", "b", "absent"]), ["1", "2", None])
    same(r.incr("count"), 1)
    same(r.incrby("count", 9), 10)
    same(r.decr("count"), 9)
    same(r.incrbyfloat("count", 0.5), 9.5)
    same(r.append("foo", "!"), 4)
    same(r.getrange("foo", 1, 2), "az")
    same(r.setrange("foo", 0, "B"), 4)
    same(r.strlen("foo"), 4)
    same(r.getdel("foo"), "Baz!")
    same(r.setbit("bits", 7, 1), 0)
    same(r.bitcount("bits"), 1)
    same(r.exists("a", "b", "foo"), 2)
    same(r.type("a"), "string")
    same(r.rename("a", "c"), True)
    same(r.delete("b", "c"), 2)


def expiry(r):
    same(r.setex("short", 100, "x"), True)
    assert 0 < r.ttl("short") <= 100
    same(r.expire("short", 200), True)
    assert 100_000 < r.pttl("short") <= 200_000
    same(r.persist("short"), True)
    same(r.ttl("short"), -1)
    same(r.ttl("absent"), -2)
    same(r.psetex("gone", 1, "x"), True)
    until = time.monotonic() + 30
    while r.get("gone") is not None:
        assert time.monotonic() < until, "it does not expire"
    same(r.getex("short", ex=50), "x")
    assert 0 < r.ttl("short") <= 50


def hashes(r):
    same(r.hset("bike:1", mapping={"model": "Deimos", "price": 4972}), 2)
    same(r.hget("bike:1", "model"), "Deimos")
    same(r.hgetall("bike:1"), {"model": "Deimos", "price": "4972"})
    same(r.hmget("bike:1", ["price", "absent"]), ["4972", None])
    same(r.hincrby("bike:1", "price", 100), 5072)
    same(r.hincrbyfloat("bike:1", "price", 0.5), 5072.5)
    same(r.hexists("bike:1", "model"), True)
    same(r.hdel("bike:1", "model"), 1)
    same(r.hkeys("bike:1"), ["price"])
    same(r.hvals("bike:1"), ["5072.5"])
    same(r.hlen("bike:1"), 1)
    refused(redis.ResponseError, "WRONGTYPE", lambda: r.get("bike:1"))


def lists(r):
    same(r.rpush("list", "a", "b", "c"), 3)
    same(r.lpush("list", "z"), 4)
    same(r.lrange("list", 0, -1), ["z", "a", "b", "c"])
    same(r.lpop("list"), "z")
    same(r.rpop("list", 2), ["c", "b"])
    same(r.llen("list"), 1)
    same(r.lindex("list", 0), "a")
    same(r.lset("list", 0, "A"), True)
    same(r.lrange("list", 0, -1), ["A"])


def sets(r):
    same(r.sadd("one", "a", "b", "c"), 3)
    same(r.sadd("two", "b", "c", "d"), 3)
    same(r.smembers("one"), {"a", "b", "c"})
    same(r.sismember("one", "a"), 1)
    same(r.scard("one"), 3)
    same(r.srem("one", "a"), 1)
    same(r.sinter("one", "two"), {"b", "c"})
    same(r.sunion("one", "two"), {"b", "c", "d"})
    same(r.sdiff("two", "one"), {"d"})


def sorted_sets(r):
    same(r.zadd("race", {"Norem": 10, "Castilla": 12, "Prickett": 6.5}), 3)
    same(r.zscore("race", "Prickett"), 6.5)
    same(r.zscore("race", "absent"), None)
    same(r.zrange("race", 0, -1), ["Prickett", "Norem", "Castilla"])
    scored = [["Prickett", 6.5], ["Norem", 10.0], ["Castilla", 12.0]]
    same([list(pair) for pair in r.zrange("race", 0, -1, withscores=True)], scored)
    same(r.zincrby("race", 10, "Prickett"), 16.5)
    same(r.zrank("race", "Norem"), 0)
    same(r.zrevrank("race", "Norem"), 2)
    same(r.zrangebyscore("race", 11, 13), ["Castilla"])
    same(r.zcard("race"), 3)
    same(r.zrem("race", "Norem"), 1)


def pipelines(r):
    with r.pipeline(transaction=False) as pipe:
        for i in range(1000):
            pipe.set(f"seat:{i}", f"#{i}")
        same(pipe.execute(), [True] * 1000)
    with r.pipeline() as pipe:
        pipe.incr("both").incr("both").get("seat:999").hset("hash", "f", "v").hgetall("hash")
        same(pipe.execute(), [1, 2, "#999", 1, {"f": "v"}])
    with r.pipeline(transaction=False) as pipe:
        pipe.lpush("seat:0", "x").get("seat:0")
        wrong, right = pipe.execute(raise_on_error=False)
        assert isinstance(wrong, redis.ResponseError), wrong
        same(right, "#0")


def transactions(r):
    r.set("watched", 1)
    with r.pipeline() as pipe:
        pipe.watch("watched")
        now = int(pipe.get("watched"))
        r.set("watched", 5)  # by another connection
        pipe.multi()
        pipe.set("watched", now + 1)
        refused(redis.WatchError, "", pipe.execute)
    same(r.get("watched"), "5")

    def increment(pipe):
        now = int(pipe.get("watched"))
        pipe.multi()
        pipe.set("watched", now + 1)

    same(r.transaction(increment, "watched"), [True])
    same(r.get("watched"), "6")


def iterators(r):
    seats = {f"seat:{i}" for i in range(1000)}
    same(set(r.scan_iter("seat:*", count=50)), seats)
    same(r.hset("many", mapping={f"f{i}": i for i in range(500)}), 500)
    same(dict(r.hscan_iter("many")), {f"f{i}": str(i) for i in range(500)})
    same(r.sadd("members", *range(500)), 500)
    same(set(r.sscan_iter("members")), {str(i) for i in range(500)})
    same(r.zadd("scored", {f"m{i}": i for i in range(500)}), 500)
    same(dict(r.zscan_iter("scored")), {f"m{i}": float(i) for i in range(500)})


def big_values(r):
    big = "0123456789abcdef" * 50_000  # 800,000 bytes
    same(r.set("big", big), True)
    assert r.get("big") == big
    with r.pipeline(transaction=False) as pipe:
        for _ in range(8):
            pipe.get("big")
        assert pipe.execute() == [big] * 8
    same(r.delete("big"), 1)


def pool(r):
    failures = []

    def work(number):
        try:
            for i in range(50):
                same(r.incr("shared") > 0, True)
                same(r.set(f"own:{number}", i), True)
                same(r.get(f"own:{number}"), str(i))
        except BaseException as error:  # of any kind: it is shown
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    same(failures, [])
    same(r.get("shared"), "1000")


def server(r):
    assert r.info()["redis_version"]
    r.client_setname("tester")
    same(r.client_getname(), "tester")
    assert r.client_id() > 0
    same(r.dbsize() > 1000, True)
    same(r.echo("hello"), "hello")
    assert abs(r.time()[0] - time.time()) < 3600
    refused(redis.ResponseError, "unknown command", lambda: r.execute_command("NOSUCH", "x"))


def main():
    if PASSWORD:
        once = Retry(NoBackoff(), 0)  # by default it tries for seconds to get in
        for protocol in (2, 3):
            wrong = redis.Redis(host="127.0.0.1", port=PORT, password="wrong", protocol=protocol, retry=once)
            refused(redis.AuthenticationError, "", wrong.ping)
            none = redis.Redis(host="127.0.0.1", port=PORT, protocol=protocol, retry=once)
            refused(redis.AuthenticationError, "", none.ping)
    steps = [strings, expiry, hashes, lists, sets, sorted_sets, pipelines, transactions, iterators, big_values, pool, server]
    for protocol in (2, 3):
        name = f"RESP{protocol}"
        r = connect(protocol, client_name="registry", max_connections=50)
        same(r.flushall(), True)
        for step in steps:
            print(name, step.__name__, flush=True)
            step(r)
        r.close()
        url = f"redis://{':' + PASSWORD + '@' if PASSWORD else ''}127.0.0.1:{PORT}/0?protocol={protocol}"
        with redis.from_url(url) as r:
            same(r.get("shared"), b"1000")
    print("done: redis-py", redis.__version__)


main()
