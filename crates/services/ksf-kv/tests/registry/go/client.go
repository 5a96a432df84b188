// What go-redis' own examples do, on the server at 127.0.0.1:PORT; every answer is checked.
//
// Usage: client PORT PASSWORD (empty: none)
package main

import (
	"context"
	"fmt"
	"os"
	"reflect"
	"sort"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
)

var ctx = context.Background()

func fail(format string, args ...any) {
	panic(fmt.Sprintf(format, args...))
}

func good(err error) {
	if err != nil {
		fail("%v", err)
	}
}

// The value of a command, whose error must be nil: same(of(r.Get(ctx, "key").Result()), "value").
func of[T any](value T, err error) any {
	good(err)
	return value
}

func same(got, wanted any) {
	if !reflect.DeepEqual(got, wanted) {
		fail("got %#v, not %#v", got, wanted)
	}
}

func refused(err error, words string) {
	if err == nil || !strings.Contains(err.Error(), words) {
		fail("got %v, not an error with %q", err, words)
	}
}

func sorted(names []string, err error) []string {
	good(err)
	sort.Strings(names)
	return names
}

func valuesOfStrings(r *redis.Client) {
	same(of(r.Ping(ctx).Result()), "PONG")
	same(of(r.Set(ctx, "foo", "bar", 0).Result()), "OK")
	same(of(r.Get(ctx, "foo").Result()), "bar")
	same(r.Get(ctx, "absent").Err(), redis.Nil)
	same(of(r.SetNX(ctx, "foo", "baz", 0).Result()), false)
	same(of(r.SetArgs(ctx, "foo", "baz", redis.SetArgs{Mode: "XX", Get: true}).Result()), "bar")
	same(of(r.MSet(ctx, "a", 1, "b", 2).Result()), "OK")
	same(of(r.MGet(ctx, "a", "b", "absent").Result()), []any{"1", "2", nil})
	same(of(r.Incr(ctx, "count").Result()), int64(1))
	same(of(r.IncrBy(ctx, "count", 9).Result()), int64(10))
	same(of(r.IncrByFloat(ctx, "count", 0.5).Result()), 10.5)
	same(of(r.Append(ctx, "foo", "!").Result()), int64(4))
	same(of(r.GetRange(ctx, "foo", 1, 2).Result()), "az")
	same(of(r.GetDel(ctx, "foo").Result()), "baz!")
	same(of(r.Exists(ctx, "a", "b", "foo").Result()), int64(2))
	same(of(r.Type(ctx, "a").Result()), "string")
	same(of(r.Del(ctx, "a", "b").Result()), int64(2))
}

func expiry(r *redis.Client) {
	same(of(r.Set(ctx, "short", "x", 100*time.Second).Result()), "OK")
	if left := r.TTL(ctx, "short").Val(); left <= 0 || left > 100*time.Second {
		fail("%v are left", left)
	}
	same(of(r.Expire(ctx, "short", 200*time.Second).Result()), true)
	if left := r.PTTL(ctx, "short").Val(); left <= 100*time.Second {
		fail("%v are left", left)
	}
	same(of(r.Persist(ctx, "short").Result()), true)
	same(of(r.TTL(ctx, "short").Result()), time.Duration(-1))
	same(of(r.Set(ctx, "gone", "x", time.Millisecond).Result()), "OK")
	for until := time.Now().Add(30 * time.Second); r.Get(ctx, "gone").Err() != redis.Nil; {
		if time.Now().After(until) {
			fail("it does not expire")
		}
	}
}

func hashes(r *redis.Client) {
	type bike struct {
		Model string `redis:"model"`
		Price int    `redis:"price"`
	}
	same(of(r.HSet(ctx, "bike:1", bike{"Deimos", 4972}).Result()), int64(2))
	same(of(r.HGet(ctx, "bike:1", "model").Result()), "Deimos")
	same(of(r.HGetAll(ctx, "bike:1").Result()), map[string]string{"model": "Deimos", "price": "4972"})
	var found bike
	good(r.HGetAll(ctx, "bike:1").Scan(&found))
	same(found, bike{"Deimos", 4972})
	same(of(r.HMGet(ctx, "bike:1", "price", "absent").Result()), []any{"4972", nil})
	same(of(r.HIncrBy(ctx, "bike:1", "price", 100).Result()), int64(5072))
	same(of(r.HExists(ctx, "bike:1", "model").Result()), true)
	same(of(r.HDel(ctx, "bike:1", "model").Result()), int64(1))
	same(of(r.HKeys(ctx, "bike:1").Result()), []string{"price"})
	refused(r.Get(ctx, "bike:1").Err(), "WRONGTYPE")
}

func lists(r *redis.Client) {
	same(of(r.RPush(ctx, "list", "a", "b", "c").Result()), int64(3))
	same(of(r.LPush(ctx, "list", "z").Result()), int64(4))
	same(of(r.LRange(ctx, "list", 0, -1).Result()), []string{"z", "a", "b", "c"})
	same(of(r.LPop(ctx, "list").Result()), "z")
	same(of(r.RPopCount(ctx, "list", 2).Result()), []string{"c", "b"})
	same(of(r.LLen(ctx, "list").Result()), int64(1))
}

func sets(r *redis.Client) {
	same(of(r.SAdd(ctx, "one", "a", "b", "c").Result()), int64(3))
	same(of(r.SAdd(ctx, "two", "b", "c", "d").Result()), int64(3))
	same(sorted(r.SMembers(ctx, "one").Result()), []string{"a", "b", "c"})
	same(of(r.SIsMember(ctx, "one", "a").Result()), true)
	same(of(r.SRem(ctx, "one", "a").Result()), int64(1))
	same(sorted(r.SInter(ctx, "one", "two").Result()), []string{"b", "c"})
	same(sorted(r.SDiff(ctx, "two", "one").Result()), []string{"d"})
}

func sortedSets(r *redis.Client) {
	racers := []redis.Z{{Score: 6.5, Member: "Prickett"}, {Score: 10, Member: "Norem"}, {Score: 12, Member: "Castilla"}}
	same(of(r.ZAdd(ctx, "race", racers...).Result()), int64(3))
	same(of(r.ZScore(ctx, "race", "Prickett").Result()), 6.5)
	same(r.ZScore(ctx, "race", "absent").Err(), redis.Nil)
	same(of(r.ZRangeWithScores(ctx, "race", 0, -1).Result()), racers)
	same(of(r.ZIncrBy(ctx, "race", 10, "Prickett").Result()), 16.5)
	same(of(r.ZRank(ctx, "race", "Norem").Result()), int64(0))
	by := redis.ZRangeBy{Min: "11", Max: "13"}
	same(of(r.ZRangeByScore(ctx, "race", &by).Result()), []string{"Castilla"})
	same(of(r.ZCard(ctx, "race").Result()), int64(3))
}

func pipelines(r *redis.Client) {
	answers, err := r.Pipelined(ctx, func(pipe redis.Pipeliner) error {
		for i := 0; i < 1000; i++ {
			pipe.Set(ctx, fmt.Sprint("seat:", i), fmt.Sprint("#", i), 0)
		}
		return nil
	})
	good(err)
	same(len(answers), 1000)
	for _, answer := range answers {
		same(answer.(*redis.StatusCmd).Val(), "OK")
	}
	var count *redis.IntCmd
	var seat *redis.StringCmd
	_, err = r.TxPipelined(ctx, func(pipe redis.Pipeliner) error {
		pipe.Incr(ctx, "both")
		count = pipe.Incr(ctx, "both")
		seat = pipe.Get(ctx, "seat:999")
		return nil
	})
	good(err)
	same(count.Val(), int64(2))
	same(seat.Val(), "#999")
}

func transactions(r *redis.Client) {
	good(r.Set(ctx, "watched", 1, 0).Err())
	write := func(value int) func(redis.Pipeliner) error {
		return func(pipe redis.Pipeliner) error {
			return pipe.Set(ctx, "watched", value, 0).Err()
		}
	}
	err := r.Watch(ctx, func(tx *redis.Tx) error {
		good(r.Set(ctx, "watched", 5, 0).Err()) // by another connection
		_, err := tx.TxPipelined(ctx, write(2))
		return err
	}, "watched")
	same(err, redis.TxFailedErr)
	same(of(r.Get(ctx, "watched").Result()), "5")
	good(r.Watch(ctx, func(tx *redis.Tx) error {
		now, err := tx.Get(ctx, "watched").Int()
		good(err)
		_, err = tx.TxPipelined(ctx, write(now+1))
		return err
	}, "watched"))
	same(of(r.Get(ctx, "watched").Result()), "6")
}

func count(iterator *redis.ScanIterator) int {
	found := map[string]bool{}
	for iterator.Next(ctx) {
		found[iterator.Val()] = true
	}
	good(iterator.Err())
	return len(found)
}

func iterators(r *redis.Client) {
	same(count(r.Scan(ctx, 0, "seat:*", 50).Iterator()), 1000)
	for i := 0; i < 300; i++ {
		name := fmt.Sprint("name", i)
		good(r.HSet(ctx, "many", name, fmt.Sprint("value", i)).Err())
		good(r.SAdd(ctx, "members", name).Err())
	}
	same(count(r.HScan(ctx, "many", 0, "", 0).Iterator()), 600)
	same(count(r.SScan(ctx, "members", 0, "", 0).Iterator()), 300)
}

func bigValues(r *redis.Client) {
	big := strings.Repeat("0123456789abcdef", 50_000) // 800,000 bytes
	good(r.Set(ctx, "big", big, 0).Err())
	answers, err := r.Pipelined(ctx, func(pipe redis.Pipeliner) error {
		for i := 0; i < 8; i++ {
			pipe.Get(ctx, "big")
		}
		return nil
	})
	good(err)
	for _, answer := range answers {
		if answer.(*redis.StringCmd).Val() != big {
			fail("a big value came back changed")
		}
	}
	same(of(r.Del(ctx, "big").Result()), int64(1))
}

func pool(r *redis.Client) {
	failures := make(chan any, 20)
	var all sync.WaitGroup
	for number := 0; number < 20; number++ {
		all.Add(1)
		go func(own string) {
			defer all.Done()
			defer func() { failures <- recover() }()
			for i := 0; i < 50; i++ {
				good(r.Incr(ctx, "shared").Err())
				good(r.Set(ctx, own, i, 0).Err())
				same(of(r.Get(ctx, own).Result()), strconv.Itoa(i))
			}
		}(fmt.Sprint("own:", number))
	}
	all.Wait()
	for number := 0; number < 20; number++ {
		same(<-failures, nil)
	}
	same(of(r.Get(ctx, "shared").Result()), "1000")
}

func server(r *redis.Client) {
	if !strings.Contains(r.Info(ctx).Val(), "redis_version") {
		fail("INFO names no version")
	}
	same(of(r.ClientGetName(ctx).Result()), "registry")
	if r.DBSize(ctx).Val() <= 1000 {
		fail("DBSIZE is too small")
	}
	same(of(r.Echo(ctx, "hello").Result()), "hello")
	refused(r.Do(ctx, "NOSUCH", "x").Err(), "unknown command")
}

func main() {
	address, password := "127.0.0.1:"+os.Args[1], os.Args[2]
	for _, version := range []int{2, 3} {
		options := func(password string) *redis.Options {
			return &redis.Options{
				Addr: address, Password: password, Protocol: version, ClientName: "registry", PoolSize: 20,
				ReadTimeout: 30 * time.Second, MaxRetries: -1,
			}
		}
		if password != "" {
			err := redis.NewClient(options("wrong")).Ping(ctx).Err()
			refused(err, "WRONGPASS")
			err = redis.NewClient(options("")).Ping(ctx).Err()
			refused(err, "NOAUTH")
		}
		r := redis.NewClient(options(password))
		same(of(r.FlushAll(ctx).Result()), "OK")
		steps := []struct {
			name string
			step func(*redis.Client)
		}{
			{"strings", valuesOfStrings}, {"expiry", expiry}, {"hashes", hashes}, {"lists", lists}, {"sets", sets},
			{"sortedSets", sortedSets}, {"pipelines", pipelines}, {"transactions", transactions},
			{"iterators", iterators}, {"bigValues", bigValues}, {"pool", pool}, {"server", server},
		}
		for _, test := range steps {
			fmt.Printf("RESP%d %s\n", version, test.name)
			test.step(r)
		}
		good(r.Close())
	}
	fmt.Println("done: go-redis", redis.Version())
}
