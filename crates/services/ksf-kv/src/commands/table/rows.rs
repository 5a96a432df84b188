//! The rows of the table, in the words of Redis; `commands!` and `subcommands!` say what each column is.

use super::{
    ALL, Command, FIRST, Facts, KEEPS, KeySpec, OTHERS, PAIRS, READS, REMOVES, SECOND, Subcommand, TWO, WRITES,
    category, flag,
};
use crate::commands::{
    about, backup, bits, clients, cluster, hashes, info, keys, lcs, lists, object, range, scan, server, sets,
    sorted_sets, strings, transactions,
};

/// In the order of their names.
pub(in crate::commands) static COMMANDS: &[Command] = commands! {
    "append" 3 WRITES strings::append, [WRITE DENYOOM FAST] [STRING] [] ["RW insert" FIRST]
        "string" "2.0.0" "Appends to a string, and makes one where there is none.";
    "asking" 1 READS cluster::asking, [FAST] [CONNECTION] [] []
        "cluster" "3.0.0" "Would let the next command see a slot that moves; slots do not move here.";
    "auth" -2 READS server::auth, [NOSCRIPT LOADING STALE FAST NO_AUTH ALLOW_BUSY] [CONNECTION] [] []
        "connection" "1.0.0" "Tells the password.";
    "bgsave" -1 READS server::bgsave, [ADMIN NOSCRIPT NO_ASYNC_LOADING] [] [] []
        "server" "1.0.0" "Answers when all that was acknowledged is on the medium, as SAVE.";
    "bitcount" -2 READS bits::bitcount, [READONLY] [BITMAP] [] ["RO access" FIRST]
        "bitmap" "2.6.0" "Counts the bits of a string, or of a part of it, that are set.";
    "client" -2 READS clients::client, [] [] [] []
        "connection" "2.4.0" "What concerns connections." with CLIENT;
    "cluster" -2 READS cluster::cluster, [] [] [] []
        "cluster" "3.0.0" "What concerns the map of slots." with CLUSTER;
    "command" -1 READS about::command, [LOADING STALE] [CONNECTION] ["nondeterministic_output_order"] []
        "server" "2.8.13" "Tells of the commands that there are." with COMMAND;
    "config" -2 READS server::config, [] [] [] []
        "server" "2.0.0" "What concerns the settings." with CONFIG;
    "copy" -3 WRITES keys::copy, [WRITE DENYOOM] [KEYSPACE] [] ["RO access" FIRST "OW update" SECOND]
        "generic" "6.2.0" "Copies a key with all that belongs to it.";
    "dbsize" 1 READS server::dbsize, [READONLY FAST] [KEYSPACE] ["request_policy:all_shards" "response_policy:agg_sum"] []
        "server" "1.0.0" "Counts the keys.";
    "decr" 2 WRITES strings::decr, [WRITE DENYOOM FAST] [STRING] [] ["RW access update" FIRST]
        "string" "1.0.0" "Takes one from a whole number.";
    "decrby" 3 WRITES strings::decrby, [WRITE DENYOOM FAST] [STRING] [] ["RW access update" FIRST]
        "string" "1.0.0" "Takes a number from a whole number.";
    "del" -2 REMOVES keys::del, [WRITE] [KEYSPACE] ["request_policy:multi_shard" "response_policy:agg_sum"] ["RM delete" ALL]
        "generic" "1.0.0" "Takes keys out.";
    "discard" 1 READS transactions::discard, [NOSCRIPT LOADING STALE FAST ALLOW_BUSY] [TRANSACTION] [] []
        "transactions" "2.0.0" "Ends a transaction without carrying it out.";
    "echo" 2 READS server::echo, [LOADING STALE FAST] [CONNECTION] [] []
        "connection" "1.0.0" "Answers what it was told.";
    "exec" 1 WRITES transactions::exec, [NOSCRIPT LOADING STALE SKIP_SLOWLOG] [TRANSACTION] [] []
        "transactions" "1.2.0" "Carries out a transaction.";
    "exists" -2 READS keys::exists, [READONLY FAST] [KEYSPACE] ["request_policy:multi_shard" "response_policy:agg_sum"] ["RO" ALL]
        "generic" "1.0.0" "Counts those of the keys that are there.";
    "expire" -3 KEEPS keys::expire, [WRITE FAST] [KEYSPACE] [] ["RW update" FIRST]
        "generic" "1.0.0" "Sets the seconds after which a key ends.";
    "expireat" -3 KEEPS keys::expireat, [WRITE FAST] [KEYSPACE] [] ["RW update" FIRST]
        "generic" "1.2.0" "Sets the second, since 1970, at which a key ends.";
    "expiretime" 2 READS keys::expiretime, [READONLY FAST] [KEYSPACE] [] ["RO access" FIRST]
        "generic" "7.0.0" "Tells the second, since 1970, at which a key ends.";
    "flushall" -1 REMOVES keys::flush, [WRITE] [KEYSPACE DANGEROUS] ["request_policy:all_shards" "response_policy:all_succeeded"] []
        "server" "1.0.0" "Takes every key out.";
    "flushdb" -1 REMOVES keys::flush, [WRITE] [KEYSPACE DANGEROUS] ["request_policy:all_shards" "response_policy:all_succeeded"] []
        "server" "1.0.0" "Takes every key out.";
    "get" 2 READS strings::get, [READONLY FAST] [STRING] [] ["RO access" FIRST]
        "string" "1.0.0" "Tells a string.";
    "getbit" 3 READS bits::getbit, [READONLY FAST] [BITMAP] [] ["RO access" FIRST]
        "bitmap" "2.2.0" "Tells a bit of a string.";
    "getdel" 2 REMOVES strings::getdel, [WRITE FAST] [STRING] [] ["RW access delete" FIRST]
        "string" "6.2.0" "Tells a string and takes it out.";
    "getex" -2 KEEPS strings::getex, [WRITE FAST] [STRING] [] ["RW access update" FIRST]
        "string" "6.2.0" "Tells a string and sets when it ends.";
    "getrange" 4 READS strings::getrange, [READONLY] [STRING] [] ["RO access" FIRST]
        "string" "2.4.0" "Tells a part of a string.";
    "getset" 3 WRITES strings::getset, [WRITE DENYOOM FAST] [STRING] [] ["RW access update" FIRST]
        "string" "1.0.0" "Sets a string and tells what it was before.";
    "hdel" -3 REMOVES hashes::hdel, [WRITE FAST] [HASH] [] ["RW delete" FIRST]
        "hash" "2.0.0" "Takes fields out of a hash.";
    "hello" -1 READS server::hello, [NOSCRIPT LOADING STALE FAST NO_AUTH ALLOW_BUSY] [CONNECTION] [] []
        "connection" "6.0.0" "Chooses the version of the protocol, and may tell the password and a name.";
    "hexists" 3 READS hashes::hexists, [READONLY FAST] [HASH] [] ["RO" FIRST]
        "hash" "2.0.0" "Tells whether a hash has a field.";
    "hget" 3 READS hashes::hget, [READONLY FAST] [HASH] [] ["RO access" FIRST]
        "hash" "2.0.0" "Tells the value of a field.";
    "hgetall" 2 READS hashes::hgetall, [READONLY] [HASH] ["nondeterministic_output_order"] ["RO access" FIRST]
        "hash" "2.0.0" "Tells all fields of a hash with their values.";
    "hincrby" 4 WRITES hashes::hincrby, [WRITE DENYOOM FAST] [HASH] [] ["RW access update" FIRST]
        "hash" "2.0.0" "Adds to the whole number in a field.";
    "hincrbyfloat" 4 WRITES hashes::hincrbyfloat, [WRITE DENYOOM FAST] [HASH] [] ["RW access update" FIRST]
        "hash" "2.6.0" "Adds to the number in a field.";
    "hkeys" 2 READS hashes::hkeys, [READONLY] [HASH] ["nondeterministic_output_order"] ["RO access" FIRST]
        "hash" "2.0.0" "Tells the fields of a hash.";
    "hlen" 2 READS hashes::hlen, [READONLY FAST] [HASH] [] ["RO" FIRST]
        "hash" "2.0.0" "Counts the fields of a hash.";
    "hmget" -3 READS hashes::hmget, [READONLY FAST] [HASH] [] ["RO access" FIRST]
        "hash" "2.0.0" "Tells the values of fields.";
    "hmset" -4 WRITES hashes::hset, [WRITE DENYOOM FAST] [HASH] [] ["RW update" FIRST]
        "hash" "2.0.0" "Sets fields.";
    "hrandfield" -2 READS hashes::hrandfield, [READONLY] [HASH] ["nondeterministic_output"] ["RO access" FIRST]
        "hash" "6.2.0" "Tells fields that are drawn at random.";
    "hscan" -3 READS scan::hscan, [READONLY] [HASH] ["nondeterministic_output"] ["RO access" FIRST]
        "hash" "2.8.0" "Goes through the fields of a hash in steps.";
    "hset" -4 WRITES hashes::hset, [WRITE DENYOOM FAST] [HASH] [] ["RW update" FIRST]
        "hash" "2.0.0" "Sets fields, and counts the new ones.";
    "hsetnx" 4 WRITES hashes::hsetnx, [WRITE DENYOOM FAST] [HASH] [] ["RW insert" FIRST]
        "hash" "2.0.0" "Sets a field if it is not there.";
    "hstrlen" 3 READS hashes::hstrlen, [READONLY FAST] [HASH] [] ["RO" FIRST]
        "hash" "3.2.0" "Tells the length of the value of a field.";
    "hvals" 2 READS hashes::hvals, [READONLY] [HASH] ["nondeterministic_output_order"] ["RO access" FIRST]
        "hash" "2.0.0" "Tells the values of a hash.";
    "incr" 2 WRITES strings::incr, [WRITE DENYOOM FAST] [STRING] [] ["RW access update" FIRST]
        "string" "1.0.0" "Adds one to a whole number.";
    "incrby" 3 WRITES strings::incrby, [WRITE DENYOOM FAST] [STRING] [] ["RW access update" FIRST]
        "string" "1.0.0" "Adds a number to a whole number.";
    "incrbyfloat" 3 WRITES strings::incrbyfloat, [WRITE DENYOOM FAST] [STRING] [] ["RW access update" FIRST]
        "string" "2.6.0" "Adds a number to a number.";
    "info" -1 READS info::info, [LOADING STALE] [DANGEROUS] ["nondeterministic_output" "request_policy:all_shards" "response_policy:special"] []
        "server" "1.0.0" "Tells of the server, for people and monitors.";
    "keys" 2 READS keys::keys, [READONLY] [KEYSPACE DANGEROUS] ["request_policy:all_shards" "nondeterministic_output_order"] []
        "generic" "1.0.0" "Tells the keys that match a pattern.";
    "ksf.backup" -2 READS backup::ksf_backup, [ADMIN] [] [] []
        "module" "7.0.0" "Hands the logs to a client that makes a backup.";
    "ksf.keys" -1 READS range::ksf_keys, [READONLY] [KEYSPACE DANGEROUS] ["nondeterministic_output"] []
        "module" "7.0.0" "Tells keys in the order of their bytes, from and to a key or with a prefix.";
    "lastsave" 1 READS server::lastsave, [LOADING STALE FAST] [ADMIN DANGEROUS] ["nondeterministic_output"] []
        "server" "1.0.0" "Tells the time up to which all is on the medium: now.";
    "lcs" -3 READS lcs::lcs, [READONLY] [STRING] [] ["RO access" TWO]
        "string" "7.0.0" "Tells the longest common subsequence of two strings.";
    "lindex" 3 READS lists::lindex, [READONLY] [LIST] [] ["RO access" FIRST]
        "list" "1.0.0" "Tells the element at a place of a list.";
    "linsert" 5 WRITES lists::linsert, [WRITE DENYOOM] [LIST] [] ["RW insert" FIRST]
        "list" "2.2.0" "Puts an element in front of another one or behind it.";
    "llen" 2 READS lists::llen, [READONLY FAST] [LIST] [] ["RO" FIRST]
        "list" "1.0.0" "Counts the elements of a list.";
    "lmove" 5 WRITES lists::lmove, [WRITE DENYOOM] [LIST] [] ["RW access delete" FIRST "RW insert" SECOND]
        "list" "6.2.0" "Takes an element from an end of a list to an end of a list.";
    "lpop" -2 REMOVES lists::lpop, [WRITE FAST] [LIST] [] ["RW access delete" FIRST]
        "list" "1.0.0" "Takes elements from the front of a list.";
    "lpos" -3 READS lists::lpos, [READONLY] [LIST] [] ["RO access" FIRST]
        "list" "6.0.6" "Tells the places of an element in a list.";
    "lpush" -3 WRITES lists::lpush, [WRITE DENYOOM FAST] [LIST] [] ["RW insert" FIRST]
        "list" "1.0.0" "Puts elements in front of a list.";
    "lpushx" -3 WRITES lists::lpushx, [WRITE DENYOOM FAST] [LIST] [] ["RW insert" FIRST]
        "list" "2.2.0" "Puts elements in front of a list that is there.";
    "lrange" 4 READS lists::lrange, [READONLY] [LIST] [] ["RO access" FIRST]
        "list" "1.0.0" "Tells a part of a list.";
    "lrem" 4 KEEPS lists::lrem, [WRITE] [LIST] [] ["RW delete" FIRST]
        "list" "1.0.0" "Takes elements of a value out of a list.";
    "lset" 4 WRITES lists::lset, [WRITE DENYOOM] [LIST] [] ["RW update" FIRST]
        "list" "1.0.0" "Sets the element at a place of a list.";
    "ltrim" 4 REMOVES lists::ltrim, [WRITE] [LIST] [] ["RW delete" FIRST]
        "list" "1.0.0" "Takes out what lies outside of a part of a list.";
    "memory" -2 READS server::memory, [] [] [] []
        "server" "4.0.0" "What concerns memory." with MEMORY;
    "mget" -2 READS strings::mget, [READONLY FAST] [STRING] ["request_policy:multi_shard"] ["RO access" ALL]
        "string" "1.0.0" "Tells several strings.";
    "mset" -3 WRITES strings::mset, [WRITE DENYOOM] [STRING] ["request_policy:multi_shard" "response_policy:all_succeeded"] ["OW update" PAIRS]
        "string" "1.0.1" "Sets several strings.";
    "msetnx" -3 WRITES strings::msetnx, [WRITE DENYOOM] [STRING] ["request_policy:multi_shard" "response_policy:agg_min"] ["OW insert" PAIRS]
        "string" "1.0.1" "Sets several strings if none of their keys is there.";
    "multi" 1 READS transactions::multi, [NOSCRIPT LOADING STALE FAST ALLOW_BUSY] [TRANSACTION] [] []
        "transactions" "1.2.0" "Begins a transaction.";
    "object" -2 READS object::object, [] [] [] []
        "generic" "2.2.3" "What concerns how a value is kept." with OBJECT;
    "persist" 2 KEEPS keys::persist, [WRITE FAST] [KEYSPACE] [] ["RW update" FIRST]
        "generic" "2.2.0" "Lets a key have no end.";
    "pexpire" -3 KEEPS keys::pexpire, [WRITE FAST] [KEYSPACE] [] ["RW update" FIRST]
        "generic" "2.6.0" "Sets the milliseconds after which a key ends.";
    "pexpireat" -3 KEEPS keys::pexpireat, [WRITE FAST] [KEYSPACE] [] ["RW update" FIRST]
        "generic" "2.6.0" "Sets the millisecond, since 1970, at which a key ends.";
    "pexpiretime" 2 READS keys::pexpiretime, [READONLY FAST] [KEYSPACE] [] ["RO access" FIRST]
        "generic" "7.0.0" "Tells the millisecond, since 1970, at which a key ends.";
    "ping" -1 READS server::ping, [FAST] [CONNECTION] ["request_policy:all_shards" "response_policy:all_succeeded"] []
        "connection" "1.0.0" "Asks whether the server answers.";
    "psetex" 4 WRITES strings::psetex, [WRITE DENYOOM] [STRING] [] ["OW update" FIRST]
        "string" "2.6.0" "Sets a string that ends after so many milliseconds.";
    "pttl" 2 READS keys::pttl, [READONLY FAST] [KEYSPACE] ["nondeterministic_output"] ["RO access" FIRST]
        "generic" "2.6.0" "Tells the milliseconds after which a key ends.";
    "quit" -1 READS server::quit, [NOSCRIPT LOADING STALE FAST NO_AUTH ALLOW_BUSY] [CONNECTION] [] []
        "connection" "1.0.0" "Ends the connection.";
    "randomkey" 1 READS keys::randomkey, [READONLY] [KEYSPACE] ["request_policy:all_shards" "nondeterministic_output"] []
        "generic" "1.0.0" "Tells a key that is drawn at random.";
    "readonly" 1 READS cluster::readonly, [LOADING STALE FAST] [CONNECTION] [] []
        "cluster" "3.0.0" "Would let a replica answer; there are none here.";
    "readwrite" 1 READS cluster::readonly, [LOADING STALE FAST] [CONNECTION] [] []
        "cluster" "3.0.0" "Takes READONLY back.";
    "rename" 3 KEEPS keys::rename, [WRITE] [KEYSPACE] [] ["RW access delete" FIRST "OW update" SECOND]
        "generic" "1.0.0" "Gives a key another name.";
    "renamenx" 3 KEEPS keys::renamenx, [WRITE FAST] [KEYSPACE] [] ["RW access delete" FIRST "OW insert" SECOND]
        "generic" "1.0.0" "Gives a key another name that no key has.";
    "reset" 1 READS server::reset, [NOSCRIPT LOADING STALE FAST NO_AUTH ALLOW_BUSY] [CONNECTION] [] []
        "connection" "6.2.0" "Puts the connection into the state in which it began.";
    "rpop" -2 REMOVES lists::rpop, [WRITE FAST] [LIST] [] ["RW access delete" FIRST]
        "list" "1.0.0" "Takes elements from the end of a list.";
    "rpoplpush" 3 WRITES lists::rpoplpush, [WRITE DENYOOM] [LIST] [] ["RW access delete" FIRST "RW insert" SECOND]
        "list" "1.2.0" "Takes an element from the end of a list to the front of a list.";
    "rpush" -3 WRITES lists::rpush, [WRITE DENYOOM FAST] [LIST] [] ["RW insert" FIRST]
        "list" "1.0.0" "Puts elements behind a list.";
    "rpushx" -3 WRITES lists::rpushx, [WRITE DENYOOM FAST] [LIST] [] ["RW insert" FIRST]
        "list" "2.2.0" "Puts elements behind a list that is there.";
    "sadd" -3 WRITES sets::sadd, [WRITE DENYOOM FAST] [SET] [] ["RW insert" FIRST]
        "set" "1.0.0" "Puts members into a set.";
    "save" 1 READS server::save, [ADMIN NOSCRIPT NO_ASYNC_LOADING NO_MULTI] [] [] []
        "server" "1.0.0" "Answers when all that was acknowledged is on the medium.";
    "scan" -2 READS scan::scan, [READONLY] [KEYSPACE] ["nondeterministic_output" "request_policy:special"] []
        "generic" "2.8.0" "Goes through the keys in steps.";
    "scard" 2 READS sets::scard, [READONLY FAST] [SET] [] ["RO" FIRST]
        "set" "1.0.0" "Counts the members of a set.";
    "sdiff" -2 READS sets::sdiff, [READONLY] [SET] ["nondeterministic_output_order"] ["RO access" ALL]
        "set" "1.0.0" "Tells the members of a set that others have not.";
    "sdiffstore" -3 WRITES sets::sdiffstore, [WRITE DENYOOM] [SET] [] ["OW update" FIRST "RO access" OTHERS]
        "set" "1.0.0" "Keeps the members of a set that others have not.";
    "select" 2 READS server::select, [LOADING STALE FAST] [CONNECTION] [] []
        "connection" "1.0.0" "Chooses the database; there is one, 0.";
    "set" -3 WRITES strings::set, [WRITE DENYOOM] [STRING] [] ["RW access update variable_flags" FIRST]
        "string" "1.0.0" "Sets a string.";
    "setbit" 4 WRITES bits::setbit, [WRITE DENYOOM] [BITMAP] [] ["RW access update" FIRST]
        "bitmap" "2.2.0" "Sets a bit of a string.";
    "setex" 4 WRITES strings::setex, [WRITE DENYOOM] [STRING] [] ["OW update" FIRST]
        "string" "2.0.0" "Sets a string that ends after so many seconds.";
    "setnx" 3 WRITES strings::setnx, [WRITE DENYOOM FAST] [STRING] [] ["OW insert" FIRST]
        "string" "1.0.0" "Sets a string if the key is not there.";
    "setrange" 4 WRITES strings::setrange, [WRITE DENYOOM] [STRING] [] ["RW update" FIRST]
        "string" "2.2.0" "Writes over a part of a string.";
    "sinter" -2 READS sets::sinter, [READONLY] [SET] ["nondeterministic_output_order"] ["RO access" ALL]
        "set" "1.0.0" "Tells the members that all sets have.";
    "sinterstore" -3 WRITES sets::sinterstore, [WRITE DENYOOM] [SET] [] ["RW update" FIRST "RO access" OTHERS]
        "set" "1.0.0" "Keeps the members that all sets have.";
    "sismember" 3 READS sets::sismember, [READONLY FAST] [SET] [] ["RO" FIRST]
        "set" "1.0.0" "Tells whether a set has a member.";
    "smembers" 2 READS sets::smembers, [READONLY] [SET] ["nondeterministic_output_order"] ["RO access" FIRST]
        "set" "1.0.0" "Tells the members of a set.";
    "smismember" -3 READS sets::smismember, [READONLY FAST] [SET] [] ["RO access" FIRST]
        "set" "6.2.0" "Tells of several members whether a set has them.";
    "smove" 4 KEEPS sets::smove, [WRITE FAST] [SET] [] ["RW access delete" FIRST "RW insert" SECOND]
        "set" "1.0.0" "Takes a member from one set to another.";
    "spop" -2 REMOVES sets::spop, [WRITE FAST] [SET] ["nondeterministic_output"] ["RW access delete" FIRST]
        "set" "1.0.0" "Takes members out of a set that are drawn at random.";
    "srandmember" -2 READS sets::srandmember, [READONLY] [SET] ["nondeterministic_output"] ["RO access" FIRST]
        "set" "1.0.0" "Tells members of a set that are drawn at random.";
    "srem" -3 REMOVES sets::srem, [WRITE FAST] [SET] [] ["RW delete" FIRST]
        "set" "1.0.0" "Takes members out of a set.";
    "sscan" -3 READS scan::sscan, [READONLY] [SET] ["nondeterministic_output"] ["RO access" FIRST]
        "set" "2.8.0" "Goes through the members of a set in steps.";
    "strlen" 2 READS strings::strlen, [READONLY FAST] [STRING] [] ["RO" FIRST]
        "string" "2.2.0" "Tells the length of a string.";
    "substr" 4 READS strings::getrange, [READONLY] [STRING] [] ["RO access" FIRST]
        "string" "1.0.0" "Tells a part of a string.";
    "sunion" -2 READS sets::sunion, [READONLY] [SET] ["nondeterministic_output_order"] ["RO access" ALL]
        "set" "1.0.0" "Tells the members that any of the sets has.";
    "sunionstore" -3 WRITES sets::sunionstore, [WRITE DENYOOM] [SET] [] ["OW update" FIRST "RO access" OTHERS]
        "set" "1.0.0" "Keeps the members that any of the sets has.";
    "time" 1 READS server::time, [LOADING STALE FAST] [] ["nondeterministic_output"] []
        "server" "2.6.0" "Tells the time of the server.";
    "touch" -2 READS keys::exists, [READONLY FAST] [KEYSPACE] ["request_policy:multi_shard" "response_policy:agg_sum"] ["RO" ALL]
        "generic" "3.2.1" "Counts those of the keys that are there.";
    "ttl" 2 READS keys::ttl, [READONLY FAST] [KEYSPACE] ["nondeterministic_output"] ["RO access" FIRST]
        "generic" "1.0.0" "Tells the seconds after which a key ends.";
    "type" 2 READS keys::type_of, [READONLY FAST] [KEYSPACE] [] ["RO" FIRST]
        "generic" "1.0.0" "Tells what a key has.";
    "unlink" -2 REMOVES keys::del, [WRITE FAST] [KEYSPACE] ["request_policy:multi_shard" "response_policy:agg_sum"] ["RM delete" ALL]
        "generic" "4.0.0" "Takes keys out.";
    "unwatch" 1 READS transactions::unwatch, [NOSCRIPT LOADING STALE FAST ALLOW_BUSY] [TRANSACTION] [] []
        "transactions" "2.2.0" "Forgets what is watched.";
    "wait" 3 READS server::wait, [NOSCRIPT] [CONNECTION] ["request_policy:all_shards" "response_policy:agg_min"] []
        "generic" "3.0.0" "Counts the replicas that have the writes of this connection; there are none.";
    "watch" -2 READS transactions::watch, [NOSCRIPT LOADING STALE FAST ALLOW_BUSY] [TRANSACTION] [] ["RO" ALL]
        "transactions" "2.2.0" "Lets the next transaction fail if one of the keys changes before it.";
    "zadd" -4 WRITES sorted_sets::zadd, [WRITE DENYOOM FAST] [SORTEDSET] [] ["RW update" FIRST]
        "sorted-set" "1.2.0" "Puts members into a sorted set, or changes their scores.";
    "zcard" 2 READS sorted_sets::zcard, [READONLY FAST] [SORTEDSET] [] ["RO" FIRST]
        "sorted-set" "1.2.0" "Counts the members of a sorted set.";
    "zcount" 4 READS sorted_sets::zcount, [READONLY FAST] [SORTEDSET] [] ["RO access" FIRST]
        "sorted-set" "2.0.0" "Counts the members with scores between two.";
    "zincrby" 4 WRITES sorted_sets::zincrby, [WRITE DENYOOM FAST] [SORTEDSET] [] ["RW access update" FIRST]
        "sorted-set" "1.2.0" "Adds to the score of a member.";
    "zmscore" -3 READS sorted_sets::zmscore, [READONLY FAST] [SORTEDSET] [] ["RO access" FIRST]
        "sorted-set" "6.2.0" "Tells the scores of members.";
    "zpopmax" -2 REMOVES sorted_sets::zpopmax, [WRITE FAST] [SORTEDSET] [] ["RW access delete" FIRST]
        "sorted-set" "5.0.0" "Takes the members with the highest scores out.";
    "zpopmin" -2 REMOVES sorted_sets::zpopmin, [WRITE FAST] [SORTEDSET] [] ["RW access delete" FIRST]
        "sorted-set" "5.0.0" "Takes the members with the lowest scores out.";
    "zrange" -4 READS sorted_sets::zrange, [READONLY] [SORTEDSET] [] ["RO access" FIRST]
        "sorted-set" "1.2.0" "Tells the members in a range of places or scores.";
    "zrangebyscore" -4 READS sorted_sets::zrangebyscore, [READONLY] [SORTEDSET] [] ["RO access" FIRST]
        "sorted-set" "1.0.5" "Tells the members with scores between two.";
    "zrank" 3 READS sorted_sets::zrank, [READONLY FAST] [SORTEDSET] [] ["RO access" FIRST]
        "sorted-set" "2.0.0" "Tells the place of a member, the lowest score first.";
    "zrem" -3 REMOVES sorted_sets::zrem, [WRITE FAST] [SORTEDSET] [] ["RW delete" FIRST]
        "sorted-set" "1.2.0" "Takes members out of a sorted set.";
    "zremrangebyrank" 4 REMOVES sorted_sets::zremrangebyrank, [WRITE] [SORTEDSET] [] ["RW delete" FIRST]
        "sorted-set" "2.0.0" "Takes the members in a range of places out.";
    "zremrangebyscore" 4 REMOVES sorted_sets::zremrangebyscore, [WRITE] [SORTEDSET] [] ["RW delete" FIRST]
        "sorted-set" "1.2.0" "Takes the members with scores between two out.";
    "zrevrange" -4 READS sorted_sets::zrevrange, [READONLY] [SORTEDSET] [] ["RO access" FIRST]
        "sorted-set" "1.2.0" "Tells the members in a range of places, the highest score first.";
    "zrevrangebyscore" -4 READS sorted_sets::zrevrangebyscore, [READONLY] [SORTEDSET] [] ["RO access" FIRST]
        "sorted-set" "2.2.0" "Tells the members with scores between two, the highest score first.";
    "zrevrank" 3 READS sorted_sets::zrevrank, [READONLY FAST] [SORTEDSET] [] ["RO access" FIRST]
        "sorted-set" "2.0.0" "Tells the place of a member, the highest score first.";
    "zscan" -3 READS scan::zscan, [READONLY] [SORTEDSET] ["nondeterministic_output"] ["RO access" FIRST]
        "sorted-set" "2.8.0" "Goes through the members of a sorted set in steps.";
    "zscore" 3 READS sorted_sets::zscore, [READONLY FAST] [SORTEDSET] [] ["RO access" FIRST]
        "sorted-set" "1.2.0" "Tells the score of a member.";
};

const CLIENT: &[Subcommand] = subcommands! {
    "client|getname" 2, [NOSCRIPT LOADING STALE] [CONNECTION] [] []
        "connection" "2.6.9" "Tells the name of this connection.";
    "client|getredir" 2, [NOSCRIPT LOADING STALE] [CONNECTION] [] []
        "connection" "6.0.0" "Tells where invalidations go: nothing is tracked here.";
    "client|help" 2, [LOADING STALE] [CONNECTION] [] []
        "connection" "5.0.0" "Tells the subcommands.";
    "client|id" 2, [NOSCRIPT LOADING STALE] [CONNECTION] [] []
        "connection" "5.0.0" "Tells the number of this connection.";
    "client|info" 2, [NOSCRIPT LOADING STALE] [CONNECTION] ["nondeterministic_output"] []
        "connection" "6.2.0" "Tells of this connection.";
    "client|kill" -3, [ADMIN NOSCRIPT LOADING STALE] [CONNECTION] [] []
        "connection" "2.4.0" "Ends connections.";
    "client|list" -2, [ADMIN NOSCRIPT LOADING STALE] [CONNECTION] ["nondeterministic_output"] []
        "connection" "2.4.0" "Tells of the connections.";
    "client|no-evict" 3, [ADMIN NOSCRIPT LOADING STALE] [CONNECTION] [] []
        "connection" "7.0.0" "Says whether this connection may be evicted; none is.";
    "client|no-touch" 3, [NOSCRIPT LOADING STALE] [CONNECTION] [] []
        "connection" "7.2.0" "Says whether reads count as uses of a key; they never do.";
    "client|pause" -3, [ADMIN NOSCRIPT LOADING STALE] [CONNECTION] [] []
        "connection" "2.9.50" "Has the commands of all connections wait for a time, or those that write.";
    "client|reply" 3, [NOSCRIPT LOADING STALE] [CONNECTION] [] []
        "connection" "3.2.0" "Says whether commands are answered.";
    "client|setinfo" 4, [NOSCRIPT LOADING STALE] [CONNECTION] [] []
        "connection" "7.2.0" "Names the library of this connection.";
    "client|setname" 3, [NOSCRIPT LOADING STALE] [CONNECTION] [] []
        "connection" "2.6.9" "Names this connection.";
    "client|trackinginfo" 2, [NOSCRIPT LOADING STALE] [CONNECTION] [] []
        "connection" "6.2.0" "Tells what is tracked for this connection: nothing.";
    "client|unblock" -3, [ADMIN NOSCRIPT LOADING STALE] [CONNECTION] [] []
        "connection" "5.0.0" "Wakes a connection that waits in a command; none does.";
    "client|unpause" 2, [ADMIN NOSCRIPT LOADING STALE] [CONNECTION] [] []
        "connection" "6.2.0" "Has commands go on that wait by CLIENT PAUSE.";
};

const CLUSTER: &[Subcommand] = subcommands! {
    "cluster|count-failure-reports" 3, [ADMIN STALE] [] ["nondeterministic_output"] []
        "cluster" "3.0.0" "Counts the nodes that miss a node; nodes do not look after each other.";
    "cluster|countkeysinslot" 3, [STALE] [] [] []
        "cluster" "3.0.0" "Counts the keys of a slot that are here.";
    "cluster|getkeysinslot" 4, [STALE] [] ["nondeterministic_output"] []
        "cluster" "3.0.0" "Tells keys of a slot that are here.";
    "cluster|help" 2, [LOADING STALE] [] [] []
        "cluster" "5.0.0" "Tells the subcommands.";
    "cluster|info" 2, [STALE] [] ["nondeterministic_output"] []
        "cluster" "3.0.0" "Tells of the map of slots.";
    "cluster|keyslot" 3, [STALE] [] [] []
        "cluster" "3.0.0" "Tells the slot of a key.";
    "cluster|links" 2, [STALE] [] ["nondeterministic_output"] []
        "cluster" "7.0.0" "Tells the connections between nodes: there are none.";
    "cluster|myid" 2, [STALE] [] [] []
        "cluster" "3.0.0" "Tells the id of this node.";
    "cluster|nodes" 2, [STALE] [] ["nondeterministic_output"] []
        "cluster" "3.0.0" "Tells of the nodes, in lines.";
    "cluster|replicas" 3, [ADMIN STALE] [] ["nondeterministic_output"] []
        "cluster" "5.0.0" "Tells the replicas of a node: there are none.";
    "cluster|shards" 2, [STALE] [] ["nondeterministic_output"] []
        "cluster" "7.0.0" "Tells which node has which slots.";
    "cluster|slaves" 3, [ADMIN STALE] [] ["nondeterministic_output"] []
        "cluster" "3.0.0" "Tells the replicas of a node: there are none.";
    "cluster|slots" 2, [STALE] [] ["nondeterministic_output"] []
        "cluster" "3.0.0" "Tells which node has which slots.";
};

const COMMAND: &[Subcommand] = subcommands! {
    "command|count" 2, [LOADING STALE] [CONNECTION] [] []
        "server" "2.8.13" "Counts the commands.";
    "command|docs" -2, [LOADING STALE] [CONNECTION] ["nondeterministic_output_order"] []
        "server" "7.0.0" "Tells what commands are for.";
    "command|getkeys" -4, [LOADING STALE] [CONNECTION] [] []
        "server" "2.8.13" "Tells the keys among the arguments of a command.";
    "command|getkeysandflags" -4, [LOADING STALE] [CONNECTION] [] []
        "server" "7.0.0" "Tells the keys of a command and what it does with them.";
    "command|help" 2, [LOADING STALE] [CONNECTION] [] []
        "server" "5.0.0" "Tells the subcommands.";
    "command|info" -2, [LOADING STALE] [CONNECTION] ["nondeterministic_output_order"] []
        "server" "2.8.13" "Tells of commands what clients need to know.";
    "command|list" -2, [LOADING STALE] [CONNECTION] ["nondeterministic_output_order"] []
        "server" "7.0.0" "Tells the names of the commands.";
};

const CONFIG: &[Subcommand] = subcommands! {
    "config|get" -3, [ADMIN NOSCRIPT LOADING STALE] [] [] []
        "server" "2.0.0" "Tells settings.";
    "config|help" 2, [LOADING STALE] [] [] []
        "server" "5.0.0" "Tells the subcommands.";
};

const MEMORY: &[Subcommand] = subcommands! {
    "memory|help" 2, [LOADING STALE] [] [] []
        "server" "4.0.0" "Tells the subcommands.";
    "memory|usage" -3, [READONLY] [] [] ["RO" SECOND]
        "server" "4.0.0" "Tells the memory that a key takes.";
};

const OBJECT: &[Subcommand] = subcommands! {
    "object|encoding" 3, [READONLY] [KEYSPACE] ["nondeterministic_output"] ["RO" SECOND]
        "generic" "2.2.3" "Tells how Redis would keep the value of a key.";
    "object|freq" 3, [READONLY] [KEYSPACE] ["nondeterministic_output"] ["RO" SECOND]
        "generic" "4.0.0" "Would tell how often a key is used; that is not kept.";
    "object|help" 2, [LOADING STALE] [KEYSPACE] [] []
        "generic" "6.2.0" "Tells the subcommands.";
    "object|idletime" 3, [READONLY] [KEYSPACE] ["nondeterministic_output"] ["RO" SECOND]
        "generic" "2.2.3" "Would tell when a key was used last; that is not kept.";
    "object|refcount" 3, [READONLY] [KEYSPACE] ["nondeterministic_output"] ["RO" SECOND]
        "generic" "2.2.3" "Tells how many references to a value there are: one.";
};
