//! An etcd on the loopback, by which cells agree that they live.

use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// It, until dropped.
pub struct Etcd {
    /// Its process.
    pub child: Child,
    /// Where it is asked.
    pub url: String,
}

impl Etcd {
    /// Starts one that keeps its files below a folder.
    pub fn start(folder: &Path) -> Self {
        let free = || TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
        let address = || format!("http://{}", free().expect("a port"));
        let (url, peers) = (address(), address());
        let child = Command::new("etcd")
            .arg("--data-dir")
            .arg(folder.join("etcd"))
            .args(["--listen-client-urls", &url, "--advertise-client-urls", &url])
            .args([
                "--listen-peer-urls",
                &peers,
                "--initial-advertise-peer-urls",
                &peers,
            ])
            .args(["--initial-cluster", &format!("default={peers}")])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
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
