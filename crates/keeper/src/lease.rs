//! The client's lease as the keeper has it: a socket of which it reads nothing, and whose end it notices.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use nix::poll::PollFlags;
use nix::sys::socket::{MsgFlags, recv};

/// The end of a connection, or of its incoming half. Bytes that wait in the socket are no such event.
pub const HANG_UP: PollFlags = PollFlags::from_bits_retain(libc::POLLRDHUP);
/// Bytes of the order to detach that are compared at most.
const DETACH_BYTES_MAX: usize = 64;

/// The lease of a VM's client.
#[derive(Debug)]
pub struct Lease {
    socket: OwnedFd,
    /// The client's order to detach, as it stands in the socket.
    detach: String,
}

impl AsFd for Lease {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Lease {
    /// Watches this socket.
    pub fn new(socket: OwnedFd, detach: String) -> Self {
        Self { socket, detach }
    }

    /// Whether the client has let the VM outlive it. Its order stays in the socket for each monitor.
    pub fn is_detached(&self) -> bool {
        let mut bytes = [0; DETACH_BYTES_MAX];
        let flags = MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT;
        let count = recv(self.socket.as_raw_fd(), &mut bytes, flags).unwrap_or(0);
        let sent = bytes.get(..count).unwrap_or_default();
        !self.detach.is_empty() && sent.starts_with(self.detach.as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    use nix::poll::{PollFd, PollTimeout, poll};

    use super::*;

    const DETACH: &str = "\"detach\"\n";

    fn has_hung_up(lease: &Lease) -> bool {
        let mut files = [PollFd::new(lease.as_fd(), HANG_UP)];
        poll(&mut files, PollTimeout::ZERO).unwrap() > 0
    }

    #[test]
    fn lease_ends_with_its_client_and_is_detached_only_by_the_whole_order() {
        for (sent, is_detached) in [
            ("", false),
            ("\"det", false),
            ("\"stay\"\n", false),
            (DETACH, true),
        ] {
            let (mut client, theirs) = UnixStream::pair().unwrap();
            let lease = Lease::new(theirs.into(), DETACH.to_owned());
            client.write_all(sent.as_bytes()).unwrap();
            assert!(!has_hung_up(&lease), "the client is there: {sent:?}");
            drop(client);
            assert!(has_hung_up(&lease), "{sent:?}");
            // Each look finds the same.
            assert_eq!([lease.is_detached(); 2], [is_detached; 2], "{sent:?}");
        }
    }

    #[test]
    fn client_that_ends_its_half_of_the_lease_ends_the_vm() {
        let (client, theirs) = UnixStream::pair().unwrap();
        let lease = Lease::new(theirs.into(), DETACH.to_owned());
        client.shutdown(std::net::Shutdown::Write).unwrap();
        assert!(has_hung_up(&lease) && !lease.is_detached());
    }
}
