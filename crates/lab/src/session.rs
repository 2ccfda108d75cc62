//! Commands in a lab host.

use std::ffi::{OsStr, OsString};
use std::io::{IsTerminal, Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::path::Path;
use std::time::{Duration, Instant};

use agent::client::ClientError;
use agent::protocol::{ExecRequest, ExitStatus, WindowSize};
use serde::{Deserialize, Serialize};

use crate::boot::{PROGRAM, Purpose, TOKEN_BYTES};
use crate::error::Context;
use crate::registry::{Entry, ProgramId};
use crate::{IN_LAB_VARIABLE, LabError, OWNER_VARIABLE};

/// Bytes of arguments and environment a request may have; the agent's protocol carries 64 KiB.
const REQUEST_BYTES_MAX: usize = 60 << 10;

/// Interval of heartbeats to a host.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(5);
/// Interval after a heartbeat without a reply.
const HEARTBEAT_RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// Outer settings that have no meaning inside: below `/run` all files are new there, and running VMs are
/// looked up there.
const NOT_CARRIED: &[&str] = &[
    "MIRRORBALL_RUNTIME",
    "XDG_RUNTIME_DIR",
    "DBUS_SESSION_BUS_ADDRESS",
    "SSH_AUTH_SOCK",
    "LS_COLORS",
];

/// Port and token with which a host accepts connections.
#[derive(Clone, Serialize, Deserialize)]
pub struct HostAccess {
    /// Port of 127.0.0.1.
    pub port: u16,
    /// Token with which a connection starts.
    pub token: [u8; TOKEN_BYTES],
}

impl HostAccess {
    fn open(&self, purpose: Purpose) -> Result<TcpStream, LabError> {
        let connect = || -> std::io::Result<TcpStream> {
            let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port))?;
            stream.set_nodelay(true)?;
            let mut greeting = self.token.to_vec();
            greeting.push(purpose as u8);
            stream.write_all(&greeting)?;
            Ok(stream)
        };
        connect().map_err(|error| LabError::Agent(ClientError::Io(error)))
    }

    /// Runs a program with this process's standard streams, directory and environment.
    pub fn exec(&self, argv: &[OsString]) -> Result<ExitStatus, LabError> {
        let request = request(argv)?;
        Ok(agent::client::exec(self.open(Purpose::Agent)?, &request)?)
    }

    /// Makes the host write back all dirty data.
    pub fn sync(&self) -> Result<(), LabError> {
        self.ask(Purpose::Sync, Duration::from_secs(60)).map(drop)
    }

    /// Returns the number of VMs that run in the host.
    pub fn count_vms(&self) -> Result<u8, LabError> {
        self.ask(Purpose::CountVms, Duration::from_secs(10))
    }

    /// Makes the host print the state of its CPUs and stuck tasks on its console.
    pub fn tell(&self) -> Result<(), LabError> {
        self.ask(Purpose::Tell, Duration::from_secs(5)).map(drop)
    }

    /// Returns when the host, or one of its CPUs, has not replied for `limit`: its kernel hangs, or it is
    /// dead. A single heartbeat without a reply is no evidence: on a busy machine connections break.
    pub fn wait_until_unresponsive(&self, limit: Duration) {
        let mut answered = Instant::now();
        loop {
            let left = limit.saturating_sub(answered.elapsed());
            if left.is_zero() {
                return;
            }
            let answer = self.ask(Purpose::Beat, left);
            if answer.is_ok() {
                answered = Instant::now();
            }
            std::thread::sleep(if answer.is_ok() {
                HEARTBEAT_INTERVAL
            } else {
                HEARTBEAT_RETRY_INTERVAL
            });
        }
    }

    fn ask(&self, purpose: Purpose, timeout: Duration) -> Result<u8, LabError> {
        let mut stream = self.open(purpose)?;
        let mut answer = [0];
        stream
            .set_read_timeout(Some(timeout))
            .and_then(|()| stream.read_exact(&mut answer))
            .map_err(|error| LabError::Agent(ClientError::Io(error)))?;
        Ok(answer[0])
    }
}

fn request(argv: &[OsString]) -> Result<ExecRequest, LabError> {
    let text = |value: &OsStr| {
        value
            .to_str()
            .map(str::to_string)
            .ok_or_else(|| LabError::NotUtf8(value.to_string_lossy().into_owned()))
    };
    let argv = argv
        .iter()
        .map(|argument| text(argument))
        .collect::<Result<Vec<_>, _>>()?;
    let json_bytes = |text: &str| serde_json::to_string(text).map_or(usize::MAX / 4, |json| json.len() + 2);
    let bytes: usize = argv.iter().map(|argument| json_bytes(argument)).sum();
    let Some(mut room) = REQUEST_BYTES_MAX.checked_sub(bytes) else {
        return Err(LabError::TooLong {
            bytes,
            limit: REQUEST_BYTES_MAX,
        });
    };
    // Files without names, which temporary overlays are, need a file system of the lab host's own.
    let scratch = ("MIRRORBALL_SCRATCH".to_string(), "/run".to_string());
    let owner = nix::unistd::geteuid().to_string();
    let mut env = vec![
        (IN_LAB_VARIABLE.to_string(), "1".to_string()),
        (OWNER_VARIABLE.to_string(), owner),
        scratch,
    ];
    let mut variables: Vec<(String, String)> = std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .filter(|(name, _)| name != OWNER_VARIABLE && !NOT_CARRIED.contains(&name.as_str()))
        .collect();
    // If the environment is too large, the largest variables are left out.
    variables.sort_by_key(|(name, value)| name.len() + value.len());
    let mut left = Vec::new();
    for (name, value) in variables {
        let size = json_bytes(&name) + json_bytes(&value) + 2;
        if size <= room {
            room -= size;
            env.push((name, value));
        } else {
            left.push(name);
        }
    }
    if !left.is_empty() {
        eprintln!(
            "mirrorball: the environment is too large for a lab, which does not get {}",
            left.join(", ")
        );
    }
    let cwd = std::env::current_dir()
        .ok()
        .and_then(|path| path.into_os_string().into_string().ok());
    Ok(ExecRequest {
        argv,
        env,
        cwd,
        tty: window(),
    })
}

/// The terminal's size when standard input and output are one.
fn window() -> Option<WindowSize> {
    if !std::io::stdin().is_terminal() || !std::io::stdout().is_terminal() {
        return None;
    }
    // SAFETY: all zeroes is a valid winsize, and the request writes one.
    let (result, size) = unsafe {
        let mut size: libc::winsize = std::mem::zeroed();
        (libc::ioctl(0, libc::TIOCGWINSZ, &mut size), size)
    };
    Some(match result {
        0 if size.ws_row > 0 => WindowSize {
            rows: size.ws_row,
            cols: size.ws_col,
        },
        _ => WindowSize { rows: 24, cols: 80 },
    })
}

/// Returns the running program as a command inside a lab's hosts: their copy, or the program's file if it was
/// rebuilt since.
pub fn program(entry: &Entry, argv: &[OsString]) -> Result<Vec<OsString>, LabError> {
    let own = Path::new("/proc/self/exe");
    // Its own file has the other programs beside it, too.
    let program = if ProgramId::own()? == entry.program {
        PROGRAM.into()
    } else {
        std::fs::read_link(own).on("read", own)?.into_os_string()
    };
    Ok(std::iter::once(program).chain(argv.iter().cloned()).collect())
}
