//! Reports to the service manager that started this process: the protocol of `sd_notify(3)`.

use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// Environment variable with the manager's socket: a path, or `@` and a name in the abstract name space.
pub(super) const VARIABLE: &str = "NOTIFY_SOCKET";

/// Sends a state, lines of `NAME=VALUE`, to the manager, if there is one. A failure is reported on standard
/// error: the service continues, and the manager has its own time limit.
pub(super) fn notify(state: &str) {
    let Some(socket) = std::env::var_os(VARIABLE).filter(|socket| !socket.is_empty()) else {
        return;
    };
    if let Err(error) = send(socket.as_bytes(), state) {
        eprintln!(
            "mirrorball: the service manager can't be reached at {VARIABLE}={}: {error}",
            socket.display()
        );
    }
}

fn send(socket: &[u8], state: &str) -> io::Result<()> {
    let address = match socket.strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(std::ffi::OsStr::from_bytes(socket))?,
    };
    let sender = UnixDatagram::unbound()?;
    // A manager that does not read must not block this process.
    sender.set_nonblocking(true)?;
    sender.send_to_addr(state.as_bytes(), &address)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn received(socket: &UnixDatagram) -> String {
        let mut bytes = [0; 64];
        let count = socket.recv(&mut bytes).unwrap();
        String::from_utf8(bytes[..count].to_vec()).unwrap()
    }

    #[test]
    fn state_reaches_a_socket_with_a_path_and_an_abstract_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("notify");
        let socket = UnixDatagram::bind(&path).unwrap();
        send(path.as_os_str().as_bytes(), "READY=1").unwrap();
        assert_eq!(received(&socket), "READY=1");
        let name = format!("mirrorball-notify-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(&name).unwrap();
        let socket = UnixDatagram::bind_addr(&address).unwrap();
        send(format!("@{name}").as_bytes(), "STOPPING=1").unwrap();
        assert_eq!(received(&socket), "STOPPING=1");
    }

    #[test]
    fn manager_that_is_gone_or_reads_nothing_is_an_error_and_no_hang() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("notify");
        assert!(send(path.as_os_str().as_bytes(), "READY=1").is_err());
        let _socket = UnixDatagram::bind(&path).unwrap();
        let full = (0..100_000).any(|_| send(path.as_os_str().as_bytes(), "READY=1").is_err());
        assert!(full);
    }
}
