//! Requests of HTTP wait for the medium as commands do.

use super::*;

/// The reply to a reader of an unwritten value waits as that to its writer, over either protocol.
#[test]
fn no_response_is_sent_before_its_data_is_durable() {
    let mut world = World::durable(8, Durability::Always);
    world.send(0, "PUT /key HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nvalue");
    world.send(1, "GET /key HTTP/1.1\r\nHost: x\r\n\r\nGET / HTTP/1.1\r\nHost: x\r\n\r\n");
    world.send(2, "GET key\r\n");
    // A refusal reveals the state of the key, too.
    let others = [
        ("GET /", "", "200"),
        ("HEAD /key", "", "200"),
        ("GET /key", "Range: bytes=9-\r\n", "416"),
        ("PUT /key", "If-None-Match: *\r\nContent-Length: 0\r\n", "412"),
        ("DELETE /key", "If-Match: \"x\"\r\n", "412"),
    ];
    for (at, (line, fields, _)) in others.iter().enumerate() {
        world.send(3 + at, &format!("{line} HTTP/1.1\r\nHost: x\r\n{fields}\r\n"));
    }
    for conn in 0..8 {
        assert_eq!(world.take(conn), "", "{conn}");
    }
    world.send(0, "DELETE /key HTTP/1.1\r\nHost: x\r\n\r\nGET /key HTTP/1.1\r\nHost: x\r\n\r\n");
    assert_eq!(world.take(0), "");
    world.complete();
    world.send(2, "EXISTS key\r\n");
    world.end_turn();
    assert_eq!(statuses(&world.take(0)), ["201", "204", "404"]);
    let read = world.take(1);
    assert_eq!(statuses(&read), ["200", "200"]);
    assert!(read.contains("\r\n\r\nvalue") && read.ends_with("{\"keys\":[\"key\"],\"next\":null}\n"), "{read}");
    assert_eq!(world.take(2), "$5\r\nvalue\r\n:0\r\n");
    for (at, (line, _, status)) in others.iter().enumerate() {
        assert_eq!(statuses(&world.take(3 + at)), [*status], "{line}");
    }
}

/// Requests of HTTP that write wait for the medium in their order, as commands do. So does the `100 Continue` of a later one.
#[test]
fn requests_that_write_wait_for_a_medium_that_is_behind() {
    let mut world = World::new(2);
    world.set(0, 0..6);
    world.take(0);
    let get = "GET /0 HTTP/1.1\r\nHost: x\r\n\r\n";
    world.send(1, get);
    assert_eq!(statuses(&world.take(1)), ["200"]);
    let put = "PUT /6 HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nvalue";
    let asks = put.replace("Host", "Expect: 100-continue\r\nHost").replace("value", "");
    world.send(1, &format!("{put}{get}{asks}"));
    assert_eq!((world.waiting(), world.take(1)), (2, String::new()));
    world.complete();
    world.send(0, "PING\r\n");
    assert_eq!(statuses(&world.take(1)), ["201", "200", "100"]);
    world.send(1, "again");
    world.send(1, &get.replace("/0", "/6"));
    let told = world.take(1);
    assert_eq!(statuses(&told), ["204", "200"]);
    assert!(told.ends_with("\r\n\r\nagain"), "{told}");
}
