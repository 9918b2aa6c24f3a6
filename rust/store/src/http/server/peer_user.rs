//! Which user of this machine the other side of a loopback connection belongs to.
//!
//! The client's socket is the established one whose local address is our peer and whose remote address is ours. The
//! kernel tells its owner over netlink (`sock_diag`), in some microseconds. Where that is missing, as in some
//! sandboxes, `/proc/net/tcp` and `/proc/net/tcp6` list all TCP sockets of the machine.

use std::fmt::Write;
use std::fs;
use std::io;
use std::net::{IpAddr, SocketAddr};

use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink, recv, send, socket_with};

/// The state of a connected socket.
const ESTABLISHED: u8 = 1;

/// The user that owns the client's side of a connection from `client` to `server`; `None` where no socket of this
/// machine is that.
pub(super) fn user_of(client: SocketAddr, server: SocketAddr) -> io::Result<Option<u32>> {
    ask_kernel(client, server).or_else(|_| read_tables(client, server))
}

/// Asks `sock_diag`, whose messages are in the machine's byte order, with addresses and ports in that of the network.
fn ask_kernel(client: SocketAddr, server: SocketAddr) -> rustix::io::Result<Option<u32>> {
    const BY_FAMILY: u16 = 20;
    const REQUEST: u16 = 1;
    const ERROR: u16 = 2;
    const TCP: u8 = 6;
    const HEADER: usize = 16;
    /// Where the user stands in an answer: behind its header, four bytes, the addresses, and three counts.
    const USER: usize = HEADER + 4 + 48 + 12;

    let (client_ip, server_ip) = (client.ip().to_canonical(), server.ip().to_canonical());
    let family = if client_ip.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let mut id = Vec::new();
    id.extend(client.port().to_be_bytes());
    id.extend(server.port().to_be_bytes());
    for ip in [client_ip, server_ip] {
        match ip {
            IpAddr::V4(ip) => id.extend([&ip.octets()[..], &[0; 12]].concat()),
            IpAddr::V6(ip) => id.extend(ip.octets()),
        }
    }
    // Any interface, and no cookie.
    id.extend([&[0; 4][..], &[0xff; 8]].concat());
    let mut message = Vec::new();
    message.extend(72u32.to_ne_bytes());
    message.extend(BY_FAMILY.to_ne_bytes());
    message.extend(REQUEST.to_ne_bytes());
    message.extend([0; 8]);
    message.extend([family.as_raw() as u8, TCP, 0, 0]);
    message.extend((1u32 << ESTABLISHED).to_ne_bytes());
    message.extend(&id);

    let socket =
        socket_with(AddressFamily::NETLINK, SocketType::DGRAM, SocketFlags::CLOEXEC, Some(netlink::SOCK_DIAG))?;
    send(&socket, &message, SendFlags::empty())?;
    let mut answer = [0; 512];
    let (length, _) = recv(&socket, &mut answer[..], RecvFlags::DONTWAIT)?;
    let answer = &answer[..length];
    let word = |place: usize| Some(u32::from_ne_bytes(answer.get(place..place + 4)?.try_into().ok()?));
    let kind = answer.get(4..6).map(|bytes| u16::from_ne_bytes([bytes[0], bytes[1]]));
    if kind == Some(ERROR) {
        let errno = Errno::from_raw_os_error(word(HEADER).unwrap_or_default().cast_signed().wrapping_neg());
        return if errno == Errno::NOENT { Ok(None) } else { Err(errno) };
    }
    let is_it = kind == Some(BY_FAMILY) && answer.get(HEADER + 1) == Some(&ESTABLISHED);
    // A listening socket is no answer: the addresses have to be these.
    let is_it = is_it && answer.get(HEADER + 4..HEADER + 4 + 36) == Some(&id[..36]);
    Ok(word(USER).filter(|_| is_it))
}

/// Looks the socket up in the tables of all sockets.
fn read_tables(client: SocketAddr, server: SocketAddr) -> io::Result<Option<u32>> {
    let mut found = None;
    for (table, is_v6) in [("/proc/net/tcp", false), ("/proc/net/tcp6", true)] {
        let (Some(client), Some(server)) = (written(client, is_v6), written(server, is_v6)) else { continue };
        found = match fs::read_to_string(table) {
            Ok(text) => text.lines().find_map(|line| owner_in(line, &client, &server)),
            // A kernel without IPv6 has no such table.
            Err(error) if is_v6 && error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(error),
        };
        if found.is_some() {
            break;
        }
    }
    Ok(found)
}

/// The owner, if this line of a table is about that socket.
fn owner_in(line: &str, client: &str, server: &str) -> Option<u32> {
    let mut fields = line.split_ascii_whitespace().skip(1);
    let (local, remote, state) = (fields.next()?, fields.next()?, fields.next()?);
    // Behind the state: queues, timer, retransmissions.
    (local == client && remote == server && u8::from_str_radix(state, 16) == Ok(ESTABLISHED))
        .then(|| fields.nth(3)?.parse().ok())?
}

/// An address as the tables write it: words of four bytes in the machine's order, and the port.
fn written(address: SocketAddr, is_v6: bool) -> Option<String> {
    let bytes = match (address.ip().to_canonical(), is_v6) {
        (IpAddr::V4(ip), false) => ip.octets().to_vec(),
        // A socket for IPv6 that is connected to an address of IPv4.
        (IpAddr::V4(ip), true) => ip.to_ipv6_mapped().octets().to_vec(),
        (IpAddr::V6(ip), true) => ip.octets().to_vec(),
        (IpAddr::V6(_), false) => return None,
    };
    let mut text = String::new();
    for word in bytes.chunks_exact(4) {
        let word = u32::from_ne_bytes([word[0], word[1], word[2], word[3]]);
        write!(text, "{word:08X}").expect("a string takes all");
    }
    write!(text, ":{:04X}", address.port()).expect("a string takes all");
    Some(text)
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use super::*;

    #[test]
    fn a_line_of_the_table_is_found_by_both_addresses() {
        let line =
            "   3: 0100007F:A1B2 0100007F:1F90 01 00000000:00000000 00:00000000 00000000  1000        0 9 1 0 20";
        let (client, server) = ("127.0.0.1:41394".parse().unwrap(), "127.0.0.1:8080".parse().unwrap());
        let (client, server) = (written(client, false).unwrap(), written(server, false).unwrap());
        assert_eq!(owner_in(line, &client, &server), Some(1000));
        assert_eq!(owner_in(line, &server, &client), None, "our own side of it");
        assert_eq!(owner_in(&line.replace(" 01 ", " 06 "), &client, &server), None, "a socket that is closed");
        assert_eq!(owner_in("  sl  local_address rem_address   st", &client, &server), None);
    }

    #[test]
    fn the_owner_of_a_connection_of_this_process_is_its_user() {
        for host in ["127.0.0.1:0", "[::1]:0"] {
            let Ok(listener) = TcpListener::bind(host) else { continue };
            let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let (server, _) = listener.accept().unwrap();
            let (peer, local) = (server.peer_addr().unwrap(), server.local_addr().unwrap());
            let user = Some(rustix::process::geteuid().as_raw());
            assert_eq!(read_tables(peer, local).unwrap(), user, "{host}");
            assert_eq!(user_of(peer, local).unwrap(), user, "{host}");
            // Where the kernel does not answer, the tables do.
            assert!(ask_kernel(peer, local).is_ok_and(|found| found == user) || !cfg!(target_os = "linux"), "{host}");
            drop(client);
            assert_eq!((user_of(peer, local).unwrap(), read_tables(peer, local).unwrap()), (None, None), "{host}");
        }
    }
}
