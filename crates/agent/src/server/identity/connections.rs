//! TCP connections of addresses that a guest no longer has.
//!
//! The kernel keeps such connections, and their programs would wait for a timeout of minutes. Each program's
//! connection is therefore reset by a copy of its descriptor. Kernel modules that do this (`tcp_diag`) are
//! not in every image.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// Tables of connections, of this thread's network namespace.
const TABLES: [&str; 2] = ["/proc/thread-self/net/tcp", "/proc/thread-self/net/tcp6"];
/// States of a socket without a peer, in the kernel's numbers: closed, and listening.
const WITHOUT_PEER: [u8; 2] = [7, 10];

/// Resets all connections from these addresses. One that can't be reset (its process is ending, or the kernel
/// is older than 5.6) stays until its timeout.
pub fn reset(from: &[IpAddr]) {
    let tables = TABLES.iter().filter_map(|table| fs::read_to_string(table).ok());
    let sockets: HashSet<u64> = tables.flat_map(|table| parse(&table, from)).collect();
    if sockets.is_empty() {
        return;
    }
    for process in numbers("/proc") {
        for (descriptor, socket) in sockets_of(process) {
            if sockets.contains(&socket) {
                disconnect(process, descriptor);
            }
        }
    }
}

/// Returns the inodes of the connections from these addresses.
fn parse(table: &str, from: &[IpAddr]) -> Vec<u64> {
    let lines = table.lines().skip(1);
    let connections = lines.filter_map(|line| {
        let mut fields = line.split_whitespace().skip(1);
        let (address, _port) = fields.next()?.split_once(':')?;
        let address = parse_address(address)?;
        let state = u8::from_str_radix(fields.nth(1)?, 16).ok()?;
        let inode = fields.nth(5)?.parse().ok()?;
        // The kernel has sockets without a descriptor, whose inode is zero.
        let is_wanted = inode != 0 && !WITHOUT_PEER.contains(&state) && from.contains(&address);
        is_wanted.then_some(inode)
    });
    connections.collect()
}

/// Parses an address as words of 32 bits, each a number of this machine. An IPv4 address in IPv6 form is one
/// of IPv4.
fn parse_address(text: &str) -> Option<IpAddr> {
    let word = |at: usize| {
        let number = u32::from_str_radix(text.get(at * 8..at * 8 + 8)?, 16).ok()?;
        Some(number.to_ne_bytes())
    };
    match text.len() {
        8 => Some(Ipv4Addr::from(word(0)?).into()),
        32 => {
            let mut bytes = [0; 16];
            for (at, part) in bytes.chunks_exact_mut(4).enumerate() {
                part.copy_from_slice(&word(at)?);
            }
            Some(Ipv6Addr::from(bytes).to_canonical())
        }
        _ => None,
    }
}

/// Lists the names in a directory that are numbers.
fn numbers(directory: &str) -> Vec<i32> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .collect()
}

/// Lists the descriptors of a process that are sockets, with their inodes.
fn sockets_of(process: i32) -> Vec<(i32, u64)> {
    let directory = format!("/proc/{process}/fd");
    let descriptors = numbers(&directory).into_iter().filter_map(|descriptor| {
        let target = fs::read_link(format!("{directory}/{descriptor}")).ok()?;
        Some((descriptor, socket_inode(target.as_os_str())?))
    });
    descriptors.collect()
}

fn socket_inode(target: &OsStr) -> Option<u64> {
    let number = target.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?;
    number.parse().ok()
}

/// Resets the connection of a socket of a process. The socket may have changed since it was listed: then
/// another connection of the process ends, which is within the process's own risk of a clone.
fn disconnect(process: i32, descriptor: i32) {
    // SAFETY: takes numbers and returns a new descriptor, or -1.
    let pidfd = unsafe { libc::syscall(libc::SYS_pidfd_open, process, 0) };
    let Some(pidfd) = owned(pidfd) else { return };
    // SAFETY: as above; `pidfd` is open.
    let socket = unsafe { libc::syscall(libc::SYS_pidfd_getfd, pidfd.as_raw_fd(), descriptor, 0) };
    let Some(socket) = owned(socket) else { return };
    let nowhere = libc::sockaddr {
        sa_family: libc::AF_UNSPEC as libc::sa_family_t,
        sa_data: [0; 14],
    };
    let length = size_of::<libc::sockaddr>() as libc::socklen_t;
    // SAFETY: the kernel reads `length` bytes of `nowhere`, which has as many.
    unsafe { libc::connect(socket.as_raw_fd(), &raw const nowhere, length) };
}

/// Owns a descriptor that a system call returned; none if it failed.
fn owned(result: libc::c_long) -> Option<OwnedFd> {
    let descriptor = i32::try_from(result).ok().filter(|number| *number >= 0)?;
    // SAFETY: the kernel has just made this descriptor for this process, and nothing else owns it.
    Some(unsafe { OwnedFd::from_raw_fd(descriptor) })
}

#[cfg(test)]
mod tests {
    use std::io::{ErrorKind, Read};
    use std::net::{TcpListener, TcpStream};
    use std::time::Duration;

    use super::*;

    const TABLE: &str = "\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0707D50A:0016 0100D50A:C350 01 00000000:00000000 00:00000000 00000000     0        0 4711 1 0 20
   1: 0707D50A:0016 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4712 1 0
   2: 0807D50A:0016 0100D50A:C350 01 00000000:00000000 00:00000000 00000000     0        0 4713 1 0
   3: 0707D50A:0016 0100D50A:C350 06 00000000:00000000 00:00000000 00000000     0        0 0 1 0
   4: 0000000000000000FFFF00000707D50A:0016 0000:0000 01 0:0 00:0 0     0        0 4714 1
   5: nonsense
";

    #[test]
    fn connections_of_the_addresses_are_found_and_listeners_are_not() {
        let ours = IpAddr::from([10, 213, 7, 7]);
        assert_eq!(parse(TABLE, &[ours]), [4711, 4714]);
        assert_eq!(parse(TABLE, &[]), [0; 0]);
        assert_eq!(parse("", &[ours]), [0; 0]);
    }

    /// A connection of this process, from an address that no other test uses.
    #[test]
    fn programs_read_fails_after_its_connection_was_reset_and_others_go_on() {
        let from = IpAddr::from([127, 93, 7, 7]);
        let connected = |address: IpAddr| {
            let listener = TcpListener::bind((address, 0)).unwrap();
            let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            (listener.accept().unwrap().0, client)
        };
        let (mut reset_one, _peer) = connected(from);
        let (other, mut other_peer) = connected([127, 93, 7, 8].into());
        reset(&[from]);
        reset_one.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        let error = reset_one.read(&mut [0]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
        std::io::Write::write_all(&mut &other, b"x").unwrap();
        other_peer.read_exact(&mut [0]).unwrap();
    }
}
