//! A cluster on the loopback, ended when dropped.

use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use registry::cluster::client::Connection;
use registry::cluster::files::Files;
use registry::cluster::interface::{CellRequest, CellResponse};

use crate::{LIMIT, Outcome};

/// Transport of messages.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Way {
    /// Within a host.
    Ring,
    /// Between hosts that share memory.
    Shared,
    /// Between hosts without shared memory.
    Tls,
}

impl Way {
    /// All transports.
    pub const ALL: [Self; 3] = [Self::Ring, Self::Shared, Self::Tls];
}

impl fmt::Display for Way {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::Ring => "rings of one host",
            Self::Shared => "memory shared between hosts",
            Self::Tls => "TLS streams",
        })
    }
}

/// Cells 0, 1, ..., each on a host of its own except for [`Way::Ring`].
pub struct Cluster {
    program: PathBuf,
    folder: PathBuf,
    way: Way,
    cells: u16,
    silence_ms: u64,
}

impl Cluster {
    /// Brings up cells that have all met. After `silence_ms` without a message a host counts as dead.
    pub fn up(program: &Path, way: Way, cells: u16, silence_ms: u64) -> Outcome<Self> {
        let folder = std::env::temp_dir().join(format!("bench-hosts-{}", std::process::id()));
        std::fs::create_dir_all(&folder)?;
        let cluster = Self {
            program: program.to_owned(),
            folder,
            way,
            cells,
            silence_ms,
        };
        if way == Way::Ring {
            cluster.mirrorball(
                0,
                &["cluster", "up", "--lab", "never", "--cells", &cells.to_string()],
            )?;
        } else {
            let file = cluster.write_file()?;
            let file = file.to_str().ok_or("a folder whose name is no text")?;
            cluster.mirrorball(0, &["cluster", "keys", file])?;
            for number in 0..cells {
                let host = format!("h{number}");
                cluster.mirrorball(
                    number,
                    &["cluster", "up", file, "--host", &host, "--lab", "never"],
                )?;
            }
        }
        let start = Instant::now();
        for number in 0..cells {
            let mut connection = cluster.connect(number)?;
            while !all_live(&mut connection, cells)? {
                if start.elapsed() > LIMIT {
                    return Err("the cells do not find one another".into());
                }
                std::thread::sleep(std::time::Duration::from_millis(5));
            }
        }
        Ok(cluster)
    }

    fn write_file(&self) -> Outcome<PathBuf> {
        let mut text = String::new();
        let memory = self.folder.join("memory");
        if self.way == Way::Shared {
            std::fs::File::create(&memory)?.set_len(4 << 20)?;
        }
        for number in 0..self.cells {
            text += &format!(
                "[[hosts]]\nname = \"h{number}\"\naddress = \"127.0.0.{}:7480\"\n",
                number + 1
            );
            if self.way == Way::Shared {
                text += &format!("shared_memory = {memory:?}\n");
            }
        }
        for number in 0..self.cells {
            text += &format!("[[cells]]\nhost = \"h{number}\"\nmemory = \"1G\"\n");
        }
        text += &format!("[membership]\nsilence_ms = {}\n", self.silence_ms);
        let file = self.folder.join("cluster.toml");
        std::fs::write(&file, text)?;
        Ok(file)
    }

    /// The folder of a cell's host.
    fn runtime(&self, cell: u16) -> PathBuf {
        let host = if self.way == Way::Ring { 0 } else { cell };
        self.folder.join(format!("h{host}"))
    }

    fn mirrorball(&self, cell: u16, arguments: &[&str]) -> Outcome<()> {
        let output = Command::new(&self.program)
            .args(arguments)
            .env("MIRRORBALL_RUNTIME", self.runtime(cell))
            .output()?;
        if output.status.success() {
            return Ok(());
        }
        let said = String::from_utf8_lossy(&output.stderr);
        Err(format!("mirrorball {}: {said}", arguments.join(" ")).into())
    }

    /// A connection to a cell.
    pub fn connect(&self, cell: u16) -> Outcome<Connection> {
        Ok(Connection::open(&Files::at(&self.runtime(cell)).cell(cell))?)
    }

    /// The logs of the cells.
    pub fn logs(&self) -> String {
        let log = |cell| {
            let said = std::fs::read_to_string(Files::at(&self.runtime(cell)).cell(cell).log());
            format!("--- cell {cell}:\n{}", said.unwrap_or_default())
        };
        (0..self.cells).map(log).collect()
    }

    /// The processes of a cell: its guard, and itself.
    pub fn processes(&self, cell: u16) -> Outcome<[u32; 2]> {
        let CellResponse::Status(status) = self.connect(cell)?.ask(&CellRequest::Status)? else {
            return Err("a cell does not say how it is".into());
        };
        let own = status.cells.iter().find(|known| known.plan.number == cell);
        let own = own.ok_or("a cell does not know itself")?.pid;
        let stat = std::fs::read_to_string(format!("/proc/{own}/stat"))?;
        let after_name = stat.rsplit_once(") ").ok_or("a process without a name")?.1;
        let parent = after_name.split(' ').nth(1).ok_or("a process without a parent")?;
        Ok([parent.parse()?, own])
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        for number in 0..self.cells {
            // A stopped process can't end on request.
            if let Ok(guards) = stopped(&self.runtime(number)) {
                for process in guards {
                    let _ = kill(Pid::from_raw(process), Signal::SIGKILL);
                }
            }
            if number == 0 || self.way != Way::Ring {
                let _ = self.mirrorball(number, &["cluster", "down"]);
            }
        }
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// Processes of this runtime directory that are stopped.
fn stopped(runtime: &Path) -> Outcome<Vec<i32>> {
    let variable = format!("MIRRORBALL_RUNTIME={}", runtime.display());
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc")?.flatten() {
        let Some(process) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        let environment = std::fs::read(entry.path().join("environ")).unwrap_or_default();
        let stat = std::fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
        let is_stopped = stat
            .rsplit_once(") ")
            .is_some_and(|(_, rest)| rest.starts_with('T'));
        if is_stopped
            && environment
                .split(|byte| *byte == 0)
                .any(|entry| entry == variable.as_bytes())
        {
            found.push(process);
        }
    }
    Ok(found)
}

fn all_live(connection: &mut Connection, cells: u16) -> Outcome<bool> {
    for cell in 0..cells {
        if !lives(connection, cell)? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Whether a cell lives, in another's view.
pub fn lives(connection: &mut Connection, cell: u16) -> Outcome<bool> {
    match connection.ask(&CellRequest::Status)? {
        CellResponse::Status(status) => {
            let mut known = status.cells.iter();
            Ok(known.any(|known| known.plan.number == cell && known.life.is_some()))
        }
        _ => Err("a cell does not say how it is".into()),
    }
}
