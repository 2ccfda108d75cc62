//! The etcd of a cluster that was given none. Only processes with keys of the cluster's authority are answered.

use std::io;
use std::path::Path;
use std::process::Command;

use config::cluster::ETCD_KEYS;
use urpc::tls::KeyFiles;

/// Its socket for other servers, in its own folder: it has none.
const PEERS: &str = "unix://peers:0";

/// The command that runs it for clients at `url`, with its data in `folder` and its keys in `keys`.
///
/// # Errors
/// If the folders have no absolute paths.
pub fn command(url: &str, keys: &Path, folder: &Path) -> io::Result<Command> {
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
    Ok(command)
}
