// Judges a history of a store with crashes in it: is it linearizable, key by key?
//
// Usage: client FILE. Each line of the file is an operation as JSON, in any order:
//
//	{"client":3,"key":"a","do":"set","value":"7","reply":"+OK","call":1200,"return":4500}
//
// Times are nanoseconds of one clock. An operation whose reply is null was under way when the store was killed: it happened at
// some time between call and return, or never. Exit status: 0 linearizable, 1 not, 2 the file makes no sense.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"sort"
	"strconv"

	"github.com/anishathalye/porcupine"
)

type operation struct {
	Client int     `json:"client"`
	Key    string  `json:"key"`
	Do     string  `json:"do"`
	Value  string  `json:"value"`
	Reply  *string `json:"reply"`
	Call   int64   `json:"call"`
	Return int64   `json:"return"`
}

// What a key has.
type state struct {
	isThere bool
	value   string
}

func fail(format string, args ...interface{}) {
	fmt.Fprintf(os.Stderr, format+"\n", args...)
	os.Exit(2)
}

// The key after an operation, and what its client is told.
func (op operation) of(was state) (state, string) {
	switch op.Do {
	case "get":
		if !was.isThere {
			return was, "nil"
		}
		return was, was.value
	case "set":
		return state{true, op.Value}, "+OK"
	case "del":
		if !was.isThere {
			return was, ":0"
		}
		return state{}, ":1"
	default: // incr: what a key has that is counted is a number
		count, _ := strconv.ParseInt(was.value, 10, 64)
		next := strconv.FormatInt(count+1, 10)
		return state{true, next}, ":" + next
	}
}

// The states in which an operation may leave a key, none if it cannot have been told what it was.
func step(from, input, output interface{}) []interface{} {
	was, reply := from.(state), output.(*string)
	next, told := input.(operation).of(was)
	switch {
	case reply == nil:
		return []interface{}{was, next}
	case *reply == told:
		return []interface{}{next}
	default:
		return nil
	}
}

func read(path string) map[string][]porcupine.Operation {
	file, err := os.Open(path)
	if err != nil {
		fail("%v", err)
	}
	defer file.Close()
	known := map[string]bool{"get": true, "set": true, "del": true, "incr": true}
	keys := map[string][]porcupine.Operation{}
	lines := bufio.NewScanner(file)
	for number := 1; lines.Scan(); number++ {
		var op operation
		if err := json.Unmarshal(lines.Bytes(), &op); err != nil {
			fail("%s:%d: %v", path, number, err)
		}
		if !known[op.Do] || op.Key == "" || op.Call > op.Return {
			fail("%s:%d: this is no operation: %s", path, number, lines.Text())
		}
		keys[op.Key] = append(keys[op.Key], porcupine.Operation{
			ClientId: op.Client, Input: op, Output: op.Reply, Call: op.Call, Return: op.Return,
		})
	}
	if err := lines.Err(); err != nil {
		fail("%s: %v", path, err)
	}
	return keys
}

func main() {
	if len(os.Args) != 2 {
		fail("usage: client FILE")
	}
	keys := read(os.Args[1])
	nondeterministic := porcupine.NondeterministicModel{
		Init: func() []interface{} { return []interface{}{state{}} },
		Step: step,
	}
	model := nondeterministic.ToModel()
	names := make([]string, 0, len(keys))
	for name := range keys {
		names = append(names, name)
	}
	sort.Strings(names)
	count, isRight := 0, true
	for _, name := range names {
		count += len(keys[name])
		if !porcupine.CheckOperations(model, keys[name]) {
			fmt.Printf("not linearizable: %s\n", name)
			isRight = false
		}
	}
	if !isRight {
		os.Exit(1)
	}
	fmt.Printf("linearizable: %d operations on %d keys\n", count, len(keys))
}
