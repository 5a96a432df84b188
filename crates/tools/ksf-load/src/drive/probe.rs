//! Over UDP every connect succeeds: which of several addresses has a server is found out by a request.

use std::time::Duration;

use rustix::net::{RecvFlags, SendFlags, recv, send};

use crate::drive::clock::monotonic_ns;
use crate::drive::connection::{ClientConnection, Context, Terms};
use crate::drive::protocol::{Mix, Protocol};
use crate::drive::random::mix;
use crate::drive::socket::{Socket, SocketOptions};
use crate::drive::table::RequestTable;
use crate::options::target::Endpoint;
use crate::record::Record;

/// How long a server may take for the first reply.
const PATIENCE: Duration = Duration::from_millis(500);

/// Of several addresses, the first whose server answers; all of them if none does, or if connecting will tell.
pub(crate) fn answering_endpoints<P: Protocol>(
    protocol: &P,
    terms: &Terms,
    socket: &SocketOptions,
    endpoints: Vec<Endpoint>,
) -> Vec<Endpoint> {
    if !socket.transport.is_datagram() || endpoints.len() < 2 {
        return endpoints;
    }
    let mut options = socket.clone();
    options.tick = PATIENCE.min(Duration::from_nanos(terms.timeout_ns));
    let answers = |endpoint: &&Endpoint| {
        let Ok(socket) = Socket::connect_to(endpoint, &options) else { return false };
        let now_ns = monotonic_ns();
        let table = RequestTable::new(1, protocol.id_bits(), mix(now_ns) as u32);
        let mut connection = ClientConnection::new(protocol.client(0), table, 0);
        let mut record = Record::new(protocol.operations(), false);
        let mut cx = Context { now_ns, terms, record: &mut record };
        connection.open(0, now_ns, &mut cx);
        connection.established(&mut cx);
        let request = connection.issue(&protocol.mix(0).draw(), now_ns, &mut cx);
        if send(&socket.fd, request, SendFlags::NOSIGNAL).is_err() {
            return false;
        }
        let mut buffer = vec![0; 1 << 16];
        let Ok((len, _)) = recv(&socket.fd, &mut buffer[..], RecvFlags::empty()) else { return false };
        connection.received(&buffer[..len], 0, false, &mut cx);
        record.settled() > 0
    };
    match endpoints.iter().find(answers) {
        Some(endpoint) => vec![endpoint.clone()],
        None => endpoints,
    }
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use super::*;
    use crate::drive::connection::{Life, TimeLimit};
    use crate::drive::socket::Transport;
    use crate::echo::client::datagrams;
    use crate::echo::pattern::Pattern;

    #[test]
    fn over_udp_the_address_that_answers_is_chosen() {
        let server = UdpSocket::bind("127.0.0.1:0").unwrap();
        let open = Endpoint::Inet(server.local_addr().unwrap());
        std::thread::spawn(move || {
            let mut buffer = [0; 64];
            let (len, peer) = server.recv_from(&mut buffer).unwrap();
            server.send_to(&buffer[..len], peer).unwrap();
        });
        // A port that was free a moment ago.
        let closed = Endpoint::Inet(UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap());
        let terms = Terms { life: Life::Kept, limit: TimeLimit::Request, timeout_ns: 1_000_000_000 };
        let socket = SocketOptions::new(Transport::Udp, Duration::from_secs(1));
        let choose = |endpoints: &[&Endpoint]| {
            let endpoints = endpoints.iter().copied().cloned().collect();
            answering_endpoints(&datagrams(Pattern::new(16)), &terms, &socket, endpoints)
        };
        assert_eq!(choose(&[&closed, &open]), [open]);
        assert_eq!(choose(&[&closed, &closed]), [closed.clone(), closed]);
    }
}
