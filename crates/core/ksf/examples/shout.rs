//! The smallest service: lines in, the same lines in capitals out. Try it with `nc 127.0.0.1 7000`.

use std::sync::Arc;

use ksf::engine::EngineKind;
use ksf::framing::{Delimiter, Framing};
use ksf::{Message, Peer, Profile, Refused, Reply, Server, Service, Turn, Unlogged};

struct Shout;

impl Service for Shout {
    type Shard = ();
    type Conn = ();
    type Mode = Unlogged;

    fn profile(&self) -> Profile<'_> {
        Profile::new("shout", Framing::Delimiter(Delimiter::LF))
    }

    fn start(&self, _: &mut Turn<'_>) -> std::io::Result<()> {
        Ok(())
    }

    fn accept(&self, (): &mut (), _: &Peer) -> Result<(), Refused> {
        Ok(())
    }

    fn call(&self, (): &mut (), _: &mut (), message: &Message<'_>, reply: &mut Reply<'_>) {
        reply.message(|line| line.extend(message.bytes().iter().map(u8::to_ascii_uppercase)));
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let engine = match EngineKind::Uring.probe() {
        Ok(()) => EngineKind::Uring,
        Err(why) => {
            eprintln!("{why}; using epoll");
            EngineKind::Epoll
        }
    };
    let addr = std::env::args().nth(1).unwrap_or_else(|| "tcp:127.0.0.1:7000".into());
    let server = Server::builder().engine(engine).listen(addr.parse()?, Arc::new(Shout), None).start()?;
    for listener in server.listeners() {
        eprintln!("{} on {} ({engine}); end with return", listener.service, listener.addr);
    }
    std::io::stdin().read_line(&mut String::new())?;
    server.drain()?;
    Ok(())
}
