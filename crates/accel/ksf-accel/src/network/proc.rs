//! `/proc/net/tcp` and `tcp6`, for kernels that do not tell by netlink.
//!
//! A read that asks for more than the listening sockets goes on to all others of the machine, of which there may be
//! hundreds of thousands: on a loaded machine this was seen to take seconds.

use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::net::IpAddr;

use super::Listening;

/// All listening TCP sockets; the kernel tells them before all others.
pub(super) fn listening() -> io::Result<Vec<Listening>> {
    let mut found = Vec::new();
    // Of the thread: /proc/net is that of the process's first thread.
    for file in ["/proc/thread-self/net/tcp", "/proc/thread-self/net/tcp6"] {
        match File::open(file) {
            Ok(file) => read(BufReader::new(file), &mut found)?,
            // No IPv6 in this kernel.
            Err(error) if error.kind() == io::ErrorKind::NotFound && file.ends_with('6') => {}
            Err(error) => return Err(error),
        }
    }
    Ok(found)
}

fn read(table: impl BufRead, found: &mut Vec<Listening>) -> io::Result<()> {
    for line in table.lines().skip(1) {
        match parse(&line?) {
            Some(Some(listening)) => found.push(listening),
            // The first that does not listen ends the list.
            Some(None) => break,
            None => return Err(io::Error::new(io::ErrorKind::InvalidData, "a line of /proc/net/tcp has another form")),
        }
    }
    Ok(())
}

/// One line; the inner `None`: not a listener.
fn parse(line: &str) -> Option<Option<Listening>> {
    let mut fields = line.split_ascii_whitespace().skip(1);
    let (address, port) = fields.next()?.split_once(':')?;
    let state = fields.nth(1)?;
    if state != "0A" {
        return Some(None);
    }
    let inode = fields.nth(5)?.parse().ok()?;
    let word = |at: usize| u32::from_str_radix(address.get(at * 8..at * 8 + 8)?, 16).ok().map(u32::to_ne_bytes);
    let address = match address.len() {
        8 => IpAddr::from(word(0)?),
        32 => {
            let bytes: [u8; 16] = [word(0)?, word(1)?, word(2)?, word(3)?].concat().try_into().ok()?;
            IpAddr::from(bytes).to_canonical()
        }
        _ => return None,
    };
    Some(Some(Listening { address, port: u16::from_str_radix(port, 16).ok()?, inode }))
}

#[cfg(test)]
#[cfg(target_endian = "little")]
mod tests {
    use super::*;

    const V4: &str = "\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F90 00000000:0000 0A 00000000:00000003 00:00000000 00000000     0        0 4711 1 0 100 0 0 10 0
   1: 0100007F:1F90 0100007F:C350 01 00000000:00000000 00:00000000 00000000     0        0 4712 1 0 20 4 30 10 -1
   2: 00000000:0050 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4713 1 0 100 0 0 10 0
";

    #[test]
    fn listeners_are_read_up_to_the_first_connection() {
        let mut found = Vec::new();
        read(V4.as_bytes(), &mut found).unwrap();
        assert_eq!(found, [Listening { address: "127.0.0.1".parse().unwrap(), port: 8080, inode: 4711 }]);
    }

    #[test]
    fn ipv6_and_mapped_addresses_are_told_apart() {
        let parse = |address: &str| {
            let line = format!("0: {address}:0050 0:0 0A 0:0 00:0 0 0 0 9 1");
            parse(&line).unwrap().unwrap().address.to_string()
        };
        assert_eq!(parse("00000000000000000000000001000000"), "::1");
        assert_eq!(parse("0000000000000000FFFF00000100000A"), "10.0.0.1");
        assert_eq!(parse("B80D0120000000000000000001000000"), "2001:db8::1");
    }

    #[test]
    fn another_form_is_an_error() {
        assert!(read("head\nnonsense\n".as_bytes(), &mut Vec::new()).is_err());
    }
}
