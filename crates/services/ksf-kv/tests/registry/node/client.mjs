// What node-redis' own examples do, on the server at 127.0.0.1:PORT; every answer is checked.
// Usage: node client.mjs PORT PASSWORD (empty: none)

import assert from 'node:assert/strict';
import { createClient, createClientPool, WatchError } from 'redis';

const [port, password] = [Number(process.argv[2]), process.argv[3] || undefined];
const same = assert.deepEqual;

const options = (RESP) => ({ socket: { host: '127.0.0.1', port, reconnectStrategy: false }, password, RESP });
// Objects of replies have no prototype.
const plain = (map) => ({ ...map });

async function collect(pages) {
  const found = [];
  for await (const page of pages) found.push(...page);
  return found;
}

async function strings(r) {
  same(await r.ping(), 'PONG');
  same(await r.set('foo', 'bar'), 'OK');
  same(await r.get('foo'), 'bar');
  same(await r.get('absent'), null);
  same(await r.set('foo', 'baz', { NX: true }), null);
  same(await r.set('foo', 'baz', { XX: true, GET: true }), 'bar');
  same(await r.mSet({ a: '1', b: '2' }), 'OK');
  same(await r.mGet(['a', 'b', 'absent']), ['1', '2', null]);
  same(await r.incr('count'), 1);
  same(await r.incrBy('count', 9), 10);
  same(await r.incrByFloat('count', 0.5), '10.5');
  same(await r.append('foo', '!'), 4);
  same(await r.getRange('foo', 1, 2), 'az');
  same(await r.getDel('foo'), 'baz!');
  same(await r.exists(['a', 'b', 'foo']), 2);
  same(await r.type('a'), 'string');
  same(await r.del(['a', 'b']), 2);
}

async function expiry(r) {
  same(await r.set('short', 'x', { expiration: { type: 'EX', value: 100 } }), 'OK');
  const left = await r.ttl('short');
  assert(left > 0 && left <= 100);
  same(await r.expire('short', 200), 1);
  assert(await r.pTTL('short') > 100_000);
  same(await r.persist('short'), 1);
  same(await r.ttl('short'), -1);
  same(await r.pSetEx('gone', 1, 'x'), 'OK');
  const until = Date.now() + 30_000;
  while (await r.get('gone') !== null) assert(Date.now() < until, 'it does not expire');
}

async function hashes(r) {
  same(await r.hSet('bike:1', { model: 'Deimos', price: 4972 }), 2);
  same(await r.hGet('bike:1', 'model'), 'Deimos');
  same(plain(await r.hGetAll('bike:1')), { model: 'Deimos', price: '4972' });
  same(await r.hmGet('bike:1', ['price', 'absent']), ['4972', null]);
  same(await r.hIncrBy('bike:1', 'price', 100), 5072);
  same(await r.hExists('bike:1', 'model'), 1);
  same(await r.hDel('bike:1', 'model'), 1);
  same(await r.hKeys('bike:1'), ['price']);
  await assert.rejects(r.get('bike:1'), /WRONGTYPE/);
}

async function lists(r) {
  same(await r.rPush('list', ['a', 'b', 'c']), 3);
  same(await r.lPush('list', 'z'), 4);
  same(await r.lRange('list', 0, -1), ['z', 'a', 'b', 'c']);
  same(await r.lPop('list'), 'z');
  same(await r.rPopCount('list', 2), ['c', 'b']);
  same(await r.lLen('list'), 1);
}

async function sets(r) {
  same(await r.sAdd('one', ['a', 'b', 'c']), 3);
  same(await r.sAdd('two', ['b', 'c', 'd']), 3);
  same([...await r.sMembers('one')].sort(), ['a', 'b', 'c']);
  same(await r.sIsMember('one', 'a'), 1);
  same(await r.sRem('one', 'a'), 1);
  same([...await r.sInter(['one', 'two'])].sort(), ['b', 'c']);
  same([...await r.sDiff(['two', 'one'])], ['d']);
}

async function sortedSets(r) {
  same(await r.zAdd('race', [{ score: 10, value: 'Norem' }, { score: 6.5, value: 'Prickett' }]), 2);
  same(await r.zScore('race', 'Prickett'), 6.5);
  same(await r.zScore('race', 'absent'), null);
  same(await r.zRange('race', 0, -1), ['Prickett', 'Norem']);
  const scored = (await r.zRangeWithScores('race', 0, -1)).map(plain);
  same(scored, [{ value: 'Prickett', score: 6.5 }, { value: 'Norem', score: 10 }]);
  same(await r.zIncrBy('race', 10, 'Prickett'), 16.5);
  same(await r.zRank('race', 'Norem'), 0);
  same(await r.zCard('race'), 2);
}

async function pipelines(r) {
  const seats = Array.from({ length: 1000 }, (_, i) => i);
  const answers = await Promise.all(seats.map((i) => r.set(`seat:${i}`, `#${i}`)));
  assert(answers.every((answer) => answer === 'OK'));
  same(await Promise.all(seats.map((i) => r.get(`seat:${i}`))), seats.map((i) => `#${i}`));
}

async function transactions(r, other) {
  const told = await r.multi().incr('both').incr('both').get('seat:999').hSet('hash', 'f', 'v').exec();
  same(told, [1, 2, '#999', 1]);
  same(await r.set('watched', '1'), 'OK');
  await r.watch('watched');
  same(await other.set('watched', '5'), 'OK');
  await assert.rejects(r.multi().set('watched', '2').exec(), WatchError);
  same(await r.get('watched'), '5');
  await r.watch('watched');
  same(await r.multi().set('watched', '6').exec(), ['OK']);
  same(await r.get('watched'), '6');
}

async function iterators(r) {
  const seats = new Set(await collect(r.scanIterator({ MATCH: 'seat:*', COUNT: 50 })));
  same(seats.size, 1000);
  const fields = Object.fromEntries(Array.from({ length: 500 }, (_, i) => [`f${i}`, `${i}`]));
  same(await r.hSet('many', fields), 500);
  const found = await collect(r.hScanIterator('many'));
  same(Object.fromEntries(found.map(({ field, value }) => [field, value])), fields);
  same(await r.sAdd('members', Object.keys(fields)), 500);
  same(new Set(await collect(r.sScanIterator('members'))), new Set(Object.keys(fields)));
  same(await r.zAdd('scored', Object.keys(fields).map((value, score) => ({ value, score }))), 500);
  const scored = await collect(r.zScanIterator('scored'));
  same(new Set(scored.map(({ value, score }) => `${value} ${score}`)).size, 500);
}

async function bigValues(r) {
  const big = '0123456789abcdef'.repeat(50_000); // 800,000 bytes
  same(await r.set('big', big), 'OK');
  const answers = await Promise.all(Array.from({ length: 8 }, () => r.get('big')));
  assert(answers.every((answer) => answer === big));
  same(await r.del('big'), 1);
}

async function pool(RESP) {
  const clients = createClientPool(options(RESP), { minimum: 1, maximum: 20 });
  await clients.connect();
  const work = async (number) => {
    for (let i = 0; i < 50; i += 1) {
      assert(await clients.incr('shared') > 0);
      same(await clients.set(`own:${number}`, `${i}`), 'OK');
      same(await clients.get(`own:${number}`), `${i}`);
    }
  };
  await Promise.all(Array.from({ length: 20 }, (_, number) => work(number)));
  same(await clients.get('shared'), '1000');
  await clients.close();
}

async function server(r) {
  assert((await r.info()).includes('redis_version'));
  same(await r.clientSetName('tester'), 'OK');
  same(await r.clientGetName(), 'tester');
  assert(await r.dbSize() > 1000);
  same(await r.echo('hello'), 'hello');
  await assert.rejects(r.sendCommand(['NOSUCH', 'x']), /unknown command/);
}

async function connected(options) {
  const client = createClient(options);
  client.on('error', () => {}); // the command that fails tells it
  await client.connect();
  return client;
}

if (password) {
  for (const RESP of [2, 3]) {
    await assert.rejects(connected({ ...options(RESP), password: 'wrong' }), /WRONGPASS/);
    await assert.rejects(connected({ ...options(RESP), password: undefined }).then((r) => r.get('x')), /NOAUTH/);
  }
}
for (const RESP of [2, 3]) {
  const r = await connected({ ...options(RESP), name: 'registry' });
  const other = await r.duplicate().connect();
  same(await r.flushAll(), 'OK');
  const steps = [strings, expiry, hashes, lists, sets, sortedSets, pipelines, transactions, iterators, bigValues, server];
  for (const step of steps) {
    console.log(`RESP${RESP}`, step.name);
    await step(r, other);
  }
  console.log(`RESP${RESP}`, 'pool');
  await pool(RESP);
  await other.close();
  await r.close();
}
console.log('done: node-redis');
process.exit(0); // also with the connections that were refused
