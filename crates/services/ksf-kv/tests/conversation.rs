//! Replies of the server, compared with those of Redis.

use std::collections::{HashMap, HashSet};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;

use crate::common::{Client, Redis, Serving, engines};
use crate::{connections, keys};
use ksf::engine::EngineKind;
use ksf::limits::Limits;
use ksf_test::{own_network, stream, wait_until};

/// Commands in their order, each with its reply.
const CONVERSATION: &[(&str, &str)] = &[
    ("PING", "+PONG"),
    ("SET greeting hello", "+OK"),
    ("GET greeting", "hello"),
    ("get nothing", "nil"),
    ("SET greeting again NX", "nil"),
    ("SET greeting again XX GET", "hello"),
    ("GETSET greeting third", "again"),
    ("APPEND greeting -part", ":10"),
    ("STRLEN greeting", ":10"),
    ("MSET a 1 b 2 c 3", "+OK"),
    ("MGET a b x c", "[1 2 nil 3]"),
    ("MSETNX c 4 d 5", ":0"),
    ("INCRBY a 41", ":42"),
    ("DECR a", ":41"),
    ("INCR greeting", "-ERR value is not an integer or out of range"),
    ("SET big 9223372036854775807", "+OK"),
    ("INCR big", "-ERR increment or decrement would overflow"),
    ("DEL b x c", ":2"),
    ("EXISTS a a b", ":2"),
    ("TTL a", ":-1"),
    ("TTL b", ":-2"),
    ("EXPIRE a 100", ":1"),
    ("EXPIRE a 50 GT", ":0"),
    ("PERSIST a", ":1"),
    ("EXPIRE a -1", ":1"),
    ("GET a", "nil"),
    ("SETEX short 100 value", "+OK"),
    ("TTL short", ":100"),
    ("SET short kept KEEPTTL", "+OK"),
    ("TTL short", ":100"),
    ("TYPE short", "+string"),
    ("DBSIZE", ":3"),
    ("KEYS *e*", "[greeting]"),
    ("SELECT 1", "-ERR DB index is out of range"),
    ("CONFIG GET append*", "[appendonly yes appendfsync always]"),
    ("SET a", "-ERR wrong number of arguments for 'set' command"),
    ("SET a b EX 0", "-ERR invalid expire time in 'set' command"),
    ("SET a b NX XX", "-ERR syntax error"),
    ("NONSENSE a b", "-ERR unknown command 'NONSENSE', with args beginning with: 'a' 'b' "),
    ("GETDEL short", "kept"),
];

/// Raw bytes, each sent on a connection of its own. This server and Redis return the same bytes until the connection ends.
const SAME_BYTES_AS_REDIS: &[&str] = &[
    "*01\r\n$4\r\nPING\r\n",
    "*+1\r\n$4\r\nPING\r\n",
    "*-0\r\nPING\r\n",
    "*00\r\nPING\r\n",
    "*\r\nPING\r\n",
    "*0\r\nPING\r\n",
    "*-1\r\nPING\r\n",
    "*-9999999999\r\nPING\r\n",
    "*1\r\n$-1\r\nPING\r\n",
    "*1\r\n$-0\r\n\r\nPING\r\n",
    "*1\r\n$04\r\nPING\r\n",
    "*1\r\n$+4\r\nPING\r\n",
    "*1\r\n$\r\nPING\r\n",
    "*1\r\n:4\r\nPING\r\n",
    "*12345678901234567890\r\n",
    "*2147483648\r\n",
    "*1\r\n$99999999999999999999\r\n",
    "*1\r\n$0\r\n\r\nPING\r\n",
    "*1\r\n$4\r\nPOST\r\nPING\r\n",
    "PING a\"b\r\nPING\r\n",
    "PING a\"b c\"\r\n",
    "PING \"a\"b\r\nPING\r\n",
    "PING 'a\\'b'\r\n",
    "\"PI\\x4eG\"\r\n",
    "PING a\x0bb\r\n",
    "\x0bPING\r\n",
    "PING \"\r\nPING\r\n",
    "PING\rx\nPING\n",
    "PING ''\r\n",
    "PING \"\\xzz\\q\"\r\n",
    "PING\r\nNONSENSE x y\r\nPING\r\n",
    "\r\n\nPING\r\n",
];

/// Commands to which this server and Redis return the same replies.
const SAME_AS_REDIS: &[&str] = &[
    "SET text Hello-World",
    "GETRANGE text 0 4",
    "GETRANGE text -5 -1",
    "GETRANGE text -1 -5",
    "GETRANGE text 0 -100",
    "GETRANGE text 3 1",
    "GETRANGE text 5 100",
    "GETRANGE none 0 -1",
    "SUBSTR text 1 2",
    "GETRANGE text a 2",
    "SETRANGE text 6 Redis",
    "GET text",
    "SETRANGE padded 3 x",
    "STRLEN padded",
    "SETRANGE text -1 x",
    "SETRANGE text 536870911 xx",
    "TOUCH text padded none",
    "GETEX text",
    "GETEX text PXAT 4000000000000",
    "PEXPIRETIME text",
    "EXPIRETIME text",
    "GETEX text PERSIST",
    "PEXPIRETIME text",
    "EXPIRETIME none",
    "GETEX none EX 10",
    "GETEX text EX 0",
    "GETEX text EX",
    "GETEX text NONSENSE 1",
    "GETEX text PXAT 1",
    "EXISTS text",
    "GETEX",
    "EXPIREAT padded 4000000000",
    "EXPIRETIME padded",
    "SET n 5 NX",
    "INCRBY n x",
    "DECRBY n 7",
    "DECR n",
    "DECR text",
    "DECR none x",
    "APPEND n 0",
    "MSET a 1 b",
    "SETEX a -1 v",
    "COMMAND GETKEYS MSET a 1 b 2",
    "COMMAND GETKEYS DEL a b",
    "COMMAND GETKEYS GET a b",
    "COMMAND GETKEYS NONSENSE a",
    // Hashes.
    "HSET h a 1 b 2 c 3",
    "HSET h a 1 d 4",
    "HSET h a",
    "HSET h a 1 b",
    "HMSET h e 5",
    "HGET h a",
    "HGET h none",
    "HGET none a",
    "HMGET h a none e",
    "HMGET none a",
    "HGETALL h",
    "HGETALL none",
    "HKEYS h",
    "HVALS h",
    "HLEN h",
    "HLEN none",
    "HEXISTS h a",
    "HEXISTS h none",
    "HSTRLEN h a",
    "HSETNX h a 9",
    "HSETNX h f 9",
    "HDEL h f none f",
    "HINCRBY h a 41",
    "HINCRBY h a x",
    "HINCRBY h a 9223372036854775807",
    "HINCRBYFLOAT h a 0.5",
    "HINCRBYFLOAT h a 3.0e3",
    "HINCRBYFLOAT h a x",
    "HINCRBY h a 1",
    "HSET h text words",
    "HINCRBYFLOAT h text 1",
    "HSCAN h 0",
    "HSCAN h 0 MATCH [bc] COUNT 100",
    "HSCAN none 0",
    "HSCAN h x",
    "HSCAN h 0 COUNT 0",
    "HRANDFIELD none",
    "HRANDFIELD none 5",
    "HSET one field value",
    "HRANDFIELD one",
    "HRANDFIELD one 5",
    "HRANDFIELD one -2",
    "HRANDFIELD one -2 WITHVALUES",
    "HRANDFIELD one 1 NONSENSE",
    "TYPE h",
    "GET h",
    "APPEND h x",
    "STRLEN h",
    "INCR h",
    "GETRANGE h 0 1",
    "SETRANGE h 0 x",
    "GETSET h x",
    "GETDEL h",
    "GETEX h",
    "SET h x GET",
    "MGET h text",
    "SETNX h x",
    "HGET n a",
    "HSET n a 1",
    "HDEL n a",
    "HGETALL n",
    "HLEN n",
    "EXPIRETIME h",
    "EXPIREAT h 4000000000",
    "EXPIRETIME h",
    "HSET h a 2",
    "EXPIRETIME h",
    "PERSIST h",
    "PERSIST h",
    "PEXPIRETIME h",
    "EXPIREAT one 4000000000",
    "HDEL one field",
    "EXISTS one",
    "HSET one again 1",
    "TTL one",
    "EXPIRE one -1",
    "HGETALL one",
    "HSET one new 2",
    "HGETALL one",
    "SET h string",
    "HGETALL h",
    "DEL h one",
    "HGETALL h",
    // Sets.
    "SADD s 1 2 3",
    "SADD s 3 4 4",
    "SCARD s",
    "SMEMBERS s",
    "SMEMBERS none",
    "SISMEMBER s 1",
    "SISMEMBER s 9",
    "SMISMEMBER s 1 9 2",
    "SMISMEMBER none 1",
    "SREM s 1 9",
    "SADD t 3 4 5",
    "SINTER s t",
    "SUNION s t",
    "SDIFF s t",
    "SDIFF none t",
    "SINTER s none",
    "SINTERSTORE u s t",
    "SMEMBERS u",
    "SUNIONSTORE u s t u",
    "SMEMBERS u",
    "SDIFFSTORE u s t",
    "SMEMBERS u",
    "SDIFFSTORE u s s",
    "EXISTS u",
    "SMOVE s t 2",
    "SMOVE s t 2",
    "SMOVE s none2 3",
    "SMEMBERS none2",
    "SMOVE text t 2",
    "SMOVE t t 5",
    "SSCAN t 0",
    "SSCAN t 0 MATCH [3]",
    "SPOP none",
    "SPOP none 2",
    "SPOP none2",
    "EXISTS none2",
    "SPOP t -1",
    "SPOP t 0",
    "SRANDMEMBER none",
    "SRANDMEMBER none 3",
    "SADD one 7",
    "SRANDMEMBER one",
    "SRANDMEMBER one 3",
    "SRANDMEMBER one -3",
    "SPOP one 3",
    "SADD s",
    "SADD text 1",
    "SINTER s text",
    "SCARD text",
    "HGET s 1",
    "TYPE s",
    "SREM s 4",
    "EXISTS s",
    // Lists.
    "RPUSH l a b c",
    "LPUSH l z y",
    "LRANGE l 0 -1",
    "LRANGE l 1 2",
    "LRANGE l -2 100",
    "LRANGE l 5 2",
    "LRANGE none 0 -1",
    "LLEN l",
    "LLEN none",
    "LINDEX l 0",
    "LINDEX l -1",
    "LINDEX l 5",
    "LINDEX l x",
    "LSET l 1 new",
    "LSET l 9 new",
    "LSET none 0 new",
    "LPUSHX none a",
    "RPUSHX l a",
    "LPUSHX l a",
    "LRANGE l 0 -1",
    "LPOS l a",
    "LPOS l a RANK 2",
    "LPOS l a RANK -1",
    "LPOS l a COUNT 0",
    "LPOS l a COUNT 2 RANK -1",
    "LPOS l a COUNT 0 MAXLEN 3",
    "LPOS l none",
    "LPOS l none COUNT 1",
    "LPOS l a RANK 0",
    "LPOS l a COUNT -1",
    "LINSERT l BEFORE b x",
    "LINSERT l AFTER a x",
    "LINSERT l AFTER none x",
    "LINSERT none AFTER a x",
    "LINSERT l BESIDE a x",
    "LRANGE l 0 -1",
    "LREM l 2 a",
    "LREM l -1 x",
    "LREM l 0 none",
    "LRANGE l 0 -1",
    "LPOP l",
    "RPOP l",
    "LPOP l 0",
    "LPOP l 2",
    "RPOP l 9",
    "LPOP l",
    "LPOP l 2",
    "LPOP l -1",
    "EXISTS l",
    "RPUSH l 1 2 3 4 5 6",
    "LTRIM l 1 -2",
    "LRANGE l 0 -1",
    "RPOPLPUSH l m",
    "RPOPLPUSH none m",
    "LMOVE l m LEFT RIGHT",
    "LMOVE l l LEFT RIGHT",
    "LMOVE l l UP RIGHT",
    "LRANGE l 0 -1",
    "LRANGE m 0 -1",
    "LMOVE l text LEFT LEFT",
    "RPUSH text x",
    "LRANGE text 0 -1",
    "SADD l x",
    "TYPE l",
    "RPUSH single x",
    "PEXPIREAT single 4000000000000",
    "RPOPLPUSH single single",
    "PEXPIRETIME single",
    "LTRIM l 5 9",
    "EXISTS l",
    // Sorted sets.
    "ZADD z 1 a 2 b 3 c",
    "ZADD z 1 a 2.5 b 4 d",
    "ZADD z CH 1 a 2 b",
    "ZADD z NX 9 a 5 e",
    "ZADD z XX 6 e 7 f",
    "ZADD z GT CH 5 e 9 d",
    "ZADD z LT CH 7 e 8 d",
    "ZADD z INCR 0.5 a",
    "ZADD z NX INCR 1 a",
    "ZADD z NX XX 1 a",
    "ZADD z NX GT 1 a",
    "ZADD z INCR 1 a 2 b",
    "ZADD z x a",
    "ZADD z 1",
    "ZADD z NX 1",
    "ZADD text 1 a",
    "ZCARD z",
    "ZCARD none",
    "ZSCORE z a",
    "ZSCORE z none",
    "ZSCORE none a",
    "ZMSCORE z a none b",
    "ZINCRBY z 10 a",
    "ZINCRBY z x a",
    "ZINCRBY z -inf neg",
    "ZINCRBY z inf neg",
    "ZADD z inf top",
    "ZRANGE z 0 -1 WITHSCORES",
    "ZRANGE z 0 1",
    "ZRANGE z 0 1 REV",
    "ZRANGE z -2 -1",
    "ZRANGE z 5 1",
    "ZRANGE none 0 -1",
    "ZRANGE z 1 (8 BYSCORE",
    "ZRANGE z 8 1 BYSCORE REV WITHSCORES",
    "ZRANGE z -inf +inf BYSCORE LIMIT 1 2",
    "ZRANGE z -inf +inf BYSCORE LIMIT 1 -1",
    "ZRANGE z 0 1 LIMIT 0 1",
    "ZRANGE z 0 1 LIMIT 0 -1",
    "ZRANGE z 0 -1 REV LIMIT 5 -1",
    "ZRANGE z 0 1 LIMIT -1 -1",
    "ZRANGE z 0 1 LIMIT 0 -2",
    "ZRANGE z 0 1 LIMIT 0 1 LIMIT 0 -1",
    "ZRANGE z 0 1 LIMIT 0 -1 LIMIT 0 1",
    "ZREVRANGE z 0 1 LIMIT 1 -1",
    "ZRANGE z a b BYSCORE",
    "ZRANGE z 0 1 NONSENSE",
    "ZREVRANGE z 0 1 WITHSCORES",
    "ZRANGEBYSCORE z (2 8 WITHSCORES",
    "ZRANGEBYSCORE z (2 8 LIMIT 1 1",
    "ZREVRANGEBYSCORE z 8 (2",
    "ZCOUNT z 2 8",
    "ZCOUNT z (2 8",
    "ZCOUNT z x 8",
    "ZRANK z b",
    "ZREVRANK z b",
    "ZRANK z none",
    "ZRANK none a",
    "ZSCAN z 0",
    "ZSCAN z 0 MATCH [ab]",
    "ZREM z b none",
    "ZPOPMIN z",
    "ZPOPMAX z 2",
    "ZPOPMIN none",
    "ZPOPMIN none 2",
    "ZPOPMIN z 0",
    "ZPOPMIN z -1",
    "ZADD z 1 l 2 m 3 n 4 o 5 p",
    "ZADD z -1 neg1 -2.5 neg2 0 zero -0 minuszero",
    "ZRANGE z 0 -1 WITHSCORES",
    "ZREMRANGEBYSCORE z -2 (1",
    "ZREMRANGEBYRANK z 0 1",
    "ZREMRANGEBYRANK z -1 -1",
    "ZRANGE z 0 -1 WITHSCORES",
    "TYPE z",
    "HGET z a",
    "ZREMRANGEBYRANK z 0 -1",
    "EXISTS z",
    "MULTI",
    "ZADD z 1 a 2 b",
    "ZINCRBY z 5 a",
    "ZRANGE z 0 -1 WITHSCORES",
    "ZRANGEBYSCORE z 2 5",
    "EXEC",
    "ZRANGE z 0 -1 WITHSCORES",
    // Transactions.
    "EXEC",
    "DISCARD",
    "MULTI",
    "MULTI",
    "SET tx 1",
    "INCR tx",
    "HSET tx a 1",
    "HSET txh a 1 b 2",
    "HDEL txh a",
    "HGETALL txh",
    "HLEN txh",
    "RPUSH txl a b c",
    "LPOP txl",
    "RPOPLPUSH txl txl",
    "LRANGE txl 0 -1",
    "SADD txs 1 2 3",
    "SREM txs 2",
    "SMEMBERS txs",
    "DEL txs",
    "SADD txs 7",
    "SMEMBERS txs",
    "PEXPIREAT txs 4000000000000",
    "PEXPIRETIME txs",
    "GET tx",
    "GET none",
    "WATCH tx",
    "PING",
    "EXEC",
    "GET tx",
    "HGETALL txh",
    "LRANGE txl 0 -1",
    "SMEMBERS txs",
    "PEXPIRETIME txs",
    "MULTI",
    "EXEC",
    "MULTI",
    "SET tx 5",
    "DISCARD",
    "GET tx",
    "MULTI",
    "SET tx 6",
    "NONSENSE",
    "SET",
    "EXEC",
    "GET tx",
    "WATCH tx txh none",
    "MULTI",
    "SET tx 7",
    "EXEC",
    "WATCH tx",
    "SET tx 8",
    "MULTI",
    "SET tx 9",
    "EXEC",
    "GET tx",
    "WATCH txh",
    "HSET txh c 3",
    "MULTI",
    "EXEC",
    "WATCH none",
    "SADD none a",
    "MULTI",
    "EXEC",
    "DEL none",
    // A value that a transaction writes with a time in the past is gone for its later commands.
    "MULTI",
    "SET over v PXAT 1",
    "GET over",
    "STRLEN over",
    "EXISTS over",
    "TYPE over",
    "TTL over",
    "PTTL over",
    "EXPIRETIME over",
    "PEXPIRETIME over",
    "PERSIST over",
    "DEL over",
    "SET over v EXAT 1",
    "GETEX over PERSIST",
    "GETDEL over",
    "EXPIRE over 100",
    "RENAME over over2",
    "COPY over over2",
    "PERSIST over2",
    "SET over v XX",
    "APPEND over x",
    "GET over",
    "SET over v PXAT 1 GET",
    "SET over w KEEPTTL",
    "PTTL over",
    "SET over v PXAT 1",
    "SETNX over w",
    "EXEC",
    "GET over",
    "EXISTS over2",
    "MULTI",
    "SET over 5 PXAT 1",
    "INCR over",
    "EXEC",
    "GET over",
    "PTTL over",
    "MULTI",
    "SET over v PXAT 1",
    "RPUSH over a",
    "SET over2 v PXAT 1",
    "SADD over2 m",
    "EXEC",
    "LRANGE over 0 -1",
    "SMEMBERS over2",
    "MULTI",
    "SADD over2 n",
    "EXPIREAT over2 1",
    "SADD over2 p",
    "GETEX tx PXAT 1",
    "INCR tx",
    "EXEC",
    "SMEMBERS over2",
    "GET tx",
    "MULTI",
    "SET over v PXAT 1",
    "EXEC",
    "EXISTS over",
    "DEL over over2",
    "WATCH tx",
    "SET tx 10",
    "UNWATCH",
    "MULTI",
    "GET tx",
    "EXEC",
    "MULTI",
    "EXEC x",
    "PING",
    "EXEC",
    "EXEC x",
    "MULTI",
    "DISCARD x",
    "EXEC",
    "MULTI",
    "MULTI x",
    "EXEC",
    "MULTI",
    "WATCH",
    "EXEC",
    "MULTI",
    "WATCH tx",
    "EXEC",
    // The smallest integer has no positive counterpart.
    "SADD drawn a",
    "SRANDMEMBER drawn -9223372036854775808",
    "SRANDMEMBER nothing -9223372036854775808",
    "HSET drawnh a 1",
    "HRANDFIELD drawnh -9223372036854775808",
    "SPOP drawn -1",
    // Repeated options.
    "SET again v EX 10 EX 200",
    "TTL again",
    "SET again v EX 10 PX 10",
    "SET again v KEEPTTL KEEPTTL",
    "SET again v KEEPTTL EX 10",
    "SET again v NX NX",
    "SET again v GET GET",
    "SET again v EX 0 EX 10",
    "GETEX again EX 10 EX 300",
    "TTL again",
    "GETEX again PERSIST PERSIST",
    "TTL again",
    "GETEX again EX 10 PERSIST",
    "GETEX again PERSIST EX 10",
    "GETEX again EX x PERSIST",
    "ZADD minus INCR -0 m",
    "ZADD minus INCR 0 m",
    "ZADD minus -0 n",
    "ZSCORE minus n",
    "ZINCRBY minus -0 o",
    "ZSCORE minus o",
    // Numbers at the ends of their range.
    "RPUSH ends a b c d",
    "LPOP ends",
    "LINDEX ends 9223372036854775807",
    "LINDEX ends -9223372036854775808",
    "LSET ends 9223372036854775807 x",
    "LSET ends -9223372036854775808 x",
    "LRANGE ends -9223372036854775808 9223372036854775807",
    "LRANGE ends 9223372036854775807 -9223372036854775808",
    "LPOS ends c RANK 9223372036854775807",
    "LPOS ends c RANK -9223372036854775807",
    "LPOS ends c COUNT 9223372036854775807 MAXLEN 9223372036854775807",
    "LREM ends 9223372036854775807 x",
    "LREM ends -9223372036854775808 x",
    "LTRIM ends -9223372036854775808 9223372036854775807",
    "LPOP ends -9223372036854775808",
    "LPOP ends 9223372036854775807",
    "EXISTS ends",
    "SET ends abc",
    "GETRANGE ends -9223372036854775808 9223372036854775807",
    "GETRANGE ends 9223372036854775807 -9223372036854775808",
    "SETRANGE ends 9223372036854775807 x",
    "SETRANGE ends -9223372036854775808 x",
    "SETRANGE ends 9223372036854775807 ",
    "BITCOUNT ends -9223372036854775808 9223372036854775807",
    "BITCOUNT ends -9223372036854775808 9223372036854775807 BIT",
    "BITCOUNT ends 9223372036854775807 9223372036854775807 BIT",
    "GETBIT ends 9223372036854775807",
    "SETBIT ends 9223372036854775807 1",
    "DECRBY ends -9223372036854775808",
    "SET ends -1",
    "DECRBY ends 9223372036854775807",
    "DECRBY ends 1",
    "INCRBY ends 9223372036854775807",
    "SET ends v EX 9223372036854775807",
    "SET ends v PX 9223372036854775807",
    "SET ends v PXAT 9223372036854775807",
    "SET ends v EX -9223372036854775808",
    "SETEX ends 9223372036854775807 v",
    "PSETEX ends 9223372036854775807 v",
    "EXPIRE ends 9223372036854775807",
    "PEXPIRE ends 9223372036854775807",
    "PEXPIRE ends -9223372036854775808",
    "SET ends v",
    "EXPIRETIME ends",
    "DEL ends",
    "ZADD ends 1 a 2 b",
    "ZRANGE ends -9223372036854775808 9223372036854775807",
    "ZRANGE ends 9223372036854775807 -9223372036854775808",
    "ZRANGE ends -inf +inf BYSCORE LIMIT 9223372036854775807 1",
    "ZRANGE ends -inf +inf BYSCORE LIMIT 0 -9223372036854775808",
    "ZRANGE ends -inf +inf BYSCORE LIMIT -9223372036854775808 1",
    "ZREMRANGEBYRANK ends 9223372036854775807 -9223372036854775808",
    "ZPOPMAX ends 9223372036854775807",
    "SADD ends a",
    "SPOP ends 9223372036854775807",
    "HSET ends f v",
    "HRANDFIELD ends 9223372036854775807",
    "HRANDFIELD ends 9223372036854775807 WITHVALUES",
    "HRANDFIELD ends 4611686018427387903 WITHVALUES",
    "HRANDFIELD ends -4611686018427387905 WITHVALUES",
    "HRANDFIELD ends -4611686018427387904 WITHVALUES x",
    "HINCRBY ends n -9223372036854775808",
    "HINCRBY ends n -1",
    "HSCAN ends 0 COUNT 9223372036854775807",
    "SCAN 0 COUNT 9223372036854775807 MATCH ends",
    "SCAN 18446744073709551615 COUNT 9223372036854775807 MATCH nothing",
    "DEL ends",
    // The order of checks: the key, its type, an argument, the options.
    "DEL text h l s z wrong missing missing2",
    "SET text v",
    "HSET h f v",
    "RPUSH l a b a",
    "SADD s m",
    "ZADD z 1 m",
    "SMOVE missing h m",
    "SMOVE h missing m",
    "SMOVE text missing m",
    "SMOVE s text none",
    "SMOVE missing text m",
    "LINDEX missing 1e3",
    "LINDEX text 1e3",
    "LINDEX l 1e3",
    "LSET missing 1e3 x",
    "LSET text 1e3 x",
    "LSET l 1e3 x",
    "LRANGE missing 1e3 0",
    "LRANGE text 1e3 0",
    "LREM missing 1e3 x",
    "LREM text 1e3 x",
    "LTRIM missing 1e3 0",
    "LTRIM text 1e3 0",
    "LINSERT missing BESIDE a x",
    "LINSERT text BESIDE a x",
    "LINSERT text AFTER a x",
    "LPOP missing x",
    "LPOP text x",
    "LPOP text 1",
    "LPOP missing 0",
    "LPOP missing 1 2",
    "LMOVE text missing UP LEFT",
    "LMOVE missing text LEFT LEFT",
    "RPOPLPUSH missing text",
    "LPUSHX text a",
    "LPOS missing a COUNT 1e3",
    "LPOS l a COUNT 1e3",
    "LPOS l a COUNT 9223372036854775808",
    "LPOS l a MAXLEN 1e3",
    "LPOS l a RANK 1e3",
    "LPOS l a NONSENSE 1e3",
    "LPOS l a NONSENSE",
    "LPOS l a RANK 0 COUNT",
    "LPOS l a COUNT 0 RANK 0",
    "LPOS l a COUNT -1 RANK",
    "LPOS l a RANK",
    "LPOS text a COUNT -1",
    "LPOS text a",
    "GETEX missing EX 0",
    "GETEX missing EX x",
    "GETEX missing PXAT +1",
    "GETEX missing NONSENSE",
    "GETEX missing EX",
    "GETEX missing EX 10 PERSIST",
    "HSET wrong f v",
    "GETEX wrong PX 18446744073709551615",
    "GETEX wrong EX 0",
    "GETEX wrong NONSENSE",
    "SET wrong v EX 0 GET",
    "SET wrong v EX x GET",
    "SET missing v EX 0 XX",
    "SET missing v NX GET XX",
    "GETRANGE wrong x 1",
    "SETRANGE wrong x v",
    "SETRANGE wrong -1 v",
    "SETRANGE wrong 0 ",
    "SETRANGE missing 0 ",
    "SETRANGE missing -1 ",
    "SETRANGE wrong 536870912 v",
    "APPEND wrong v",
    "GETBIT wrong x",
    "SETBIT wrong x 1",
    "SETBIT wrong 0 x",
    "BITCOUNT wrong x y",
    "BITCOUNT wrong 0",
    "BITCOUNT missing 0",
    "BITCOUNT missing 0 x",
    "INCRBY wrong x",
    "DECRBY wrong -9223372036854775808",
    "INCRBYFLOAT wrong x",
    "INCRBYFLOAT missing x",
    "SETEX wrong x v",
    "PSETEX wrong 0 v",
    "EXPIRE missing x",
    "EXPIRE missing 10 NONSENSE",
    "EXPIRE missing 10 a\0b",
    "EXPIRE missing 10 a\r\nb\r\n",
    "CLIENT KILL TYPE a\0b",
    "CLIENT KILL USER a\r\nb",
    "HELLO 3 a\nb\0",
    "EXPIRE missing x NX XX",
    "HINCRBY text f x",
    "HINCRBY text f 1",
    "HINCRBYFLOAT text f x",
    "HINCRBYFLOAT text f 1",
    "HINCRBYFLOAT missing f inf",
    "HINCRBYFLOAT text f inf",
    "HRANDFIELD text x",
    "HRANDFIELD text 1 NONSENSE",
    "HRANDFIELD missing x",
    "HRANDFIELD missing 1 NONSENSE",
    "HSET text f",
    "HSET text f v g",
    "HSCAN text x",
    "HSCAN text 0 COUNT x",
    "HSCAN missing 0 COUNT x",
    "SRANDMEMBER text x",
    "SRANDMEMBER text 1 2",
    "SRANDMEMBER text 1",
    "SPOP text x",
    "SPOP text 1 2",
    "SPOP text 0",
    "SPOP missing x",
    "SISMEMBER text m",
    "SMISMEMBER text m",
    "SINTER missing text",
    "SINTER text missing",
    "SINTERSTORE wrong missing text",
    "SINTERSTORE missing missing text",
    "SUNION missing text",
    "SUNIONSTORE missing missing text",
    "SDIFF missing text",
    "SDIFF missing missing2 text",
    "SDIFFSTORE missing missing2 text",
    "ZADD text x m",
    "ZADD text NX XX 1 m",
    "ZADD text 1",
    "ZADD missing XX x m",
    "ZADD missing 1 m x n",
    "EXISTS missing",
    "ZADD text INCR 1 m 2 n",
    "ZINCRBY text x m",
    "ZINCRBY missing nan m",
    "ZSCORE text m",
    "ZMSCORE text m",
    "ZRANK text m",
    "ZRANGE text x y",
    "ZRANGE missing x y",
    "ZRANGE text 0 1 NONSENSE",
    "ZRANGE missing 0 1 LIMIT 0 x",
    "ZRANGE text 0 1 LIMIT 0 1",
    "ZRANGE text x y BYSCORE",
    "ZRANGE missing x y BYSCORE",
    "ZRANGE missing 0 1 BYSCORE LIMIT x 1",
    "ZRANGE missing 0 1 BYSCORE LIMIT 0",
    "ZRANGE missing [a [b BYLEX WITHSCORES",
    "ZRANGE text [a [b BYLEX WITHSCORES",
    "ZRANGE missing [a [b WITHSCORES BYLEX LIMIT 0 1",
    "ZRANGE missing [a [b BYLEX LIMIT x 1",
    "ZRANGE missing [a [b BYLEX NONSENSE",
    "ZRANGE missing [a [b BYLEX BYSCORE WITHSCORES",
    "ZRANGE missing 0 1 BYSCORE BYSCORE",
    "ZRANGE missing 0 1 BYSCORE BYLEX",
    "ZRANGE missing 0 1 REV REV",
    "ZRANGE missing 0 1 WITHSCORES WITHSCORES",
    "ZREVRANGE missing 0 1 LIMIT 0 1",
    "ZREVRANGE missing 0 1 REV",
    "ZREVRANGE missing 0 1 BYSCORE",
    "ZRANGEBYSCORE missing x 1",
    "ZRANGEBYSCORE text x 1",
    "ZRANGEBYSCORE text 0 1 LIMIT x 1",
    "ZRANGEBYSCORE text 0 1 BYSCORE",
    "ZCOUNT text x 1",
    "ZCOUNT missing x 1",
    "ZREMRANGEBYSCORE text x 1",
    "ZREMRANGEBYSCORE missing x 1",
    "ZREMRANGEBYRANK text x 1",
    "ZREMRANGEBYRANK missing x 1",
    "ZPOPMIN text x",
    "ZPOPMIN text -1",
    "ZPOPMIN text 0",
    "ZPOPMIN missing x",
    "ZPOPMIN missing 1 2",
    "ZSCAN text x",
    "ZSCAN text 0 NONSENSE",
    "COPY missing wrong DB x",
    "COPY missing missing NONSENSE",
    "RENAMENX missing wrong",
    "MSETNX missing 1 missing2",
    "LCS text h",
    "LCS h text IDX LEN",
    "LCS missing h",
    "OBJECT ENCODING missing",
    "DEL wrong missing missing2",
    // Zero has a sign.
    "ZADD zero 0 m",
    "ZINCRBY zero -0 m",
    "ZSCORE zero m",
    "ZMSCORE zero m",
    "ZADD zero -0 n",
    "ZSCORE zero n",
    "ZMSCORE zero m n",
    "ZINCRBY zero -0 new",
    "ZSCORE zero new",
    "ZMSCORE zero new",
    "ZINCRBY zero -0 new",
    "ZMSCORE zero new",
    "ZADD zero -0 p",
    "ZINCRBY zero -0 p",
    "ZSCORE zero p",
    "ZINCRBY zero 0 p",
    "ZSCORE zero p",
    "ZADD zero 0 p",
    "ZSCORE zero p",
    "ZADD zero 1 p",
    "ZINCRBY zero -1 p",
    "ZSCORE zero p",
    "ZADD zero INCR -0 q",
    "ZSCORE zero q",
    "ZRANGE zero 0 -1 WITHSCORES",
    "ZRANGE zero -0 0 BYSCORE WITHSCORES",
    "ZSCAN zero 0",
    // Redis packs integers as such, up to a half of 64 bits, if the set is small and its members are short.
    "ZADD zlarge 1e17 a 123456789012345680000 b -123456789012345680 c 4611686018427387904 d 4611686018427388928 e 0.5 f 1e300 g",
    "ZSCAN zlarge 0",
    "ZSCAN zlarge 0 MATCH [ac]",
    "ZADD zlong 1e17 mmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmm",
    "ZSCAN zlong 0",
    "ZRANGE zlarge 0 -1 WITHSCORES",
    "ZPOPMIN zero",
    "DEL zero text h l s z",
    // Patterns.
    "DEL - a- ] [a b \\",
    "SET - 1",
    "KEYS [-a]",
    "KEYS [a-",
    "KEYS [a-]",
    "KEYS [^a-]",
    "SET - 1",
    "KEYS -**",
    "KEYS **-",
    "KEYS [",
    "KEYS []",
    "KEYS [,-.]",
    "KEYS [.-,]",
    "KEYS [\\-]",
    "KEYS \\-",
    "KEYS -\\",
    "KEYS",
];

/// Commands for an empty server, sent once: Redis refuses a second `BGSAVE` while the first one is under way.
const ONCE_AS_REDIS: &[&str] = &[
    "DBSIZE",
    "RANDOMKEY",
    "MEMORY",
    "MEMORY NONSENSE",
    "MEMORY USAGE",
    "MEMORY USAGE none",
    "MEMORY USAGE none SAMPLES 5",
    "MEMORY USAGE none SAMPLES x",
    "MEMORY USAGE none SAMPLES -1",
    "MEMORY USAGE none NONSENSE 1",
    "MEMORY USAGE none SAMPLES",
    "SET only value",
    "DBSIZE",
    "RANDOMKEY",
    "SAVE",
    "SAVE x",
    "MULTI",
    "SAVE",
    "EXEC",
    "BGSAVE x",
    "BGSAVE SCHEDULE x",
    "LASTSAVE x",
    "BGSAVE",
    "QUIT",
];

/// Commands of which no list compares the replies, each with the reason.
const NOT_IN_A_LIST: &[(&str, &str)] = &[
    ("client|info", "compared by a_connection_tells_of_itself_as_redis_does"),
    ("client|no-touch", "Redis 7.2 is the first to have it"),
    ("client|setinfo", "Redis 7.2 is the first to have it"),
    ("config|help", "lists the subcommands of this server"),
    ("ksf.backup", "Redis has none"),
    ("ksf.keys", "Redis has none"),
    ("memory|help", "lists the subcommands of this server"),
];

/// Texts of floating-point numbers, used wherever a command takes one.
const FRACTIONS: [&str; 43] = [
    "1e400",
    "-1e400",
    "1e-400",
    "1e-310",
    "0x10",
    "0x1p4",
    "-0X1.8p1",
    "0x1p-1080",
    "0x1p2000",
    "0x1p20000",
    "0x",
    "0x1g",
    "0x.p1",
    "\t1",
    "1\t",
    "",
    "inf",
    "+inf",
    "-INF",
    "infinity",
    "infinit",
    "nan",
    "-nan",
    "nan(1)",
    "1.",
    ".5",
    "+.5",
    "+5",
    "1e5",
    "1e+5",
    "1e",
    "e5",
    "--1",
    "1_0",
    "1d0",
    "5e-324",
    "2e-324",
    "1.7976931348623159e308",
    "1\0",
    "(1",
    "00012",
    "0x1.fffffffffffffp3",
    "0e999",
];

#[test]
fn fractions_are_read_as_in_redis() {
    own_network();
    let Some(mut redis) = Redis::start() else { return };
    let folder = tempfile::tempdir().unwrap();
    let serving = Serving::start(EngineKind::Epoll, folder.path());
    let mut client = serving.connect();
    for text in FRACTIONS {
        let (open, of_score) = (format!("({text}"), [text, "m"]);
        let questions: Vec<Vec<&str>> = vec![
            vec!["DEL", "z", "s", "h"],
            [&["ZADD", "z"][..], &of_score].concat(),
            vec!["ZSCORE", "z", "m"],
            vec!["ZRANGEBYSCORE", "z", text, "+inf"],
            vec!["ZCOUNT", "z", "-inf", text],
            vec!["ZCOUNT", "z", &open, "+inf"],
            vec!["ZINCRBY", "z", text, "other"],
            vec!["ZADD", "z", "INCR", text, "third"],
            vec!["SET", "s", "1"],
            vec!["INCRBYFLOAT", "s", text],
            vec!["SET", "s", text],
            vec!["INCRBYFLOAT", "s", "1"],
            vec!["HINCRBYFLOAT", "h", "f", text],
            vec!["HSET", "h", "g", text],
            vec!["HINCRBYFLOAT", "h", "g", "1"],
            vec!["ZREMRANGEBYSCORE", "z", "-inf", text],
        ];
        for question in questions {
            client.send(&question);
            redis.client.send(&question);
            assert_eq!(client.reply(), redis.client.reply(), "{question:?}");
        }
    }
    serving.stop();
}

/// Names and options may be any bytes.
#[test]
fn errors_name_unknown_words_as_in_redis() {
    own_network();
    let Some(mut redis) = Redis::start() else { return };
    let folder = tempfile::tempdir().unwrap();
    let serving = Serving::start(EngineKind::Epoll, folder.path());
    let mut client = serving.connect();
    let (long, name) = ([b'a'; 200], [b'n'; 130]);
    let questions: [&[&[u8]]; 10] = [
        &[b"\xff\xfebad", b"\xe9", b"x\r\ny"],
        &[b"a\0b", b"c\0d", b"e"],
        &[&name, &long[..100], &long[..50], b"behind"],
        &[b"nope", &long, b"behind"],
        &[b"client", b"\xff\r"],
        &[b"cluster", &name, b"x"],
        &[b"expire", b"none", b"1", b"\xe4\r\nx\r\n"],
        &[b"client", b"kill", b"type", b"\xe4\0x"],
        &[b"client", b"kill", b"user", b"\xff\n"],
        &[b"hello", b"3", b"\xe4"],
    ];
    for words in questions {
        let told = [first_line_of(&mut client, words), first_line_of(&mut redis.client, words)];
        assert_eq!(told[0].escape_ascii().to_string(), told[1].escape_ascii().to_string(), "{words:?}");
    }
    serving.stop();
}

/// Sends a command of these words. Returns the first line of the reply.
fn first_line_of<S: Read + Write>(client: &mut Client<S>, words: &[&[u8]]) -> Vec<u8> {
    let mut bytes = format!("*{}\r\n", words.len()).into_bytes();
    for word in words {
        bytes.extend_from_slice(&[format!("${}\r\n", word.len()).as_bytes(), word, b"\r\n"].concat());
    }
    client.0.get_mut().write_all(&bytes).unwrap();
    let mut line = Vec::new();
    client.0.read_until(b'\n', &mut line).unwrap();
    line
}

/// Commands that may invalidate a watched key.
const TOUCHING: &[&str] = &[
    "SMOVE a b m",
    "SMOVE b a m",
    "SMOVE a b x",
    "SMOVE a a m",
    "SMOVE a b none",
    "SMOVE none b m",
    "LTRIM l 0 -1",
    "LTRIM l 0 0",
    "LTRIM l 5 9",
    "LTRIM none 0 -1",
    "SADD a m",
    "SADD a n",
    "SREM a none",
    "SREM a m",
    "SPOP none",
    "HSET h f v",
    "HSET h f w",
    "HSETNX h f z",
    "HDEL h none",
    "HINCRBY h n 0",
    "HINCRBYFLOAT h n 0",
    "ZADD z 1 m",
    "ZADD z 2 m",
    "ZADD z NX 5 m",
    "ZADD z XX 9 none",
    "ZADD z GT 1 m",
    "ZINCRBY z 0 m",
    "ZREMRANGEBYSCORE z 100 200",
    "SET s v",
    "SETNX s 1",
    "GETSET s v",
    "SETEX s 100 v",
    "EXPIRE s 100",
    "EXPIRE s 100 XX",
    "EXPIRE s -1",
    "EXPIRE none 10",
    "PERSIST s",
    "APPEND s ",
    "SETRANGE s 0 v",
    "GETEX s",
    "GETEX s PERSIST",
    "GETEX s EX 100",
    "GETDEL none",
    "GETDEL s",
    "MSETNX s 1 h 2",
    "INCRBY n 0",
    "INCRBYFLOAT n 0",
    "LSET l 0 1",
    "LREM l 0 none",
    "LPUSHX none 1",
    "LINSERT l BEFORE nn x",
    "LMOVE l l LEFT LEFT",
    "LMOVE l l LEFT RIGHT",
    "RPOPLPUSH l none",
    "COPY s h",
    "COPY s h REPLACE",
    "RENAME s s",
    "RENAMENX s h",
    "RENAME s none",
    "SINTERSTORE a a a",
    "SUNIONSTORE none none2",
    "SDIFFSTORE a none",
    "DEL none",
    "DEL s",
    "TOUCH s",
    "LMOVE o o LEFT RIGHT",
    "LMOVE o o LEFT LEFT",
    "LMOVE o l LEFT RIGHT",
    "LMOVE none none LEFT RIGHT",
    "RPOPLPUSH o o",
    "RPOPLPUSH l l",
    "MULTI;RPOPLPUSH o o;EXEC",
    "MULTI;LTRIM o 0 -1;EXEC",
    "MULTI;SMOVE a a m;EXEC",
    "MULTI;GET s;EXEC",
    "MULTI;SET s v;EXEC",
    "MULTI;SET none v;DEL none;EXEC",
    "SMOVE a none m",
    "SMOVE none none m",
    "SMOVE s b m",
    "LTRIM o 0 -1",
    "LTRIM l -100 100",
    "LTRIM l 1 0",
    "LTRIM s 0 -1",
    "LPOP l 0",
    "LPOP none 0",
    "LPOP l 9",
    "RPOP l",
    "RPOP l 0",
    "RPOP none",
    "RPOP none 0",
    "RPOP s",
    "LPUSH l 3",
    "LPUSH none 1",
    "LPUSH s 1",
    "RPUSHX l 3",
    "LSET l 0 x",
    "LSET l 9 x",
    "LINSERT l BEFORE 1 x",
    "LINSERT none BEFORE 1 x",
    "LREM l 0 1",
    "EXPIREAT e 4000000000",
    "EXPIREAT s 1",
    "EXPIREAT none 4000000000",
    "PEXPIRE s 100000",
    "PEXPIRE s 100000 XX",
    "PEXPIRE s -1",
    "PEXPIRE none 100000",
    "PEXPIREAT e 4000000000000",
    "PEXPIREAT e 4000000000000 GT",
    "PEXPIREAT e 4000000000000 NX",
    "PERSIST e",
    "PERSIST l",
    "PERSIST none",
    "GETEX e",
    "GETEX e PERSIST",
    "GETEX e PXAT 4000000000000",
    "GETEX e PXAT 4000000000001",
    "GETEX e PXAT 1",
    "GETEX none PERSIST",
    "PEXPIREAT el 4000000000000",
    "PERSIST el",
    "EXPIRE l 100",
    "EXPIRE l 100 GT",
    "SET e v KEEPTTL",
    "SET e v PXAT 4000000000000",
    "SET s v NX",
    "SET none v XX",
    "SET s v GET",
    "SET l v GET",
    "SETRANGE s 5 ",
    "SETRANGE none 0 ",
    "APPEND none ",
    "SETBIT s 1 1",
    "SETBIT s 0 0",
    "SETBIT s 1 0",
    "SETBIT s 100 0",
    "SETBIT none 0 0",
    "MSET s v",
    "MSET s v s v",
    "MSETNX none 1 none2 2",
    "INCRBY none 0",
    "INCRBYFLOAT none 0",
    "INCR s",
    "DECR s",
    "DECR n",
    "DECR none",
    "DECRBY s 1",
    "DECRBY n 0",
    "DECRBY none 0",
    "HSET h f v g 1",
    "HMSET h f v",
    "HSETNX h new 1",
    "HINCRBY h new 0",
    "HINCRBYFLOAT h new 0",
    "HINCRBY h f 1",
    "HDEL h f none",
    "HDEL none f",
    "SADD a m x",
    "SADD a m new",
    "SREM none m",
    "SPOP a 0",
    "SREM a x;SPOP a 5",
    "SPOP none 5",
    "SRANDMEMBER a 0",
    "SINTERSTORE a a",
    "SINTERSTORE none a none2",
    "SINTERSTORE s a none2",
    "SUNIONSTORE a a",
    "SUNIONSTORE s a",
    "SUNIONSTORE s none",
    "SDIFFSTORE a a none",
    "SDIFFSTORE none none",
    "ZADD z CH 1 m",
    "ZADD z XX 1 m",
    "ZADD z INCR 0 m",
    "ZADD z NX INCR 1 m",
    "ZADD z LT 5 m",
    "ZADD z 1 m 1 new",
    "ZADD none XX 1 m",
    "ZINCRBY z 1 m",
    "ZINCRBY none 0 m",
    "ZINCRBY z -1 m;ZINCRBY z 1 m",
    "ZADD zz -0 m",
    "ZADD zz 0 m",
    "ZINCRBY zz -0 m",
    "ZPOPMIN z 0",
    "ZPOPMIN none",
    "ZPOPMAX z 9",
    "ZREM z none",
    "ZREMRANGEBYRANK z 5 9",
    "ZREMRANGEBYSCORE z 1 1",
    "COPY s s",
    "COPY none s REPLACE",
    "COPY s none",
    "RENAME l l",
    "RENAMENX s s",
    "RENAMENX s none",
    "RENAME s e",
    "RENAME none none",
    "GETDEL e",
    "GETSET none v",
    "SETNX none v",
    "PSETEX s 100000 v",
    "UNLINK s",
    "UNLINK none",
    "TOUCH l",
    "OBJECT ENCODING s",
    "DEL s;SET s v",
    "DEL l;RPUSH l 1 2",
    "EXPIRE none -1",
    "PEXPIREAT s 1;SET s v",
    "SET none 1;DEL none",
    "RPUSH none 1;LPOP none",
    "SADD none m;SREM none m",
    "HSET none f v;HDEL none f",
    "SET none 1;EXPIRE none -1",
    "FLUSHALL",
    "FLUSHDB ASYNC",
    "SET none 1;FLUSHALL",
    "SADD none m;FLUSHDB",
    "SET none 1;FLUSHALL;SET s v",
    "FLUSHALL;SET s v",
    "FLUSHALL;SET none 1;DEL none",
];

/// Watched keys, each with the commands that create it.
const KEYS: [(&str, &str); 12] = [
    ("a", "SADD a m x"),
    ("b", "SADD b m y"),
    ("l", "RPUSH l 1 2"),
    ("o", "RPUSH o 1"),
    ("h", "HSET h f v n 1"),
    ("z", "ZADD z 1 m"),
    ("zz", "ZADD zz 0 m"),
    ("s", "SET s v"),
    ("n", "SET n 1"),
    ("e", "SET e v PXAT 4000000000000"),
    ("el", "RPUSH el 1;PEXPIREAT el 4000000000000"),
    ("none", ""),
];

/// `EXEC` returns null after a command that touched a watched key, also one that was created and removed since `WATCH`.
#[test]
fn watched_keys_are_touched_by_the_same_commands_as_in_redis() {
    own_network();
    let Some(redis) = Redis::start() else { return };
    let folder = tempfile::tempdir().unwrap();
    let serving = Serving::start(EngineKind::Epoll, folder.path());
    let socket = redis.folder.path("redis");
    let mut ours: Vec<_> = (0..=KEYS.len()).map(|_| serving.connect()).collect();
    let connect = |_| Client(BufReader::new(UnixStream::connect(&socket).unwrap()));
    let mut theirs: Vec<_> = (0..=KEYS.len()).map(connect).collect();
    let mut different = Vec::new();
    for touching in TOUCHING {
        let (is, wanted) = (touched(&mut ours, touching), touched(&mut theirs, touching));
        if is != wanted {
            different.push(format!("{touching}\n  is     {is:?}\n  wanted {wanted:?}"));
        }
    }
    assert!(different.is_empty(), "{}", different.join("\n"));
    // A difference that docs/store.md states: the store does not know which keys were written before a flush.
    let written_before_flush = "DEL s;FLUSHALL";
    assert_eq!(touched(&mut ours, written_before_flush).pop().as_deref(), Some("none: no array"));
    assert_eq!(touched(&mut theirs, written_before_flush).pop().as_deref(), Some("none: [+PONG]"));
    serving.stop();
}

/// Has the first client send commands while each other client watches a key. Returns its replies, and that of `EXEC` to each
/// other client.
fn touched<S: Read + Write>(clients: &mut [Client<S>], touching: &str) -> Vec<String> {
    let Some((other, watchers)) = clients.split_first_mut() else { return Vec::new() };
    other.ask("FLUSHALL");
    let commands = KEYS.iter().flat_map(|(_, commands)| commands.split(';')).filter(|command| !command.is_empty());
    commands.for_each(|command| drop(other.ask(command)));
    for (watcher, (key, _)) in watchers.iter_mut().zip(KEYS) {
        watcher.ask(&format!("WATCH {key}"));
    }
    let mut told: Vec<String> = touching.split(';').map(|command| other.ask(command)).collect();
    for (watcher, (key, _)) in watchers.iter_mut().zip(KEYS) {
        let exec = ["MULTI", "PING", "EXEC"].map(|command| watcher.ask(command));
        told.push(format!("{key}: {}", exec[2]));
    }
    told
}

/// A lease that has expired may be taken with `WATCH`, whether the store has removed it by then or not.
#[test]
fn the_removal_of_an_expired_key_ends_no_transaction() {
    own_network();
    let folder = tempfile::tempdir().unwrap();
    let serving = Serving::start(EngineKind::Epoll, folder.path());
    let (mut client, mut other) = (serving.connect(), serving.connect());
    for lease in 0..50 {
        client.ask(&format!("SET {lease} a PX 1"));
        wait_until("it expires", || client.ask(&format!("EXISTS {lease}")) == ":0");
        client.ask(&format!("WATCH {lease}"));
        wait_until("it is removed", || other.ask("DBSIZE") == ":0");
        assert_eq!(["MULTI", "PING", "EXEC"].map(|command| client.ask(command))[2], "[+PONG]", "lease {lease}");
    }
    serving.stop();
}

#[test]
fn saves_memory_and_the_end_of_a_connection_are_answered_as_by_redis() {
    own_network();
    let Some(mut redis) = Redis::start() else { return };
    let folder = tempfile::tempdir().unwrap();
    let serving = Serving::start(EngineKind::Epoll, folder.path());
    let mut client = serving.connect();
    let mut different = Vec::new();
    for question in ONCE_AS_REDIS {
        let (is, wanted) = (client.ask(question), redis.client.ask(question));
        if is != wanted {
            different.push(format!("{question}\n  is     {is}\n  wanted {wanted}"));
        }
    }
    assert!(different.is_empty(), "{}", different.join("\n"));
    // QUIT was the last one.
    assert_eq!((stream::read_rest(&mut client.0), stream::read_rest(&mut redis.client.0)), (vec![], vec![]));
    let mut client = serving.connect();
    let mut peer = Client(BufReader::new(UnixStream::connect(redis.folder.path("redis")).unwrap()));
    // The numbers differ.
    for question in ["LASTSAVE", "MEMORY USAGE only", "MEMORY USAGE only SAMPLES 0"] {
        for reply in [client.ask(question), peer.ask(question)] {
            assert!(reply.strip_prefix(':').is_some_and(|number| number.parse::<u64>().is_ok()), "{question}: {reply}");
        }
    }
    serving.stop();
}

/// Whoever adds a command adds lines to the lists that are compared with Redis.
#[test]
fn every_command_is_in_a_list_that_is_compared_with_redis() {
    own_network();
    let folder = tempfile::tempdir().unwrap();
    let serving = Serving::start(EngineKind::Epoll, folder.path());
    let mut client = serving.connect();
    let listed = client.ask("COMMAND LIST");
    let all: Vec<&str> = listed.trim_matches(['[', ']']).split(' ').collect();
    assert!(all.len() > 160, "{all:?}");
    let asked = |commands: &[&str]| -> HashSet<String> {
        let commands = commands.iter().flat_map(|commands| commands.split(';'));
        commands
            .flat_map(|command| {
                let mut words = command.split(' ').map(str::to_lowercase);
                let name = words.next().unwrap_or_default();
                let subcommand = words.next().map(|word| format!("{name}|{word}"));
                [Some(name), subcommand].into_iter().flatten()
            })
            .collect()
    };
    let compared =
        asked(&[SAME_AS_REDIS, ONCE_AS_REDIS, TOUCHING, connections::SAME_AS_REDIS, keys::SAME_AS_REDIS].concat());
    let reasons: HashMap<&str, &str> = NOT_IN_A_LIST.iter().copied().collect();
    for name in &all {
        assert!(compared.contains(*name) != reasons.contains_key(name), "{name} is in no list, or in two");
    }
    for (name, reason) in &reasons {
        assert!(all.contains(name), "there is no {name}: {reason}");
    }
    let touching = asked(TOUCHING);
    let mut writes = 0;
    for name in all.iter().filter(|name| !name.contains('|')) {
        let about = client.ask(&format!("COMMAND INFO {name}"));
        let is_write = about.split(['+', ' ', ']', '[']).any(|word| word == "write");
        assert!(!is_write || touching.contains(*name), "{name} writes, and no WATCH is compared with it");
        writes += usize::from(is_write);
    }
    assert!(writes > 60, "{writes} commands write");
    serving.stop();
}

#[test]
fn replies_are_those_of_redis() {
    own_network();
    let Some(mut redis) = Redis::start() else { return };
    let peer = &mut redis.client;
    let folder = tempfile::tempdir().unwrap();
    let serving = Serving::start(EngineKind::Epoll, folder.path());
    let mut client = serving.connect();
    for version in ["2", "3"] {
        client.ask(&format!("HELLO {version}"));
        peer.ask(&format!("HELLO {version}"));
        // Redis returns keys in the order of its hash.
        let sorted = |question: &str, reply: String| {
            let mut words: Vec<&str> = reply.trim_matches(['[', ']']).split(' ').collect();
            words.sort_unstable();
            if question.starts_with("KEYS ") { words.join(" ") } else { reply }
        };
        let mut different = Vec::new();
        for question in SAME_AS_REDIS {
            let (is, wanted) = (sorted(question, client.ask(question)), sorted(question, peer.ask(question)));
            if is != wanted {
                different.push(format!("RESP{version} {question}\n  is     {is}\n  wanted {wanted}"));
            }
        }
        assert!(different.is_empty(), "{}", different.join("\n"));
        for key in peer.ask("KEYS *").trim_matches(['[', ']']).split(' ') {
            assert_eq!(client.ask(&format!("DEL {key}")), ":1", "RESP{version}: {key}");
            peer.ask(&format!("DEL {key}"));
        }
        assert_eq!(client.ask("DBSIZE"), ":0", "RESP{version}");
    }
    serving.stop();
}

#[test]
fn conversation_is_remembered_after_a_restart() {
    own_network();
    for engine in engines() {
        let folder = tempfile::tempdir().unwrap();
        let serving = Serving::start(engine, folder.path());
        let mut client = serving.connect();
        for (question, answer) in CONVERSATION {
            let answered = client.ask(question);
            assert_eq!(answered, answer.trim_end(), "{engine}: {question}");
        }
        serving.stop();
        let serving = Serving::start(engine, folder.path());
        let mut client = serving.connect();
        assert_eq!(
            client.ask("MGET greeting a b big short"),
            "[third-part nil nil 9223372036854775807 nil]",
            "{engine}"
        );
        assert_eq!(client.ask("DBSIZE"), ":2", "{engine}");
        serving.stop();
    }
}

/// Sends bytes and shuts that direction down. Returns all bytes of the peer.
fn all_of<S: Read + Write>(mut stream: S, bytes: &[u8], shutdown: impl Fn(&S)) -> Vec<u8> {
    // The peer may close the connection before it has received all of them.
    let _ = stream.write_all(bytes);
    shutdown(&stream);
    let mut sent = Vec::new();
    let _ = stream.read_to_end(&mut sent);
    sent
}

#[test]
fn malformed_commands_get_the_replies_of_redis() {
    own_network();
    let Some(redis) = Redis::start() else { return };
    let socket = redis.folder.path("redis");
    for engine in engines() {
        let folder = tempfile::tempdir().unwrap();
        let serving = Serving::start(engine, folder.path());
        for text in SAME_BYTES_AS_REDIS {
            let theirs = UnixStream::connect(&socket).unwrap();
            let theirs = all_of(theirs, text.as_bytes(), |stream| stream.shutdown(Shutdown::Write).unwrap());
            let ours = stream::connect(serving.address());
            let ours = all_of(ours, text.as_bytes(), |stream| drop(stream.shutdown(Shutdown::Write)));
            assert_eq!(ours.escape_ascii().to_string(), theirs.escape_ascii().to_string(), "{engine}: {text:?}");
        }
        serving.stop();
    }
}

/// The length of a command bounds its arguments, as in Redis, and not their number.
#[test]
fn command_with_more_than_a_million_arguments_is_carried_out() {
    const KEYS: usize = 1_050_000;
    own_network();
    for engine in engines() {
        let folder = tempfile::tempdir().unwrap();
        let limits = Limits { message_bytes_max: 8 << 20, connection_bytes_max: 8 << 20, ..Limits::default() };
        let serving = Serving::start_with(engine, folder.path(), limits);
        let mut client = serving.connect();
        client.ask("SET a 1");
        let command = [format!("*{}\r\n$3\r\nDEL\r\n", KEYS + 1).into_bytes(), b"$1\r\na\r\n".repeat(KEYS)].concat();
        client.0.get_mut().write_all(&command).unwrap();
        assert_eq!(client.reply(), ":1", "{engine}");
        assert_eq!(client.ask("PING"), "+PONG", "{engine}");
        serving.stop();
    }
}
