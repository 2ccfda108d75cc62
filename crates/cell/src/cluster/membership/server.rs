//! The etcd of a cluster that was given none. It answers only processes with keys of the cluster's authority,
//! and none whose certificate has been revoked.

use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::time::Duration;

use config::cluster::ETCD_KEYS;
use urpc::tls::{KeyFiles, Stamp, revocation_list};

/// The address of its socket for other servers, of which there are none, in its own folder.
const PEERS: &str = "unix://peers:0";
/// Interval between two checks of etcd's process and of the list of revoked certificates.
const POLL_INTERVAL: Duration = Duration::from_millis(250);

/// The list of revoked certificates, as it was when an etcd started.
#[derive(Debug)]
pub struct RevocationWatch {
    list: PathBuf,
    first: Option<Stamp>,
}

/// The reason for which an etcd has ended.
#[derive(Debug)]
pub enum Ended {
    /// The server's process ended by itself.
    Exited(ExitStatus),
    /// The list of revoked certificates changed, so that it was killed.
    ListChanged,
}

impl RevocationWatch {
    /// Reads the list before etcd starts.
    ///
    /// # Errors
    /// Those of the kernel.
    pub fn begin(keys: &Path) -> io::Result<Self> {
        let list = revocation_list(keys);
        Ok(Self {
            first: Stamp::of(&list)?,
            list,
        })
    }

    /// Waits until etcd ends, and kills it when the list has changed. etcd reads the list at each handshake:
    /// only its end closes the connections of a host that has been removed. All that it has answered is on
    /// disk.
    ///
    /// # Errors
    /// Those of the kernel.
    pub fn wait(&self, etcd: &mut Child) -> io::Result<Ended> {
        let mut last = self.first;
        loop {
            if let Some(status) = etcd.try_wait()? {
                return Ok(Ended::Exited(status));
            }
            let now = Stamp::of(&self.list)?;
            // Not while it is being written.
            if now != self.first && now == last {
                etcd.kill()?;
                etcd.wait()?;
                return Ok(Ended::ListChanged);
            }
            last = now;
            std::thread::sleep(POLL_INTERVAL);
        }
    }
}

/// The command that runs it for clients at `url`, with its data in `folder` and its keys in `keys`.
///
/// # Errors
/// If the folders have no absolute paths.
pub fn command(url: &str, keys: &Path, folder: &Path) -> io::Result<Command> {
    let list = revocation_list(&std::path::absolute(keys)?);
    let keys = KeyFiles::of(&std::path::absolute(keys)?, ETCD_KEYS);
    let folder = std::path::absolute(folder)?;
    let mut command = Command::new("etcd");
    command
        .arg("--data-dir")
        .arg(folder.join("data"))
        .args(["--listen-client-urls", url, "--advertise-client-urls", url])
        .arg("--client-cert-auth")
        .arg("--trusted-ca-file")
        .arg(keys.authority)
        .arg("--cert-file")
        .arg(keys.certificate)
        .arg("--key-file")
        .arg(keys.key)
        .args([
            "--listen-peer-urls",
            PEERS,
            "--initial-advertise-peer-urls",
            PEERS,
        ])
        .args(["--initial-cluster", &format!("default={PEERS}")])
        .current_dir(folder);
    // With a list that is missing it would refuse every handshake.
    if list.exists() {
        command.arg("--client-crl-file").arg(list);
    }
    Ok(command)
}
