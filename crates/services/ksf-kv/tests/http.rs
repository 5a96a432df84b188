//! HTTP/1.1 on the port of RESP, on real sockets and on both engines.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;

use crate::common::{Serving, engines};
use ksf::engine::EngineKind;
use ksf::limits::Limits;
use ksf_kv::Settings;
use ksf_test::{own_network, stream};

/// A response: status, fields as they came, content.
#[derive(Debug)]
struct Response {
    status: u16,
    fields: String,
    content: Vec<u8>,
}

impl Response {
    fn field(&self, name: &str) -> Option<&str> {
        self.fields.lines().find_map(|line| {
            let (known, value) = line.split_once(": ")?;
            known.eq_ignore_ascii_case(name).then_some(value)
        })
    }

    fn text(&self) -> &str {
        std::str::from_utf8(&self.content).unwrap()
    }
}

struct Http(BufReader<TcpStream>);

impl Http {
    fn connect(serving: &Serving) -> Self {
        Self(BufReader::new(stream::connect(serving.address())))
    }

    fn send(&mut self, bytes: impl AsRef<[u8]>) {
        self.0.get_mut().write_all(bytes.as_ref()).unwrap();
    }

    /// `to_head`: no content follows, whatever the head says.
    fn response(&mut self, to_head: bool) -> Response {
        let mut line = String::new();
        self.0.read_line(&mut line).unwrap();
        let status = line.strip_prefix("HTTP/1.1 ").unwrap_or_else(|| panic!("{line:?}"))[..3].parse().unwrap();
        let mut fields = String::new();
        while self.0.read_line(&mut fields).unwrap() > 2 {}
        let mut response = Response { status, fields, content: Vec::new() };
        let bytes = response.field("content-length").map_or(0, |bytes| bytes.parse().unwrap());
        response.content.resize(if to_head { 0 } else { bytes }, 0);
        self.0.read_exact(&mut response.content).unwrap();
        response
    }

    /// A request with these further fields, each with its line end. Content is sent with its length.
    fn ask(&mut self, line: &str, fields: &str, content: Option<&[u8]>) -> Response {
        self.send(request(line, fields, content));
        self.response(line.starts_with("HEAD "))
    }

    fn get(&mut self, target: &str) -> Response {
        self.ask(&format!("GET {target}"), "", None)
    }

    fn status(&mut self, line: &str, fields: &str, content: Option<&[u8]>) -> u16 {
        self.ask(line, fields, content).status
    }
}

fn request(line: &str, fields: &str, content: Option<&[u8]>) -> Vec<u8> {
    let length = content.map(|content| format!("Content-Length: {}\r\n", content.len())).unwrap_or_default();
    let head = format!("{line} HTTP/1.1\r\nHost: localhost\r\n{fields}{length}\r\n");
    [head.as_bytes(), content.unwrap_or_default()].concat()
}

/// Each engine, with a server on a new folder.
fn on_each_engine(limits: &Limits, settings: &Settings, test: impl Fn(EngineKind, &Serving)) {
    own_network();
    for engine in engines() {
        let folder = tempfile::tempdir().unwrap();
        let serving = Serving::start_set(engine, folder.path(), limits.clone(), settings.clone());
        test(engine, &serving);
        serving.stop();
    }
}

fn on_each(test: impl Fn(EngineKind, &Serving)) {
    on_each_engine(&Limits::default(), &Settings::default(), test);
}

#[test]
fn keys_are_put_read_and_deleted_and_are_those_of_resp() {
    own_network();
    for engine in engines() {
        let folder = tempfile::tempdir().unwrap();
        let serving = Serving::start(engine, folder.path());
        let (mut http, mut resp) = (Http::connect(&serving), serving.connect());
        assert_eq!(http.status("GET /photo", "", None), 404, "{engine}");
        let put = http.ask("PUT /photo", "", Some(b"first\0\xff"));
        assert_eq!((put.status, put.field("content-length")), (201, Some("0")), "{engine}: {put:?}");
        let got = http.get("/photo");
        assert_eq!((got.status, &got.content[..]), (200, &b"first\0\xff"[..]), "{engine}");
        assert_eq!(got.field("content-type"), Some("application/octet-stream"));
        assert_eq!(got.field("accept-ranges"), Some("bytes"));
        assert!(got.field("date").is_some_and(|date| date.ends_with(" GMT")));
        assert_eq!(got.field("etag"), put.field("etag"), "{engine}");
        let again = http.ask("PUT /photo", "", Some(b"second"));
        assert_eq!((again.status, again.field("content-length")), (204, None), "{engine}");
        assert_ne!(again.field("etag"), put.field("etag"));
        let head = http.ask("HEAD /photo", "", None);
        assert_eq!(
            (head.status, head.field("content-length"), head.field("etag")),
            (200, Some("6"), again.field("etag"))
        );
        // Any bytes, and those of the other protocol.
        assert_eq!(resp.ask("GET photo"), "second", "{engine}");
        assert_eq!(resp.ask("SET a/b:c value"), "+OK");
        assert_eq!(http.get("/a/b:c").text(), "value");
        assert_eq!(http.get("http://localhost/a%2Fb%3ac").text(), "value");
        assert_eq!(http.status("PUT /%00%ff%20%25%3F", "", Some(b"")), 201);
        assert_eq!(http.get("/%00%FF%20%25%3f").content, b"");
        assert_eq!(resp.ask("DBSIZE"), ":3");
        assert_eq!(http.status("DELETE /photo", "", None), 204);
        assert_eq!(http.status("DELETE /photo", "", None), 404);
        assert_eq!(resp.ask("EXISTS photo"), ":0");
        // What is no string is replaced and deleted as by SET and DEL, and not shown.
        resp.ask("HSET hash field value");
        assert_eq!(http.status("GET /hash", "", None), 409);
        assert_eq!(http.status("HEAD /hash", "", None), 409);
        assert_eq!(http.status("PUT /hash", "", Some(b"string")), 204);
        assert_eq!(resp.ask("GET hash"), "string");
        resp.ask("RPUSH list 1 2");
        assert_eq!(http.status("DELETE /list", "", None), 204);
        // The time of the end goes, as by SET.
        resp.ask("SET ends 1 EX 1000");
        http.ask("PUT /ends", "", Some(b"2"));
        assert_eq!(resp.ask("TTL ends"), ":-1");
        let kept = http.get("/ends").field("etag").map(str::to_owned);
        serving.stop();
        let serving = Serving::start(engine, folder.path());
        let mut http = Http::connect(&serving);
        let got = http.get("/ends");
        assert_eq!((got.text(), got.field("etag")), ("2", kept.as_deref()), "{engine}: after a start");
        serving.stop();
    }
}

#[test]
fn a_version_makes_writes_conditional() {
    on_each(|engine, serving| {
        let mut http = Http::connect(serving);
        let tag = |response: &Response| response.field("etag").unwrap().to_owned();
        assert_eq!(http.status("PUT /key", "If-Match: *\r\n", Some(b"0")), 412, "{engine}");
        let first = tag(&http.ask("PUT /key", "If-None-Match: *\r\n", Some(b"1")));
        assert_eq!(http.status("PUT /key", "If-None-Match: *\r\n", Some(b"0")), 412);
        let second = tag(&http.ask("PUT /key", &format!("If-Match: \"x\", {first}\r\n"), Some(b"2")));
        assert_eq!(http.status("PUT /key", &format!("If-Match: {first}\r\n"), Some(b"0")), 412);
        assert_eq!(http.status("DELETE /key", &format!("If-Match: {first}\r\n"), None), 412);
        assert_eq!(http.get("/key").text(), "2", "{engine}");
        let known = http.ask("GET /key", &format!("If-None-Match: W/{second}\r\n"), None);
        assert_eq!((known.status, known.field("etag"), known.content.len()), (304, Some(&second[..]), 0));
        assert_eq!(http.status("HEAD /key", &format!("If-None-Match: {second}\r\n"), None), 304);
        assert_eq!(http.status("GET /key", &format!("If-None-Match: {first}\r\n"), None), 200);
        assert_eq!(http.status("GET /key", &format!("If-Match: {first}\r\n"), None), 412);
        // A command of the other protocol is a write as any other.
        assert_eq!(serving.connect().ask("INCR key"), ":3");
        assert_eq!(http.status("PUT /key", &format!("If-Match: {second}\r\n"), Some(b"0")), 412);
        let third = tag(&http.get("/key"));
        assert_eq!(http.status("DELETE /key", &format!("If-Match: {third}\r\n"), None), 204);
        assert_eq!(http.status("GET /key", "If-Match: *\r\n", None), 404);
        assert_eq!(http.status("DELETE /key", "If-Match: *\r\n", None), 404, "{engine}");
    });
}

/// Many clients count by If-Match, on all shards: none of what was acknowledged is lost.
#[test]
fn conditional_writes_of_many_clients_lose_nothing() {
    const CLIENTS: usize = 4;
    const ROUNDS: usize = 50;
    on_each(|engine, serving| {
        Http::connect(serving).ask("PUT /count", "", Some(b"0"));
        std::thread::scope(|scope| {
            for _ in 0..CLIENTS {
                let mut http = Http::connect(serving);
                scope.spawn(move || {
                    let mut got = http.get("/count");
                    let mut tag = got.field("etag").unwrap().to_owned();
                    for _ in 0..ROUNDS {
                        loop {
                            let next = (got.text().parse::<usize>().unwrap() + 1).to_string();
                            let put = http.ask("PUT /count", &format!("If-Match: {tag}\r\n"), Some(next.as_bytes()));
                            if put.status == 204 {
                                // The tag of the write itself: another one may be there by now.
                                tag = put.field("etag").unwrap().to_owned();
                                got.content = next.into_bytes();
                                break;
                            }
                            assert_eq!(put.status, 412, "{engine}");
                            got = http.get("/count");
                            tag = got.field("etag").unwrap().to_owned();
                        }
                    }
                });
            }
        });
        assert_eq!(Http::connect(serving).get("/count").text(), (CLIENTS * ROUNDS).to_string(), "{engine}");
    });
}

#[test]
fn parts_of_a_value_are_sent() {
    on_each(|engine, serving| {
        let mut http = Http::connect(serving);
        let tag = http.ask("PUT /digits", "", Some(b"0123456789")).field("etag").unwrap().to_owned();
        for (range, part, told) in [
            ("0-0", "0", "bytes 0-0/10"),
            ("7-", "789", "bytes 7-9/10"),
            ("-2", "89", "bytes 8-9/10"),
            ("3-99", "3456789", "bytes 3-9/10"),
        ] {
            let got = http.ask("GET /digits", &format!("Range: bytes={range}\r\n"), None);
            assert_eq!((got.status, got.text(), got.field("content-range")), (206, part, Some(told)), "{engine}");
            assert_eq!(got.field("etag"), Some(&tag[..]));
        }
        let beyond = http.ask("GET /digits", "Range: bytes=10-\r\n", None);
        assert_eq!((beyond.status, beyond.field("content-range")), (416, Some("bytes */10")), "{engine}");
        for fields in ["Range: bytes=0-1,3-4\r\n", "Range: x\r\n", "Range: bytes=0-1\r\nIf-Range: \"other\"\r\n"] {
            assert_eq!(http.ask("GET /digits", fields, None).text(), "0123456789", "{engine}: {fields}");
        }
        let same = http.ask("GET /digits", &format!("Range: bytes=0-1\r\nIf-Range: {tag}\r\n"), None);
        assert_eq!((same.status, same.text()), (206, "01"));
        let head = http.ask("HEAD /digits", "Range: bytes=0-1\r\n", None);
        assert_eq!((head.status, head.field("content-length")), (200, Some("10")));
    });
}

#[test]
fn keys_are_listed_in_order() {
    on_each(|engine, serving| {
        let (mut http, mut resp) = (Http::connect(serving), serving.connect());
        assert_eq!(http.get("/").text(), "{\"keys\":[],\"next\":null}\n", "{engine}");
        // More than a leaf of the index has, written in another order.
        const KEYS: usize = 1000;
        (0..KEYS).for_each(|key| resp.send(&["SET", &format!("key:{:03}", key * 7 % KEYS), "value"]));
        (0..KEYS).for_each(|_| assert_eq!(resp.reply(), "+OK"));
        resp.send(&["SET", "a \"quoted\"/\u{e4}", "value"]);
        resp.reply();
        resp.ask("HSET z field value");
        let list = http.get("/");
        assert_eq!((list.status, list.field("content-type")), (200, Some("application/json")), "{engine}");
        let keys: Vec<&str> = list.text().split(['[', ']']).nth(1).unwrap().split(',').collect();
        assert_eq!((keys.len(), keys[0]), (1000, "\"a%20%22quoted%22/%C3%A4\""), "{engine}");
        assert!(keys.is_sorted() && list.text().ends_with("],\"next\":\"key:999\"}\n"), "{engine}");
        for (query, wanted) in [
            ("from=key:999", "{\"keys\":[\"key:999\",\"z\"],\"next\":null}\n"),
            ("prefix=key:01&limit=2", "{\"keys\":[\"key:010\",\"key:011\"],\"next\":\"key:012\"}\n"),
            ("prefix=key%3a01&from=key:018", "{\"keys\":[\"key:018\",\"key:019\"],\"next\":null}\n"),
            ("prefix=key&from=z", "{\"keys\":[],\"next\":null}\n"),
            ("to=key:001", "{\"keys\":[\"a%20%22quoted%22/%C3%A4\",\"key:000\"],\"next\":null}\n"),
            ("from=key:5&to=key:502", "{\"keys\":[\"key:500\",\"key:501\"],\"next\":null}\n"),
            ("prefix=none", "{\"keys\":[],\"next\":null}\n"),
        ] {
            assert_eq!(http.get(&format!("/?{query}")).text(), wanted, "{engine}: {query}");
        }
        for wrong in ["limit=0", "limit=x", "limit=-1", "limit=%2B1", "nonsense=1", "prefix=%", "nonsense"] {
            assert_eq!(http.get(&format!("/?{wrong}")).status, 400, "{engine}: {wrong}");
        }
        let head = http.ask("HEAD /?prefix=none", "", None);
        assert_eq!((head.status, head.field("content-length")), (200, Some("24")), "{engine}");
        // The same as a command.
        assert_eq!(resp.ask("KSF.KEYS PREFIX key:01 COUNT 2"), "[key:012 [key:010 key:011]]", "{engine}");
        assert_eq!(resp.ask("ksf.keys from key:999"), "[nil [key:999 z]]", "{engine}");
        assert_eq!(resp.ask("KSF.KEYS FROM key:5 TO key:502"), "[nil [key:500 key:501]]", "{engine}");
        for wrong in ["KSF.KEYS FROM", "KSF.KEYS NONSENSE 1", "KSF.KEYS COUNT 0"] {
            assert_eq!(resp.ask(wrong), "-ERR syntax error", "{engine}: {wrong}");
        }
        assert!(resp.ask("KSF.KEYS COUNT x").starts_with("-ERR value is not an integer"));
        resp.ask("MULTI");
        assert!(resp.ask("KSF.KEYS").contains("not allowed inside a transaction"));
    });
}

/// A walk by `next` ends, and shows each key once, however little room a response has.
#[test]
fn a_list_is_no_longer_than_a_response_may_be() {
    const KEYS: usize = 300;
    let limits = Limits { message_bytes_max: 8 << 10, connection_bytes_max: 8 << 10, ..Limits::default() };
    on_each_engine(&limits, &Settings::default(), |engine, serving| {
        let (mut http, mut resp) = (Http::connect(serving), serving.connect());
        for key in 0..KEYS {
            assert_eq!(resp.ask(&format!("SET {}{key:03} {key}", "k".repeat(100))), "+OK");
        }
        let (mut shown, mut from, mut steps) = (0, String::new(), 0);
        loop {
            let list = http.get(&format!("/?from={from}"));
            assert!(list.status == 200 && list.content.len() <= 8 << 10, "{engine}: {}", list.status);
            shown += list.text().split(['[', ']']).nth(1).unwrap().split(',').count();
            let next = list.text().split("\"next\":").nth(1).unwrap().trim();
            steps += 1;
            match next.strip_suffix("}").unwrap() {
                "null" => break,
                next => from = next.trim_matches('"').to_owned(),
            }
        }
        assert!(shown == KEYS && steps > 3, "{engine}: {shown} in {steps}");
        let (mut shown, mut from) = (0, String::new());
        loop {
            resp.send(&["KSF.KEYS", "FROM", &from]);
            let told = resp.reply();
            let (next, keys) = told.trim_start_matches('[').split_once(" [").unwrap();
            shown += keys.split(' ').count();
            from = next.to_owned();
            if next == "nil" {
                break;
            }
        }
        assert_eq!(shown, KEYS, "{engine}");
    });
}

/// Both protocols, whole and at every byte: the first line tells them apart.
#[test]
fn a_conversation_is_the_same_however_it_is_split() {
    let conversation = [
        request("PUT /split", "", Some(b"GET / HTTP/1.1\r\n\r\n")),
        b"\r\n".to_vec(),
        request("GET /split", "", None),
        b"POST / HTTP/1.1\r\nHost: x.localhost\r\n\r\n".to_vec(),
        b"PUT /chunked HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n4;x=y\r\nwiki\r\n5\r\npedia\r\n0\r\nT: v\r\n\r\n"
            .to_vec(),
        request("GET /chunked", "Range: bytes=2-5\r\n", None),
        request("DELETE /split", "", None),
        request("GET /split", "Connection: close\r\n", None),
    ]
    .concat();
    let wanted = [201, 200, 421, 201, 206, 204, 404];
    on_each(|engine, serving| {
        let answers = |pieces: &mut dyn Iterator<Item = &[u8]>| {
            let mut http = Http::connect(serving);
            pieces.for_each(|piece| http.send(piece));
            let answers: Vec<Response> = wanted.iter().map(|_| http.response(false)).collect();
            stream::expect_end(&mut http.0);
            assert_eq!(Http::connect(serving).status("DELETE /chunked", "", None), 204);
            answers
        };
        let is_right = |answers: &[Response], how: usize| {
            let statuses: Vec<u16> = answers.iter().map(|answer| answer.status).collect();
            assert_eq!(statuses, wanted, "{engine}: {how}");
            assert_eq!(answers[1].text(), "GET / HTTP/1.1\r\n\r\n", "{engine}: {how}");
            assert_eq!(answers[4].text(), "kipe", "{engine}: {how}");
        };
        is_right(&answers(&mut std::iter::once(&conversation[..])), 0);
        is_right(&answers(&mut conversation.chunks(1)), 1);
        for at in 1..conversation.len() {
            let (one, other) = conversation.split_at(at);
            is_right(&answers(&mut [one, other].into_iter()), at);
        }
        // A command that looks like a request for as long as it can.
        for at in 1..22 {
            let mut client = serving.connect();
            let (one, other) = b"GET /split\r\nEXISTS x\r\n".split_at(at.min(22));
            client.0.get_mut().write_all(one).unwrap();
            client.0.get_mut().write_all(other).unwrap();
            assert_eq!((client.reply(), client.reply()), ("nil".into(), ":0".into()), "{engine}: {at}");
        }
    });
}

#[test]
fn a_pipeline_is_answered_in_order_among_clients_of_both_protocols() {
    const CLIENTS: usize = 4;
    const ROUNDS: usize = 100;
    on_each(|engine, serving| {
        std::thread::scope(|scope| {
            for client in 0..CLIENTS {
                let (mut http, mut resp) = (Http::connect(serving), serving.connect());
                scope.spawn(move || {
                    for round in 0..ROUNDS {
                        let (key, value) = (format!("{client}:{}", round % 10), format!("value {round}"));
                        let put = request(&format!("PUT /{key}"), "", Some(value.as_bytes()));
                        let get = request(&format!("GET /{key}"), "", None);
                        http.send([put, get.clone(), get].concat());
                        resp.send(&["INCR", "all"]);
                        assert!(matches!(http.response(false).status, 201 | 204), "{engine}");
                        assert_eq!(http.response(false).text(), value, "{engine}");
                        assert_eq!(http.response(false).text(), value, "{engine}");
                        assert!(resp.reply().starts_with(':'));
                        assert_eq!(resp.ask(&format!("GET {key}")), value, "{engine}");
                    }
                });
            }
        });
        assert_eq!(Http::connect(serving).get("/all").text(), (CLIENTS * ROUNDS).to_string(), "{engine}");
    });
}

/// All that the server sends until it ends the connection.
fn until_end(serving: &Serving, pieces: &[&[u8]]) -> String {
    let mut stream = stream::connect(serving.address());
    for piece in pieces {
        // It may have ended the connection by now.
        let _ = stream.write_all(piece);
    }
    let mut sent = Vec::new();
    // A reset ends it, too.
    let _ = stream.read_to_end(&mut sent);
    String::from_utf8_lossy(&sent).into_owned()
}

/// Whatever begins a connection and is no command: what follows it is not carried out.
#[test]
fn body_of_an_unknown_request_is_not_carried_out() {
    const BODY: &str = "x\r\nSET wd 1\r\n*3\r\n$3\r\nSET\r\n$2\r\nwd\r\n$1\r\n1\r\n";
    let fields = format!("Host: localhost\r\nContent-Length: {}\r\n\r\n{BODY}", BODY.len());
    // What goes on all the same ends: a head by the empty line, commands by the last one.
    let headless = format!("{BODY}QUIT\r\n\r\n");
    let firsts = [
        "PROPFIND / HTTP/1.1",
        "propfind / HTTP/1.1",
        "post / HTTP/1.1",
        "Post / HTTP/1.1",
        "put /x HTTP/1.1",
        "get / HTTP/1.1",
        " GET / HTTP/1.1",
        " POST / HTTP/1.1",
        "\tPUT /x HTTP/1.1",
        "POST\t/\tHTTP/1.1",
        "PUT\t/x HTTP/1.1",
        "POST  / HTTP/1.1",
        "SET / HTTP/1.1",
        "DEL /x HTTP/1.1",
        "PING / HTTP/1.1",
        "PING * http/1.1",
        "X / HTTP/3",
        "PRI * HTTP/2.0",
        "POST /",
        "POST",
        "post /x",
        "Host: x",
        "PROPFIND",
        "PROPFIND /",
        "M-SEARCH * HTTP/1.1",
        "GET / HTTP/1.1\0",
        "PROPFIND / HTTP/1.1\rx",
        "\0",
        "\x16\x03\x01",
        "<xml>",
        "EHLO x",
        "\"PROPFIND / HTTP/1.1",
        "'PROPFIND' / HTTP/1.1",
    ];
    on_each(|engine, serving| {
        for first in firsts {
            let ends = ["", "\r\n", " \r\n\n"].map(|front| (front, "\r\n", &fields[..]));
            // Without the line of a head that ends a connection wherever it stands.
            for (front, end, rest) in ends.into_iter().chain([("", "\n", &fields[..]), ("", "\r\n", &headless[..])]) {
                let stream = format!("{front}{first}{end}{rest}");
                let (one, other) = stream.as_bytes().split_at(front.len() + first.len() / 2);
                for pieces in [&[stream.as_bytes()][..], &[one, other]] {
                    let sent = until_end(serving, pieces);
                    assert!(!sent.contains("+OK"), "{engine}: {stream:?}: {sent:?}");
                    assert_eq!(serving.connect().ask("EXISTS wd"), ":0", "{engine}: {stream:?}: {sent:?}");
                }
            }
        }
        // What is a command goes on, also with a version in its arguments.
        let mut client = serving.connect();
        client.0.get_mut().write_all(b"\r\nSET version HTTP/1.1\r\nnonsense x\r\nGET version\r\n").unwrap();
        assert_eq!(client.reply(), "+OK", "{engine}");
        assert_eq!(client.reply(), "-ERR unknown command 'nonsense', with args beginning with: 'x'", "{engine}");
        assert_eq!(client.reply(), "HTTP/1.1", "{engine}");
    });
}

/// Lines of HTTP end a connection wherever they stand, as in Redis.
#[test]
fn post_and_host_end_a_connection_behind_commands() {
    on_each(|engine, serving| {
        for line in [
            "POST / HTTP/1.1\r\n",
            "post\n",
            "pOsT x\r\n",
            "HOST: x\r\n",
            "host:\r\n",
            "\"Host:\" x\r\n",
            " post x\r\n",
            "*1\r\n$4\r\npOST\r\n",
            "*2\r\n$5\r\nHOST:\r\n$1\r\nx\r\n",
            "*7\r\n$4\r\nPOST\r\n$0\r\n\r\n$0\r\n\r\n$0\r\n\r\n$0\r\n\r\n$0\r\n\r\n$0\r\n\r\n",
        ] {
            for command in
                ["SET before 1\r\n", "*3\r\n$3\r\nSET\r\n$6\r\nbefore\r\n$1\r\n1\r\n", "SET before 1\r\nMULTI\r\n"]
            {
                let stream = format!("{command}{line}SET wd 1\r\nEXEC\r\n");
                let sent = until_end(serving, &[stream.as_bytes()]);
                assert!(
                    !sent.trim_start_matches("+OK\r\n").contains(['+', '-', '*']),
                    "{engine}: {stream:?}: {sent:?}"
                );
                let mut client = serving.connect();
                assert_eq!(
                    (client.ask("DEL before"), client.ask("EXISTS wd")),
                    (":1".into(), ":0".into()),
                    "{engine}: {stream:?}"
                );
            }
        }
    });
}

#[test]
fn value_is_not_replaced_by_a_part_of_one() {
    on_each(|engine, serving| {
        let mut http = Http::connect(serving);
        http.ask("PUT /key", "", Some(b"0123456789"));
        for fields in [
            "Content-Range: bytes 0-1/10\r\n",
            "content-range: bytes 0-1/*\r\n",
            "Content-Range: x\r\n",
            "Content-Range:\r\n",
            "Content-Type: multipart/byteranges; boundary=x\r\n",
            "content-type: Multipart/ByteRanges\r\n",
        ] {
            assert_eq!(http.status("PUT /key", fields, Some(b"ab")), 400, "{engine}: {fields}");
            assert_eq!(http.status("POST /", fields, Some(b"key 0001value")), 400, "{engine}: {fields}");
        }
        assert_eq!(http.get("/key").text(), "0123456789", "{engine}");
        assert_eq!(http.get("/key%200001").status, 404, "{engine}");
        // Before the body is sent, too.
        http.send("PUT /key HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Range: bytes 0-1/10\r\nContent-Length: 2\r\n\r\n");
        assert_eq!(http.response(false).status, 400, "{engine}");
        // Other types and other methods are as before.
        let mut http = Http::connect(serving);
        assert_eq!(http.status("PUT /key", "Content-Type: multipart/form-data\r\n", Some(b"x")), 204, "{engine}");
        assert_eq!(http.ask("GET /key", "Content-Range: bytes 0-1/10\r\n", None).text(), "x", "{engine}");
    });
}

/// Pages reach the store neither by a name of their own nor by an element that is loaded from it.
#[test]
fn pages_of_browsers_are_kept_out() {
    on_each(|engine, serving| {
        for (target, host, status) in [
            ("/", "localhost", 200),
            ("/", "127.0.0.1:1", 200),
            ("/", "[::1]:1", 200),
            ("/", "", 200),
            ("http://localhost:80/", "evil.example", 200),
            ("http://evil.example/", "localhost", 421),
            ("HTTP://EVIL.example", "localhost", 421),
            ("http://evil.example:80/key", "127.0.0.1", 421),
            ("/", "evil.example", 421),
            ("/", "localhost.evil.example", 421),
            ("/", "[::1].evil.example:80", 400),
            ("/", "localhost:80:evil", 400),
            ("/", "localhost@evil.example", 400),
            ("http://localhost@evil.example/", "localhost", 400),
            ("/", "a b", 400),
            ("/", "localhost, evil.example", 400),
        ] {
            let mut http = Http::connect(serving);
            http.send(format!("GET {target} HTTP/1.1\r\nHost: {host}\r\n\r\n"));
            assert_eq!(http.response(false).status, status, "{engine}: {target} of {host:?}");
        }
        let mut http = Http::connect(serving);
        for (fields, status) in [
            ("Sec-Fetch-Site: cross-site\r\n", 403),
            ("sec-fetch-site: same-site\r\n", 403),
            ("Sec-Fetch-Site: same-origin\r\n", 403),
            ("Sec-Fetch-Site: none\r\nSec-Fetch-Site: cross-site\r\n", 403),
            ("Sec-Fetch-Site:\r\n", 403),
            ("Sec-Fetch-Site: none\r\n", 404),
            ("", 404),
        ] {
            let got = http.ask("GET /none", fields, None);
            assert_eq!(
                (got.status, got.field("x-content-type-options")),
                (status, Some("nosniff")),
                "{engine}: {fields}"
            );
        }
        http.ask("PUT /key", "", Some(b"<script>"));
        assert_eq!(http.get("/key").field("x-content-type-options"), Some("nosniff"), "{engine}");
    });
}

/// The key is the first 8 bytes of the body, and the rest of it is the value.
#[test]
fn a_post_has_its_key_in_front_of_its_value() {
    on_each(|engine, serving| {
        let (mut http, mut resp) = (Http::connect(serving), serving.connect());
        let body = [&b"key 0001"[..], &[b'v'; 1272]].concat();
        assert_eq!(http.status("POST /", "", Some(&body)), 201, "{engine}");
        assert_eq!(http.status("POST /", "", Some(&body)), 204, "{engine}");
        resp.send(&["GET", "key 0001"]);
        assert_eq!(resp.reply(), "v".repeat(1272), "{engine}");
        assert_eq!(http.get("/key%200001").content, &body[8..], "{engine}");
        assert_eq!(http.status("POST /", "", Some(b"7 bytes")), 400, "{engine}");
    });
}

#[test]
fn what_makes_no_sense_is_told() {
    let limits = Limits { message_bytes_max: 64 << 10, connection_bytes_max: 64 << 10, ..Limits::default() };
    on_each_engine(&limits, &Settings::default(), |engine, serving| {
        let mut http = Http::connect(serving);
        // These leave the connection as it is.
        for (line, fields, status) in [
            ("GET /%zz", "", 400),
            ("GET /key?x=y", "", 400),
            ("GET key", "", 400),
            ("PUT /key", "", 411),
            ("POST /", "", 411),
            ("POST /key", "", 405),
            ("PUT /", "", 405),
            ("DELETE /", "", 405),
            ("OPTIONS /key", "", 405),
            ("PATCH /key", "", 405),
            ("GET /key", "Origin: http://example.org\r\n", 403),
        ] {
            assert_eq!(http.status(line, fields, None), status, "{engine}: {line}");
        }
        assert_eq!(http.ask("PATCH /", "", None).field("allow"), Some("GET, HEAD, PUT, POST, DELETE"));
        let long = "k".repeat(65_536 - 200);
        assert_eq!(http.status(&format!("GET /{long}"), "", None), 404, "{engine}: a long key");
        // A page that has the name of this address told to a browser.
        http.send("GET / HTTP/1.1\r\nHost: example.org\r\n\r\n");
        assert_eq!(http.response(false).status, 421, "{engine}");
        // These end it: where the next request begins is not known, or is far away.
        let too_long = format!("PUT /key HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n\r\n", 64 << 10);
        let chunk = format!("fffff\r\n{}", "x".repeat(64 << 10));
        let too_many = format!("PUT /key HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n{chunk}");
        let endless = format!("GET /{} HTTP/1.1\r\n", "k".repeat(70 << 10));
        for (sent, status) in [
            ("GET / HTTP/1.1\r\n\r\n", 400),
            ("PUT /key HTTP/1.1\r\nHost: localhost\r\nContent-Length: x\r\n\r\n", 400),
            ("PUT /key HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
            ("PUT /key HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nx\r\n", 400),
            ("GET / HTTP/1.1\r\nHost: localhost\r\nIf-Match: *\r\nIf-Match: *\r\n\r\n", 400),
            ("PUT /key HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip\r\n\r\n", 501),
            ("GET / HTTP/2.0\r\nHost: localhost\r\n\r\n", 505),
            ("PUT /key HTTP/1.1\r\nHost: localhost\r\nExpect: more\r\nContent-Length: 1\r\n\r\n", 417),
            ("CONNECT localhost:1 HTTP/1.1\r\nHost: localhost\r\n\r\n", 405),
            ("PROPFIND / HTTP/1.1\r\nHost: localhost\r\n\r\n", 501),
            ("put /key HTTP/1.1\r\nHost: localhost\r\n\r\n", 501),
            ("GET /a#b HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
            ("GET / HTTP/1.1\nHost: localhost\n\n", 400),
            (
                "PUT /key HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nGET / HTTP/1.1\r\n\r\n",
                400,
            ),
            (too_long.as_str(), 413),
            (too_many.as_str(), 413),
            (endless.as_str(), 431),
        ] {
            let mut http = Http::connect(serving);
            http.send(sent);
            let told = http.response(false);
            let shown = &sent[..sent.len().min(90)];
            assert_eq!((told.status, told.field("connection")), (status, Some("close")), "{engine}: {shown:?}");
        }
        // One byte less fits, with the head.
        let head = "PUT /key HTTP/1.1\r\nHost: localhost\r\nContent-Length: 65000\r\n\r\n".len();
        let value = vec![b'v'; (64 << 10) - head];
        assert_eq!(http.status("PUT /key", "", Some(&value)), 201, "{engine}");
        assert!(http.get("/key").content == value, "{engine}: what can be set can be read");
        for at in 0..2 {
            let tail = "x".repeat(40_000);
            serving.connect().ask(&format!("APPEND key {tail}"));
            assert_eq!(http.get("/key").status, 500, "{engine}: {at}");
        }
        assert_eq!(http.ask("GET /key", "Range: bytes=0-9\r\n", None).text(), "vvvvvvvvvv", "{engine}");
    });
}

#[test]
fn a_key_that_is_too_long_is_told() {
    on_each(|engine, serving| {
        let mut http = Http::connect(serving);
        let key = "%6B".repeat(65_535);
        assert_eq!(http.status(&format!("PUT /{key}"), "", Some(b"value")), 201, "{engine}");
        assert_eq!(http.get(&format!("/{}", "k".repeat(65_535))).text(), "value", "{engine}");
        assert_eq!(http.status(&format!("PUT /{key}k"), "", Some(b"value")), 414, "{engine}");
        // More than a segment of the log holds.
        assert_eq!(http.status("PUT /long", "", Some(&vec![b'v'; (1 << 20) + 1000])), 413, "{engine}");
        assert_eq!(http.get("/long").status, 404, "{engine}");
    });
}

#[test]
fn a_full_store_says_so_and_has_room_when_keys_are_deleted() {
    on_each(|engine, serving| {
        let (mut http, value) = (Http::connect(serving), vec![b'v'; 20_000]);
        let mut keys = 0;
        let told = loop {
            match http.status(&format!("PUT /{keys}"), "", Some(&value)) {
                201 => keys += 1,
                told => break told,
            }
        };
        assert!(told == 507 && keys > 100, "{engine}: {told} after {keys}");
        assert!(http.get("/0").content == value, "{engine}");
        for key in (0..keys).filter(|key| key % 2 == 0) {
            assert_eq!(http.status(&format!("DELETE /{key}"), "", None), 204, "{engine}");
        }
        for key in 0..keys / 4 {
            assert_eq!(http.status(&format!("PUT /{}", 2 * key), "", Some(&value)), 201, "{engine}: {key} of {keys}");
        }
    });
}

#[test]
fn a_client_that_waits_is_told_to_go_on() {
    on_each(|engine, serving| {
        let mut http = Http::connect(serving);
        for (fields, body) in
            [("Content-Length: 5\r\n", "value"), ("Transfer-Encoding: chunked\r\n", "5\r\nvalue\r\n0\r\n\r\n")]
        {
            let head = format!("PUT /key HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\n{fields}\r\n");
            http.send(&head);
            assert_eq!(http.response(false).status, 100, "{engine}: {fields}");
            body.as_bytes().chunks(1).for_each(|byte| http.send(byte));
            http.send(request("GET /key", "", None));
            assert!(matches!(http.response(false).status, 201 | 204), "{engine}: {fields}");
            assert_eq!(http.response(false).text(), "value", "{engine}: {fields}");
            assert_eq!(http.status("DELETE /key", "", None), 204);
        }
        // With all of it there, nobody waits.
        http.send(request("PUT /key", "Expect: 100-continue\r\n", Some(b"value")));
        assert_eq!(http.response(false).status, 201, "{engine}");
        // One whose body is not wanted is told before it sends it.
        http.send("PUT / HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n");
        let told = http.response(false);
        assert_eq!((told.status, told.field("connection")), (405, Some("close")), "{engine}");
        stream::expect_end(&mut http.0);
    });
}

/// Wherever a peer stops in a request or a command, it has so long and no longer.
#[test]
fn every_part_that_is_awaited_has_a_deadline() {
    const EXPECT: &str = "PUT /key HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\n";
    const PUT: &str = "PUT /key HTTP/1.1\r\nHost: localhost\r\n";
    const CHUNKED: &str = "Transfer-Encoding: chunked\r\n\r\n";
    let limits = Limits { assembly_timeout_ms: 200, ..Limits::default() };
    on_each_engine(&limits, &Settings::default(), |engine, serving| {
        // All wait side by side.
        let mut awaited = Vec::new();
        for (head, rests) in [
            (format!("{EXPECT}Content-Length: 5\r\n\r\n"), &["", "v", "valu"][..]),
            (
                format!("{EXPECT}{CHUNKED}"),
                &["", "5", "5\r\n", "5\r\nval", "5\r\nvalue\r\n", "5\r\nvalue\r\n0\r\n", "0\r\nX: y\r\n"],
            ),
            (format!("{PUT}Content-Length: 5\r\n\r\n"), &["", "v", "valu"]),
            (format!("{PUT}{CHUNKED}"), &["", "5", "5\r\nval", "5\r\nvalue\r\n0\r\n", "0\r\nX: y\r\n"]),
            (PUT.to_owned(), &["", "Content"]),
        ] {
            for rest in rests {
                let mut http = Http::connect(serving);
                http.send(&head);
                if head.starts_with(EXPECT) {
                    assert_eq!(http.response(false).status, 100, "{engine}: {head}");
                }
                http.send(rest);
                awaited.push((http, format!("{engine}: {head:?} {rest:?}")));
            }
        }
        let parts = ["*2", "*2\r\n", "*2\r\n$3\r\nGE", "*2\r\n$3\r\nGET\r\n", "GET k", "PING\r\n*1\r\n"];
        let peers = parts.map(|part| {
            let mut peer = stream::connect(serving.address());
            peer.write_all(part.as_bytes()).unwrap();
            peer
        });
        for (mut http, what) in awaited {
            assert_eq!(http.response(false).status, 408, "{what}");
            stream::expect_end(&mut http.0);
        }
        for (part, mut peer) in parts.into_iter().zip(peers) {
            let mut told = String::new();
            peer.read_to_string(&mut told).unwrap();
            assert_eq!(told, if part.starts_with("PING") { "+PONG\r\n" } else { "" }, "{engine}: {part:?}");
        }
        // Between two requests, and between two commands, nothing is awaited. An empty line begins neither.
        let mut idle = Http::connect(serving);
        assert_eq!(idle.get("/key").status, 404, "{engine}");
        idle.send("\r\n");
        let mut client = serving.connect();
        assert_eq!(client.ask("PING"), "+PONG", "{engine}");
        let mut late = Http::connect(serving);
        late.send(format!("{EXPECT}Content-Length: 5\r\n\r\n"));
        assert_eq!((late.response(false).status, late.response(false).status), (100, 408), "{engine}");
        assert_eq!(idle.get("/key").status, 404, "{engine}");
        assert_eq!(client.ask("PING"), "+PONG", "{engine}");
    });
}

#[test]
fn connections_stay_as_the_version_says() {
    on_each(|engine, serving| {
        let mut http = Http::connect(serving);
        http.send("GET /none HTTP/1.0\r\nConnection: keep-alive\r\n\r\n");
        assert_eq!(http.response(false).field("connection"), Some("keep-alive"), "{engine}");
        http.send("GET /none HTTP/1.0\r\n\r\n");
        assert_eq!(http.response(false).field("connection"), Some("close"), "{engine}");
        stream::expect_end(&mut http.0);
        let mut http = Http::connect(serving);
        http.send(request("PUT /key", "Connection: close\r\n", Some(b"value")));
        assert_eq!(http.response(false).status, 201, "{engine}");
        stream::expect_end(&mut http.0);
    });
}

#[test]
fn nobody_without_the_password_gets_in() {
    let settings = Settings { password: Some(b"open sesame".to_vec()), ..Settings::default() };
    on_each_engine(&Limits::default(), &settings, |engine, serving| {
        let mut http = Http::connect(serving);
        for (line, content) in
            [("GET /key", None), ("PUT /key", Some(&b"value"[..])), ("GET /", None), ("PATCH /", None)]
        {
            let told = http.ask(line, "", content);
            assert_eq!(told.status, 401, "{engine}: {line}");
            assert_eq!(told.field("www-authenticate"), Some("Basic realm=\"ksf store\""), "{engine}");
            assert_eq!(http.status(line, "Authorization: Bearer sesame\r\n", content), 401, "{engine}: {line}");
        }
        let bearer = "Authorization: Bearer open sesame\r\n";
        let basic = "Authorization: Basic ZGVmYXVsdDpvcGVuIHNlc2FtZQ==\r\n";
        assert_eq!(http.status("GET /key", bearer, None), 404, "{engine}: nothing was written");
        assert_eq!(http.status("PUT /key", basic, Some(b"value")), 201, "{engine}");
        assert_eq!(http.ask("GET /key", bearer, None).text(), "value", "{engine}");
        assert_eq!(http.status("GET /key", "", None), 401, "{engine}: each request says it");
        http.send(format!("GET /key HTTP/1.1\r\nHost: example.org\r\n{bearer}\r\n"));
        assert_eq!(http.response(false).status, 200, "{engine}: with a password any name is right");
        http.send("PUT /key HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n");
        assert_eq!(http.response(false).status, 401, "{engine}");
    });
}
