//! Attaches this terminal to a VM's console.

use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use agent::client::RawMode;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use registry::console::{ATTACH, JOIN};

/// Pause before rejoining a console.
const REJOIN_PAUSE: Duration = Duration::from_millis(50);
/// Byte of Ctrl-], which leaves the console.
const DETACH: u8 = 0x1d;

/// Reason why the terminal left the console.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttachEnd {
    /// The user pressed Ctrl-].
    Detached,
    /// The VM ended.
    Ended,
}

/// Connects standard input and output to the console of the VM whose directory is `folder`. On a terminal,
/// keys go to the guest unchanged, except Ctrl-].
pub fn attach(folder: &Path) -> io::Result<AttachEnd> {
    let mut console = connect(folder, ATTACH)?;
    let terminal = RawMode::enter()?;
    let (mut input, mut output) = (io::stdin().lock(), io::stdout().lock());
    let mut open = true;
    let mut buffer = [0; 4096];
    loop {
        let mut files = vec![PollFd::new(console.as_fd(), PollFlags::POLLIN)];
        let stdin = io::stdin();
        if open {
            files.push(PollFd::new(stdin.as_fd(), PollFlags::POLLIN));
        }
        match poll(&mut files, PollTimeout::NONE) {
            Ok(_) => {}
            Err(nix::Error::EINTR) => continue,
            Err(error) => return Err(error.into()),
        }
        let typed = files.get(1).is_some_and(|file| file.any().unwrap_or(false));
        if files[0].any().unwrap_or(false) {
            match console.read(&mut buffer) {
                // The monitor is gone. A running VM gets another one soon.
                Ok(0) | Err(_) => match rejoin(folder) {
                    Ok(next) => console = next,
                    Err(_) => return Ok(AttachEnd::Ended),
                },
                Ok(count) => {
                    output.write_all(&buffer[..count])?;
                    output.flush()?;
                }
            }
        }
        if typed {
            let count = input.read(&mut buffer)?;
            let bytes = &buffer[..count];
            let end = if terminal.is_some() {
                bytes.iter().position(|&byte| byte == DETACH)
            } else {
                None
            };
            // The next read detects the end of the console.
            let _ = console.write_all(&bytes[..end.unwrap_or(count)]);
            if end.is_some() {
                return Ok(AttachEnd::Detached);
            }
            open = count > 0;
        }
    }
}

/// Reconnects to the console of a VM whose monitor has closed the connection: at the monitor's successor.
///
/// # Errors
/// If the VM has ended.
pub fn rejoin(folder: &Path) -> io::Result<UnixStream> {
    // A VM that ends removes its directory before it closes its console: then there is no next monitor.
    if folder.exists() {
        std::thread::sleep(REJOIN_PAUSE);
    }
    connect(folder, JOIN)
}

/// Connects to the console of the VM whose directory is `folder`.
fn connect(folder: &Path, mode: u8) -> io::Result<UnixStream> {
    let mut console = UnixStream::connect(folder.join("console.sock"))?;
    console.write_all(&[mode])?;
    Ok(console)
}
