//! Listening sockets in a VM's directory.

use std::fs::Permissions;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::Duration;

use nix::sys::socket::{Shutdown, shutdown};

/// Pause between two attempts to accept a client, when this process has too many open files.
const ACCEPT_INTERVAL: Duration = Duration::from_millis(10);

/// Listens on a socket that only this user may connect to.
pub(crate) fn bind(path: &Path) -> io::Result<UnixListener> {
    let listener = UnixListener::bind(path)?;
    std::fs::set_permissions(path, Permissions::from_mode(0o600))?;
    Ok(listener)
}

/// A socket whose clients are served until it is dropped, though other processes have the socket open.
#[derive(Debug)]
pub(crate) struct Served(UnixListener);

impl Served {
    /// Starts a thread called `name` that accepts clients, and a thread called `client` for each, which calls
    /// `serve`.
    ///
    /// # Errors
    /// If the host has no threads or descriptors left.
    pub(crate) fn begin(
        listener: UnixListener,
        (name, client): (&'static str, &'static str),
        serve: impl Fn(UnixStream) + Clone + Send + 'static,
    ) -> io::Result<Self> {
        let served = Self(listener.try_clone()?);
        std::thread::Builder::new().name(name.into()).spawn(move || {
            loop {
                let stream = match listener.accept() {
                    Ok((stream, _)) => stream,
                    // The socket was shut down.
                    Err(error) if error.kind() == io::ErrorKind::InvalidInput => return,
                    Err(_) => {
                        std::thread::sleep(ACCEPT_INTERVAL);
                        continue;
                    }
                };
                let serve = serve.clone();
                // A host without threads to spare loses this client, not the VM.
                let _ = std::thread::Builder::new()
                    .name(client.into())
                    .spawn(move || serve(stream));
            }
        })?;
        Ok(served)
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = shutdown(self.0.as_raw_fd(), Shutdown::Both);
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn clients_are_served_until_the_socket_is_no_longer() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("x.sock");
        let listener = bind(&path).unwrap();
        let _elsewhere = listener.try_clone().unwrap();
        let (accepting, ended) = mpsc::channel::<()>();
        let served = Served::begin(listener, ("accepts", "serves"), move |mut client| {
            let _ = (&accepting, client.write_all(b"served"));
        });
        let mut text = String::new();
        let mut client = UnixStream::connect(&path).unwrap();
        client.read_to_string(&mut text).unwrap();
        assert_eq!(text, "served");
        drop(served.unwrap());
        // The threads have ended, and their values are dropped.
        assert_eq!(
            ended.recv_timeout(Duration::from_secs(20)),
            Err(mpsc::RecvTimeoutError::Disconnected)
        );
        assert!(UnixStream::connect(&path).is_err());
    }
}
