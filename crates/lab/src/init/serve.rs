//! The serving process of a lab host: one thread for each connection.

use std::fs;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::time::Duration;

use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

use super::Failure;
use crate::boot::{BootConfig, PORT, Purpose, READY, TOKEN_BYTES};

/// Time limit of a connection for its token and purpose.
const GREETING_MAX: Duration = Duration::from_secs(10);

/// Serves until the host ends.
pub fn run(boot: &BootConfig) -> Result<(), Failure> {
    // A separate session: a signal to process 1's group must not end it.
    nix::unistd::setsid()?;
    let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, PORT))?;
    println!("{READY}");
    loop {
        let (stream, _) = listener.accept()?;
        let token = boot.token;
        // A thread that can't be started costs this connection only.
        let _ = std::thread::Builder::new().spawn(move || {
            if let Err(error) = connection(stream, &token) {
                println!("mirrorball lab: a connection failed: {error}");
            }
        });
    }
}

/// Makes every CPU that programs run on wake a sleeping thread, and every shared file system reply. In
/// emulation an interrupt is lost occasionally. A thread that sleeps, or waits for a file, then does so
/// forever, and time limits do not end it either. The next interrupt of the same kind, such as these, revives
/// it; if that does not help, this never returns.
fn beat() -> std::io::Result<()> {
    let mounts = fs::read_to_string("/proc/self/mounts")?;
    for mount in mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>()) {
        if let [_, place, "9p", ..] = mount[..] {
            // Each call reaches the other side.
            let _ = nix::sys::statfs::statfs(place);
        }
    }
    let cpus = sched_getaffinity(Pid::from_raw(0))?;
    std::thread::scope(|scope| {
        for cpu in (0..CpuSet::count()).filter(|cpu| cpus.is_set(*cpu).unwrap_or(false)) {
            std::thread::Builder::new().spawn_scoped(scope, move || {
                let mut only = CpuSet::new();
                only.set(cpu)
                    .and_then(|()| sched_setaffinity(Pid::from_raw(0), &only))?;
                std::thread::sleep(Duration::from_millis(1));
                Ok::<_, nix::Error>(())
            })?;
        }
        Ok(())
    })
}

fn connection(mut stream: TcpStream, token: &[u8; TOKEN_BYTES]) -> Result<(), Failure> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(GREETING_MAX))?;
    let mut greeting = [0; TOKEN_BYTES + 1];
    stream.read_exact(&mut greeting)?;
    // Constant-time comparison: all bytes are compared, whatever the first ones are.
    let difference = greeting.iter().zip(token).fold(0, |sum, (a, b)| sum | (a ^ b));
    if difference != 0 {
        return Err("wrong token".into());
    }
    stream.set_read_timeout(None)?;
    match Purpose::from_byte(greeting[TOKEN_BYTES]) {
        Some(Purpose::Agent) => {
            // Names of cached directories may be stale: files made since then must be found.
            let _ = fs::write("/proc/sys/vm/drop_caches", "2");
            agent::server::serve(stream)?;
        }
        Some(Purpose::Sync) => {
            nix::unistd::sync();
            stream.write_all(b"S")?;
        }
        Some(Purpose::CountVms) => {
            // A directory for each VM; the registry's own files are beside them.
            let is_vm = |entry: &std::io::Result<fs::DirEntry>| {
                entry.as_ref().is_ok_and(|entry| entry.path().is_dir())
            };
            let count = |folder| fs::read_dir(folder).map_or(0, |entries| entries.filter(is_vm).count());
            // A cluster waits for VMs.
            let count = count("/run/mirrorball/vms") + count("/run/mirrorball/cells");
            stream.write_all(&[u8::try_from(count).unwrap_or(u8::MAX)])?;
        }
        Some(Purpose::Beat) => {
            beat()?;
            stream.write_all(b"B")?;
        }
        Some(Purpose::Tell) => {
            fs::write("/proc/sys/kernel/printk", "7")?;
            // The stacks of blocked tasks, then those of all CPUs.
            fs::write("/proc/sysrq-trigger", "w")?;
            fs::write("/proc/sysrq-trigger", "l")?;
            stream.write_all(b"T")?;
        }
        None => return Err("unknown purpose".into()),
    }
    Ok(())
}
