// SPDX-License-Identifier: MIT OR Apache-2.0

// A server in Go for the tests of ksf accel: answers every request with "served", and SIGHUP with a line on standard
// error. It knows nothing of SO_REUSEPORT.
//
// serves ADDRESS
package main

import (
	"bufio"
	"fmt"
	"net"
	"os"
	"os/signal"
	"strings"
	"syscall"
)

func serve(connection net.Conn) {
	defer connection.Close()
	reader := bufio.NewReader(connection)
	for {
		line, err := reader.ReadString('\n')
		if err != nil {
			return
		}
		if strings.TrimSpace(line) == "" {
			break
		}
	}
	fmt.Fprintf(connection, "HTTP/1.1 200 OK\r\nX-Pid: %d\r\nConnection: close\r\n\r\nserved\n", os.Getpid())
}

func main() {
	listener, err := net.Listen("tcp", os.Args[1])
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(3)
	}
	hangups := make(chan os.Signal, 1)
	signal.Notify(hangups, syscall.SIGHUP)
	go func() {
		for range hangups {
			fmt.Fprintf(os.Stderr, "hangup %d\n", os.Getpid())
		}
	}()
	for {
		connection, err := listener.Accept()
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			continue
		}
		go serve(connection)
	}
}
