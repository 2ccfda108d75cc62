//! Process of the API.

use std::fs;
use std::io;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::net::UnixStream;
use std::path::Path;

use nix::unistd::Group;
use tokio::net::UnixListener;

use crate::api::{Context, router};
use crate::caller::Peer;
use crate::connections::Listener;

/// Socket mode: only this user may connect.
const USER_MODE: u32 = 0o600;
/// Socket mode: the group may connect, too.
const GROUP_MODE: u32 = 0o660;

/// Serves at `socket` until the process receives a termination signal. With a `group`, its members may
/// connect, with the rights in the context.
///
/// # Errors
/// If the socket is in use or can't be created, or there is no such group.
pub fn serve(socket: &Path, group: Option<&str>, context: Context) -> io::Result<()> {
    let group = group.map(find_group).transpose()?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let listener = listen(socket)?;
        let mode = match group {
            Some(group) => {
                chown(socket, None, Some(group))?;
                GROUP_MODE
            }
            None => USER_MODE,
        };
        fs::set_permissions(socket, fs::Permissions::from_mode(mode))?;
        let service = router(context).into_make_service_with_connect_info::<Peer>();
        tracing::info!("serves at {}", socket.display());
        tokio::select! {
            result = axum::serve(Listener::new(listener), service).into_future() => result,
            () = termination_signal() => Ok(()),
        }
    })?;
    let _ = fs::remove_file(socket);
    Ok(())
}

fn find_group(name: &str) -> io::Result<u32> {
    match Group::from_name(name)? {
        Some(group) => Ok(group.gid.as_raw()),
        None => Err(io::Error::other(format!("there is no group {name}"))),
    }
}

/// Creates a socket, replacing one without a server.
fn listen(socket: &Path) -> io::Result<UnixListener> {
    if UnixStream::connect(socket).is_ok() {
        let why = format!(
            "{} is served already; name another with --socket",
            socket.display()
        );
        return Err(io::Error::new(io::ErrorKind::AddrInUse, why));
    }
    let _ = fs::remove_file(socket);
    // No other user may connect before the permissions are set.
    let old = nix::sys::stat::umask(nix::sys::stat::Mode::from_bits_truncate(0o177));
    let listener = UnixListener::bind(socket);
    nix::sys::stat::umask(old);
    listener
}

async fn termination_signal() {
    use tokio::signal::unix::{SignalKind, signal};
    let (Ok(mut interrupt), Ok(mut terminate)) =
        (signal(SignalKind::interrupt()), signal(SignalKind::terminate()))
    else {
        // Without them, the default action ends the process.
        return std::future::pending().await;
    };
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
    }
}
