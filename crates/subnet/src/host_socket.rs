//! Sockets of the host. None blocks.

use std::io::{self, IoSlice, IoSliceMut};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use nix::errno::Errno;
use nix::sys::socket::sockopt::{Ipv6RecvPacketInfo, Ipv6V6Only, Linger, ReuseAddr, SocketError, TcpNoDelay};
use nix::sys::socket::{
    AddressFamily, Backlog, ControlMessage, ControlMessageOwned, MsgFlags, Shutdown, SockFlag, SockProtocol,
    SockType, SockaddrStorage, bind, connect, getsockopt, listen, recv, recvmsg, send, sendmsg, setsockopt,
    shutdown, socket, socketpair,
};

/// Connections at a forwarded port that wait for their acceptance.
const BACKLOG: i32 = 128;

/// Result of reading or writing a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Moved {
    /// This many bytes were moved; at least one.
    Bytes(usize),
    /// The peer has ended its direction.
    End,
    /// The socket is not ready.
    NotReady,
    /// The connection has failed.
    Failed,
}

fn open(address: IpAddr, kind: SockType, protocol: Option<SockProtocol>) -> nix::Result<OwnedFd> {
    let family = match address {
        IpAddr::V4(_) => AddressFamily::Inet,
        IpAddr::V6(_) => AddressFamily::Inet6,
    };
    socket(
        family,
        kind,
        SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC,
        protocol,
    )
}

/// Begins a TCP connection.
pub(crate) fn connect_tcp(target: SocketAddr) -> nix::Result<OwnedFd> {
    let stream = open(target.ip(), SockType::Stream, None)?;
    // The guest's stack decides when bytes are sent.
    setsockopt(&stream, TcpNoDelay, &true)?;
    match connect(stream.as_raw_fd(), &SockaddrStorage::from(target)) {
        Ok(()) | Err(Errno::EINPROGRESS | Errno::EINTR) => Ok(stream),
        Err(error) => Err(error),
    }
}

/// Creates two connected streams within this process.
pub(crate) fn stream_pair() -> nix::Result<(OwnedFd, OwnedFd)> {
    let flags = SockFlag::SOCK_NONBLOCK | SockFlag::SOCK_CLOEXEC;
    socketpair(AddressFamily::Unix, SockType::Stream, None, flags)
}

/// Returns why a connection did not open; none while it opens, or once it is open.
pub(crate) fn connect_error(stream: &impl AsFd) -> Option<Errno> {
    match getsockopt(stream, SocketError) {
        Ok(0) => None,
        Ok(error) => Some(Errno::from_raw(error)),
        Err(error) => Some(error),
    }
}

/// Returns a UDP socket that is connected to an address.
pub(crate) fn connect_udp(target: SocketAddr) -> nix::Result<UdpSocket> {
    connected(target, None)
}

/// Returns a socket that sends echo requests to an address. The host may not permit it.
pub(crate) fn connect_echo(target: IpAddr) -> nix::Result<UdpSocket> {
    let protocol = match target {
        IpAddr::V4(_) => SockProtocol::Icmp,
        IpAddr::V6(_) => SockProtocol::IcmpV6,
    };
    connected(SocketAddr::new(target, 0), Some(protocol))
}

fn connected(target: SocketAddr, protocol: Option<SockProtocol>) -> nix::Result<UdpSocket> {
    let datagrams = open(target.ip(), SockType::Datagram, protocol)?;
    connect(datagrams.as_raw_fd(), &SockaddrStorage::from(target))?;
    Ok(datagrams.into())
}

/// Sender of a datagram to a port of all addresses of the host, and the address that it was sent to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Client {
    address: SocketAddr,
    /// The host's address, from which replies come; none on a host without IPv6.
    local: Option<Ipv6Addr>,
}

/// Receives a datagram at a port that [`bind_udp`] has bound.
pub(crate) fn receive_from(socket: &UdpSocket, buffer: &mut [u8]) -> nix::Result<(usize, Client)> {
    let mut control = nix::cmsg_space!(libc::in6_pktinfo);
    let mut parts = [IoSliceMut::new(buffer)];
    let flags = MsgFlags::MSG_DONTWAIT;
    let message = recvmsg::<SockaddrStorage>(socket.as_raw_fd(), &mut parts, Some(&mut control), flags)?;
    let local = message.cmsgs()?.find_map(|control| match control {
        ControlMessageOwned::Ipv6PacketInfo(info) => Some(Ipv6Addr::from(info.ipi6_addr.s6_addr)),
        _ => None,
    });
    let sender = message.address.as_ref().ok_or(Errno::EINVAL)?;
    let v6 = sender.as_sockaddr_in6().map(|v6| SocketAddr::from(*v6));
    let v4 = sender.as_sockaddr_in().map(|v4| SocketAddr::from(*v4));
    let address = v6.or(v4).ok_or(Errno::EINVAL)?;
    Ok((message.bytes, Client { address, local }))
}

/// Sends a datagram to a client from the address to which it has sent.
pub(crate) fn send_to(socket: &UdpSocket, payload: &[u8], client: &Client) -> nix::Result<usize> {
    let info = client.local.map(|local| libc::in6_pktinfo {
        ipi6_addr: libc::in6_addr {
            s6_addr: local.octets(),
        },
        // The client's address names the interface where one is needed.
        ipi6_ifindex: 0,
    });
    let control: Vec<_> = info.iter().map(ControlMessage::Ipv6PacketInfo).collect();
    let address = SockaddrStorage::from(client.address);
    let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
    sendmsg(
        socket.as_raw_fd(),
        &[IoSlice::new(payload)],
        &control,
        flags,
        Some(&address),
    )
}

/// Listens at a TCP port of all addresses of the host.
pub(crate) fn listen_tcp(port: u16) -> nix::Result<TcpListener> {
    let listener = bind_all(port, SockType::Stream)?;
    listen(&listener, Backlog::new(BACKLOG)?)?;
    Ok(listener.into())
}

/// Binds a UDP port of all addresses of the host.
pub(crate) fn bind_udp(port: u16) -> nix::Result<UdpSocket> {
    bind_all(port, SockType::Datagram).map(UdpSocket::from)
}

fn bind_all(port: u16, kind: SockType) -> nix::Result<OwnedFd> {
    let at = |address: IpAddr| {
        let socket = open(address, kind, None)?;
        if address.is_ipv6() {
            setsockopt(&socket, Ipv6V6Only, &false)?;
        }
        if kind == SockType::Stream {
            // Connections of a former listener do not bar the port.
            setsockopt(&socket, ReuseAddr, &true)?;
        } else if address.is_ipv6() {
            setsockopt(&socket, Ipv6RecvPacketInfo, &true)?;
        }
        bind(
            socket.as_raw_fd(),
            &SockaddrStorage::from(SocketAddr::new(address, port)),
        )?;
        Ok(socket)
    };
    match at(Ipv6Addr::UNSPECIFIED.into()) {
        // A host without IPv6.
        Err(Errno::EAFNOSUPPORT | Errno::EADDRNOTAVAIL) => at(Ipv4Addr::UNSPECIFIED.into()),
        result => result,
    }
}

/// Reads from a stream into a buffer that is not empty.
pub(crate) fn read(stream: &OwnedFd, buffer: &mut [u8]) -> Moved {
    match recv(stream.as_raw_fd(), buffer, MsgFlags::MSG_DONTWAIT) {
        Ok(0) => Moved::End,
        result => moved(result),
    }
}

/// Writes bytes, which are not empty, to a stream.
pub(crate) fn write(stream: &OwnedFd, bytes: &[u8]) -> Moved {
    let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
    moved(send(stream.as_raw_fd(), bytes, flags))
}

fn moved(result: nix::Result<usize>) -> Moved {
    match result {
        Ok(0) | Err(Errno::EAGAIN) => Moved::NotReady,
        Ok(bytes) => Moved::Bytes(bytes),
        Err(Errno::EINTR) => Moved::NotReady,
        Err(_) => Moved::Failed,
    }
}

/// Ends the direction to the peer.
pub(crate) fn end(stream: &OwnedFd) {
    // A connection that has failed needs no end.
    let _ = shutdown(stream.as_raw_fd(), Shutdown::Write);
}

/// Closes a stream by a reset.
pub(crate) fn reset(stream: OwnedFd) {
    let linger = libc::linger {
        l_onoff: 1,
        l_linger: 0,
    };
    // Without the option the close is an ordinary end.
    let _ = setsockopt(&stream, Linger, &linger);
}

/// Returns whether an error is a lack of descriptors or memory of this process or host.
pub(crate) fn is_lack(error: &io::Error) -> bool {
    let lacks = [libc::EMFILE, libc::ENFILE, libc::ENOBUFS, libc::ENOMEM];
    error.raw_os_error().is_some_and(|code| lacks.contains(&code))
}
