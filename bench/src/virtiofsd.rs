//! The server of a shared folder beside QEMU: Debian's virtiofsd, of the package qemu-system-common.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use bench::guest_files::GuestFiles;

use crate::Outcome;

const PROGRAM: &str = "/usr/lib/qemu/virtiofsd";
/// Time limit for its socket.
const START_LIMIT: Duration = Duration::from_secs(10);

/// A running server for one guest. Ended when dropped.
pub struct Virtiofsd(Child);

impl Virtiofsd {
    /// Starts the server of the guest files' folder, and waits for its socket.
    pub fn start(files: &GuestFiles) -> Outcome<Self> {
        if !Path::new(PROGRAM).exists() {
            return Err(format!("{PROGRAM} is missing: install qemu-system-common of Debian 12").into());
        }
        let socket = files.virtiofsd_socket();
        // That of the guest before.
        let _ = std::fs::remove_file(&socket);
        let mut command = Command::new(PROGRAM);
        command.arg(format!("--socket-path={}", socket.display()));
        command
            .arg("-o")
            .arg(format!("source={}", files.shared.display()));
        command.args(["-o", "cache=auto"]).stdin(Stdio::null());
        let server = Self(command.stdout(Stdio::null()).spawn()?);
        let deadline = Instant::now() + START_LIMIT;
        while !socket.exists() {
            if Instant::now() >= deadline {
                return Err("virtiofsd makes no socket".into());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(server)
    }
}

impl Drop for Virtiofsd {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
