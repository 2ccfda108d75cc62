//! Where the files of running VMs are: gone when the machine starts again, and reachable by their user only.

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::PathBuf;

/// Names the directory, for tests and for several users under one name.
pub const VARIABLE: &str = "MIRRORBALL_RUNTIME";

/// Root's shards run as `nobody` and must pass through to the sockets of their own VM; the sockets are the user's alone.
const ROOT_MODE: u32 = 0o711;
const USER_MODE: u32 = 0o700;

/// The directory: `$MIRRORBALL_RUNTIME`, else `/run/mirrorball` for root, else `$XDG_RUNTIME_DIR/mirrorball`, else
/// `/tmp/mirrorball-UID`. Made when missing; one that belongs to somebody else is refused.
pub fn directory() -> io::Result<PathBuf> {
    let uid = nix::unistd::geteuid();
    let path = match (std::env::var_os(VARIABLE), std::env::var_os("XDG_RUNTIME_DIR")) {
        (Some(path), _) => PathBuf::from(path),
        _ if uid.is_root() => PathBuf::from("/run/mirrorball"),
        (None, Some(parent)) => PathBuf::from(parent).join("mirrorball"),
        (None, None) => PathBuf::from(format!("/tmp/mirrorball-{uid}")),
    };
    let mode = if uid.is_root() { ROOT_MODE } else { USER_MODE };
    fs::DirBuilder::new().recursive(true).mode(mode).create(&path)?;
    if fs::metadata(&path)?.uid() != uid.as_raw() {
        let why = format!("{} belongs to another user; set {VARIABLE}", path.display());
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
    }
    Ok(path)
}
