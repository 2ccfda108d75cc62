//! Connects to the gateway of this user's subnet, and starts it if none runs.
//!
//! The starter binds the socket, so that others connect before the gateway serves it. The socket's file stays
//! when the gateway has ended, as the gateway has no right to remove it; the next starter does.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use child_process::in_new_session;
use hostfiles::lock::{self, Share};
use hostfiles::private;
use nix::unistd::geteuid;
use registry::subnet::{Connection, socket_path};

use crate::identity::{Given, IdOwner};

/// First argument of the gateway's process.
pub const COMMAND: &str = "subnet";

/// Returns a connection to the gateway.
///
/// # Errors
/// If it does not start.
pub(super) fn connect(runtime: &Path) -> io::Result<Connection> {
    match Connection::open(runtime) {
        Err(error) if is_absent(&error) => {}
        other => return other,
    }
    let path = runtime.join("subnet.lock");
    let _lock = lock::within(&path, private::lock_file(&path)?, Share::Exclusive, lock::LIMIT)?;
    // Another process may have started it meanwhile.
    match Connection::open(runtime) {
        Err(error) if is_absent(&error) => {}
        other => return other,
    }
    start(&socket_path(runtime))?;
    Connection::open(runtime)
}

/// Whether no gateway serves the socket.
fn is_absent(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused
    )
}

/// Starts the gateway, which serves the socket at `path`.
fn start(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(path)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    let mut command = Command::new("/proc/self/exe");
    command.arg0("mirrorball").arg(COMMAND);
    // The gateway checks that its clients are of this user, and then becomes another.
    command.arg(geteuid().to_string());
    if geteuid().is_root()
        && let Some(identity) = Given::of(IdOwner::Gateway).identity
    {
        command.args([identity.uid.to_string(), identity.gid.to_string()]);
    }
    command
        .env_clear()
        .env("RUST_BACKTRACE", "0")
        .current_dir("/")
        .stdin(Stdio::from(OwnedFd::from(listener)))
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    let mut child = in_new_session(&mut command).spawn()?;
    // Its end is collected while this process lives.
    let waiter = std::thread::Builder::new().name("subnet-gateway".into());
    waiter.spawn(move || drop(child.wait()))?;
    Ok(())
}
