//! Which user of this machine the other side of a loopback connection belongs to, or a socket that listens.
//!
//! The client's socket is the connected one whose local address is our peer and whose remote address is ours. The
//! kernel tells its owner over netlink (`sock_diag`), in some microseconds. Where that is missing, as in some
//! sandboxes, `/proc/net/tcp` and `/proc/net/tcp6` list all TCP sockets of the machine.
//!
//! Invariant: a socket that no process has open any more, which has no inode, is nobody's. The kernel gives it to root.

use std::fmt::Write;
use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink, recv, send, socket_with};

/// The states of a connected socket: established, or its own side closed after a request (`FIN_WAIT1`, `FIN_WAIT2`).
const CONNECTED: &[u8] = &[1, 4, 5];

/// The state of a socket that listens.
const LISTENING: &[u8] = &[10];

/// The user that owns the client's side of a connection from `client` to `server`; `None` where no socket of this
/// machine is that.
pub(super) fn user_of(client: SocketAddr, server: SocketAddr) -> io::Result<Option<u32>> {
    ask_kernel(CONNECTED, client, server).or_else(|_| read_tables(CONNECTED, client, server))
}

/// The user whose socket listens at this address; `None` where none does.
pub(super) fn user_of_listener(address: SocketAddr) -> io::Result<Option<u32>> {
    let (any_v4, any_v6) = (IpAddr::from(Ipv4Addr::UNSPECIFIED), IpAddr::from(Ipv6Addr::UNSPECIFIED));
    let any = if address.ip().to_canonical().is_ipv4() { any_v4 } else { any_v6 };
    ask_kernel(LISTENING, address, SocketAddr::new(any, 0)).or_else(|_| {
        for (ip, any) in [(address.ip(), any), (any_v4, any_v4), (any_v6, any_v6)] {
            let found = read_tables(LISTENING, SocketAddr::new(ip, address.port()), SocketAddr::new(any, 0))?;
            if found.is_some() {
                return Ok(found);
            }
        }
        Ok(None)
    })
}

/// Asks `sock_diag`, whose messages are in the machine's byte order, with addresses and ports in that of the network.
fn ask_kernel(states: &[u8], local: SocketAddr, remote: SocketAddr) -> rustix::io::Result<Option<u32>> {
    const BY_FAMILY: u16 = 20;
    const REQUEST: u16 = 1;
    const ERROR: u16 = 2;
    const TCP: u8 = 6;
    const HEADER: usize = 16;
    /// Where the user stands in an answer: behind its header, four bytes, the addresses, and three counts. The inode
    /// follows.
    const USER: usize = HEADER + 4 + 48 + 12;

    let (local_ip, remote_ip) = (local.ip().to_canonical(), remote.ip().to_canonical());
    let family = if local_ip.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let mut id = Vec::new();
    id.extend(local.port().to_be_bytes());
    id.extend(remote.port().to_be_bytes());
    for ip in [local_ip, remote_ip] {
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
    message.extend(states.iter().fold(0u32, |mask, state| mask | 1 << state).to_ne_bytes());
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
    // A listening socket may listen at all addresses; of a connected one the addresses have to be these.
    let same = if states == LISTENING { 2 } else { 36 };
    let is_it = kind == Some(BY_FAMILY) && answer.get(HEADER + 1).is_some_and(|state| states.contains(state));
    let is_it = is_it && answer.get(HEADER + 4..HEADER + 4 + same) == Some(&id[..same]);
    Ok(word(USER).filter(|_| is_it && word(USER + 4).is_some_and(|inode| inode > 0)))
}

/// Looks the socket up in the tables of all sockets.
fn read_tables(states: &[u8], local: SocketAddr, remote: SocketAddr) -> io::Result<Option<u32>> {
    let mut found = None;
    for (table, is_v6) in [("/proc/net/tcp", false), ("/proc/net/tcp6", true)] {
        let (Some(local), Some(remote)) = (written(local, is_v6), written(remote, is_v6)) else { continue };
        found = match fs::read_to_string(table) {
            Ok(text) => text.lines().find_map(|line| owner_in(line, states, &local, &remote)),
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
fn owner_in(line: &str, states: &[u8], local: &str, remote: &str) -> Option<u32> {
    let mut fields = line.split_ascii_whitespace().skip(1);
    let is_it = (fields.next()?, fields.next()?) == (local, remote);
    let is_it = is_it && u8::from_str_radix(fields.next()?, 16).is_ok_and(|state| states.contains(&state));
    // Behind the state: queues, timer, retransmissions; behind the user: a timeout, and the inode.
    let (user, inode) = (fields.nth(3)?, fields.nth(1)?);
    (is_it && inode != "0").then(|| user.parse().ok())?
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
        assert_eq!(owner_in(line, CONNECTED, &client, &server), Some(1000));
        assert_eq!(owner_in(line, CONNECTED, &server, &client), None, "our own side of it");
        assert_eq!(
            owner_in(&line.replace(" 01 ", " 06 "), CONNECTED, &client, &server),
            None,
            "a socket that is closed"
        );
        let half_closed = line.replace(" 01 ", " 05 ");
        assert_eq!(owner_in(&half_closed, CONNECTED, &client, &server), Some(1000));
        let orphaned = half_closed.replace("1000        0 9 ", "   0        0 0 ");
        assert_eq!(owner_in(&orphaned, CONNECTED, &client, &server), None, "a socket that no process has");
        assert_eq!(owner_in("  sl  local_address rem_address   st", CONNECTED, &client, &server), None);
    }

    #[test]
    fn the_owner_of_a_connection_of_this_process_is_its_user() {
        for host in ["127.0.0.1:0", "[::1]:0"] {
            let Ok(listener) = TcpListener::bind(host) else { continue };
            let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let (server, _) = listener.accept().unwrap();
            let (peer, local) = (server.peer_addr().unwrap(), server.local_addr().unwrap());
            let user = Some(rustix::process::geteuid().as_raw());
            assert_eq!(read_tables(CONNECTED, peer, local).unwrap(), user, "{host}");
            assert_eq!(user_of(peer, local).unwrap(), user, "{host}");
            // Where the kernel does not answer, the tables do.
            assert!(
                ask_kernel(CONNECTED, peer, local).is_ok_and(|found| found == user) || !cfg!(target_os = "linux"),
                "{host}"
            );
            client.shutdown(std::net::Shutdown::Write).unwrap();
            assert_eq!(
                (user_of(peer, local).unwrap(), read_tables(CONNECTED, peer, local).unwrap()),
                (user, user),
                "{host}: its own side is closed"
            );
            drop(client);
            assert_eq!(
                (user_of(peer, local).unwrap(), read_tables(CONNECTED, peer, local).unwrap()),
                (None, None),
                "{host}"
            );
        }
    }

    #[test]
    fn the_owner_of_a_listener_of_this_process_is_its_user() {
        let user = Some(rustix::process::geteuid().as_raw());
        for (host, reached) in
            [("127.0.0.1:0", "127.0.0.1"), ("0.0.0.0:0", "127.0.0.1"), ("[::1]:0", "::1"), ("[::]:0", "127.0.0.1")]
        {
            let Ok(listener) = TcpListener::bind(host) else { continue };
            let address = SocketAddr::new(reached.parse().unwrap(), listener.local_addr().unwrap().port());
            let any: IpAddr =
                if host.starts_with('[') { Ipv6Addr::UNSPECIFIED.into() } else { Ipv4Addr::UNSPECIFIED.into() };
            let nowhere = SocketAddr::new(any, 0);
            assert_eq!(user_of_listener(address).unwrap(), user, "{host}");
            assert_eq!(read_tables(LISTENING, listener.local_addr().unwrap(), nowhere).unwrap(), user, "{host}");
            drop(listener);
            assert_eq!(user_of_listener(address).unwrap(), None, "{host}");
        }
    }
}
