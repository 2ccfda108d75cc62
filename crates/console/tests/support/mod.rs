//! A running API, and registry entries that it accepts as VMs.

#![allow(dead_code, reason = "each test program uses a part")]

pub mod vm;

use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A user who is neither root nor the one who runs the API.
pub const MEMBER: u32 = 4321;

/// Time limit for a response.
pub const LIMIT: Duration = Duration::from_secs(10);

/// A running `mirrorball-api`, killed when dropped.
pub struct Api {
    child: Child,
    command: Command,
    pub place: tempfile::TempDir,
}

impl Api {
    pub fn start() -> Self {
        Self::start_with(&[], "")
    }

    /// Starts the API with further arguments and with this text in the host's file.
    pub fn start_with(arguments: &[&str], host_file: &str) -> Self {
        // VMs are not started here; any program serves.
        Self::start_by("/bin/false", arguments, host_file)
    }

    /// Starts the API with another program in place of `mirrorball`.
    pub fn start_by(program: &str, arguments: &[&str], host_file: &str) -> Self {
        let place = tempfile::tempdir().unwrap();
        // Other users reach the socket, as below root's runtime directory.
        std::fs::set_permissions(place.path(), std::fs::Permissions::from_mode(0o711)).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_mirrorball-api"));
        command
            .args(["--program", program, "--socket"])
            .arg(place.path().join("api.sock"))
            .args(arguments)
            .env("MIRRORBALL_RUNTIME", place.path())
            .env("MIRRORBALL_HOST_FILE", write_host_file(&place, host_file))
            .stderr(Stdio::null());
        let child = command.spawn().unwrap();
        let api = Self {
            child,
            command,
            place,
        };
        api.wait_until_ready(arguments.contains(&"--group"));
        api
    }

    /// Kills the process, and starts another one without a group.
    pub fn kill_and_start_again(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        self.child = self.command.spawn().unwrap();
        self.wait_until_ready(false);
    }

    fn wait_until_ready(&self, has_group: bool) {
        let api = self;
        let start = Instant::now();
        // It serves once the socket belongs to the group.
        let mode = if has_group { 0o660 } else { 0o600 };
        let is_ready = |path: &Path| {
            let about = std::fs::metadata(path);
            about.is_ok_and(|about| about.permissions().mode() & 0o777 == mode)
                && UnixStream::connect(path).is_ok()
        };
        while !is_ready(&api.socket()) {
            assert!(start.elapsed() < LIMIT, "the API does not start");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    pub fn socket(&self) -> PathBuf {
        self.place.path().join("api.sock")
    }

    /// Sends bytes, all or not by `is_all`, and reads until the peer closes or pauses.
    pub fn send(&self, bytes: &[u8], wait: Duration, is_all: bool) -> Vec<u8> {
        let stream = UnixStream::connect(self.socket()).unwrap();
        Self::exchange(stream, bytes, wait, is_all)
    }

    pub fn exchange(mut stream: UnixStream, bytes: &[u8], wait: Duration, is_all: bool) -> Vec<u8> {
        stream.set_read_timeout(Some(wait)).unwrap();
        stream.set_write_timeout(Some(LIMIT)).unwrap();
        // The peer may have responded and closed before it has read all.
        let _ = stream.write_all(bytes);
        if is_all {
            let _ = stream.shutdown(std::net::Shutdown::Write);
        }
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        answer
    }

    /// Returns the status, the head and the body of the response.
    pub fn ask(&self, method: &str, path: &str, more: &str, body: &str) -> (u16, String, String) {
        let length = body.len();
        let request = format!(
            "{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\
             content-length: {length}\r\n{more}\r\n{body}"
        );
        let answer = String::from_utf8(self.send(request.as_bytes(), LIMIT, false)).unwrap();
        let (head, body) = answer
            .split_once("\r\n\r\n")
            .unwrap_or_else(|| panic!("{request:?}: {answer:?}"));
        let status = head
            .split(' ')
            .nth(1)
            .and_then(|status| status.parse().ok())
            .expect("a status");
        (status, head.to_owned(), body.to_owned())
    }

    /// Posts a VM as the user `uid`, with this process's groups. Returns the status and the problem's detail.
    pub fn start_vm_as(&self, uid: u32, spec: &str) -> (u16, String) {
        let request = format!(
            "POST /v1/vms HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\
             content-length: {}\r\n\r\n{spec}",
            spec.len()
        );
        self.send_as(uid, &request)
    }

    pub fn send_as(&self, uid: u32, request: &str) -> (u16, String) {
        let stream = connect_as(uid, &self.socket());
        let answer = String::from_utf8(Self::exchange(stream, request.as_bytes(), LIMIT, false)).unwrap();
        let (head, body) = answer
            .split_once("\r\n\r\n")
            .unwrap_or_else(|| panic!("{answer:?}"));
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
        let detail = serde_json::from_str::<serde_json::Value>(body)
            .ok()
            .and_then(|problem| problem["detail"].as_str().map(str::to_owned));
        (status.expect("a status"), detail.unwrap_or_default())
    }

    pub fn open_files(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.child.id()))
            .unwrap()
            .count()
    }
}

pub fn write_host_file(place: &tempfile::TempDir, text: &str) -> PathBuf {
    let path = place.path().join("host.toml");
    std::fs::write(&path, text).unwrap();
    path
}

/// Connects as another user. Only the connecting thread changes its user.
pub fn connect_as(uid: u32, socket: &Path) -> UnixStream {
    let socket = socket.to_owned();
    let connect = move || {
        // SAFETY: the bare system call changes the ids of the calling thread alone, and touches no memory.
        let changed = unsafe { nix::libc::syscall(nix::libc::SYS_setresuid, uid, uid, uid) };
        assert_eq!(changed, 0, "{}", std::io::Error::last_os_error());
        UnixStream::connect(socket).unwrap()
    };
    std::thread::spawn(connect).join().unwrap()
}

/// Whether this test may become other users.
pub fn is_root() -> bool {
    let is_root = nix::unistd::geteuid().is_root();
    if !is_root {
        println!("left out: only root can connect as another user");
    }
    is_root
}

impl Drop for Api {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Waits until the condition holds, for at most the time limit of a response.
pub fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + LIMIT;
    while !is_so() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}
