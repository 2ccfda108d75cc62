//! An etcd on the loopback, by which cells agree on their membership.

use std::net::TcpListener;
use std::process::{Child, Command, Stdio};

/// An etcd, which ends when it is dropped.
pub struct Etcd {
    /// Its process.
    pub child: Child,
    /// The URL for its clients.
    pub url: String,
}

impl Etcd {
    /// Starts one by a command for clients at its URL.
    pub fn start(command: impl FnOnce(&str) -> std::io::Result<Command>) -> Self {
        let free = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
        let url = format!("https://{}", free.expect("a port"));
        let child = command(&url)
            .and_then(|mut command| command.stdout(Stdio::null()).stderr(Stdio::null()).spawn())
            .expect("etcd is installed (Debian: etcd-server)");
        Self { child, url }
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
