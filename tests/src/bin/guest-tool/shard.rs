//! A program of shards that lies. Its VM's name selects the lie, as an argument is all that a shard gets.

use std::io::{self, IoSliceMut, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::process::ExitCode;
use std::time::Duration;

use nix::sys::signal::{SigHandler, Signal, signal};
use nix::sys::socket::{ControlMessageOwned, MsgFlags, recvmsg};
use serde_json::{Value, json};

/// Most descriptors of a launch.
const FILES_MAX: usize = 253;
/// Longest packet of a launch or an order, bytes.
const PACKET_BYTES: usize = 64 << 10;
/// Least number of bytes of a flood.
const FLOOD_BYTES: usize = 64 << 20;
/// Number of reports of a flood.
const FLOOD_REPORTS: usize = 20_000;

/// Plays the shard of the VM that the first argument names. A VM that names no lie gets the refusal of
/// another version.
pub fn play(vm: &str) -> ExitCode {
    // SAFETY: the monitor puts the control socket at this descriptor; nothing else here uses it.
    let control = unsafe { OwnedFd::from_raw_fd(3) };
    match lie(Control(control), vm) {
        Ok(code) => code,
        Err(_) => ExitCode::from(2),
    }
}

fn lie(control: Control, vm: &str) -> io::Result<ExitCode> {
    let Some(lie) = vm.strip_prefix("lie-") else {
        control.receive()?;
        control.report(&json!({ "unlike": { "versions": { "oldest": 65000, "newest": 65001 } } }))?;
        return Ok(ExitCode::FAILURE);
    };
    let (launch, files) = control.receive_launch()?;
    // Only SIGKILL ends it.
    for ignored in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP, Signal::SIGPIPE] {
        // SAFETY: ignoring a signal runs no code of ours.
        unsafe { signal(ignored, SigHandler::SigIgn) }?;
    }
    // Shards of the second version acknowledge their end.
    let versions = json!({ "oldest": 1, "newest": 2 });
    let running = json!({ "running": { "sandbox_missing": [], "sandbox_notes": [], "versions": versions } });
    match lie {
        // The end of a VM that has never run, and is not at its end.
        "early" => control.report(&json!({ "ended": { "how": "power-off" } }))?,
        // Answers without a request: of older and greater incarnations.
        "order" => {
            control.report(&json!({ "full-disks": { "disks": [0, 1, u16::MAX] } }))?;
            for incarnation in [0, 1, u64::MAX] {
                for answer in [json!("done"), json!({ "status": { "vcpus": u64::MAX } })] {
                    let to = json!({ "incarnation": incarnation, "request": u64::MAX });
                    control.report(&json!({ "answer": { "to": to, "answer": answer } }))?;
                }
            }
            control.report(&running)?;
            control.answer_all(&json!({ "status": huge() }))?;
        }
        // A second start.
        "twice" => {
            control.report(&running)?;
            control.report(&running)?;
        }
        "bytes" => {
            control.report(&running)?;
            control.packet(b"\x07\0\0\0\0\0\0\0\xff\xfe\x1b[2J\n")?;
        }
        "empty" => {
            control.report(&running)?;
            control.packet(b"")?;
        }
        // A refusal of the launch that it carries out.
        "unlike" => {
            control.report(&running)?;
            control.report(&json!({ "unlike": { "versions": versions } }))?;
        }
        "count" => {
            control.report(&running)?;
            // A message of 4 GiB, of which one byte comes.
            control.packet(b"\xff\xff\xff\xff\0\0\0\0{")?;
        }
        "closed" => {
            control.report(&running)?;
            drop(control);
        }
        "flood" => {
            control.report(&running)?;
            flood(&launch, &files);
            for number in 0..FLOOD_REPORTS {
                let disks: Vec<u16> = (0..1000).collect();
                control.report(&json!({ "full-disks": { "disks": disks } }))?;
                if number % 100 == 0 {
                    eprintln!("report {number}");
                }
            }
            control.answer_all(&json!({ "status": huge() }))?;
        }
        // The expected report of an end, and no exit.
        "undead" => {
            control.report(&running)?;
            control.answer_all(&json!("done"))?;
        }
        // Orders stay unread.
        "deaf" => control.report(&running)?,
        _ => return Ok(ExitCode::FAILURE),
    }
    loop {
        std::thread::sleep(Duration::from_secs(1));
    }
}

/// A status with the greatest numbers, where a shard has small ones.
fn huge() -> Value {
    let many = vec![u64::MAX; 10_000];
    json!({
        "vcpus": many,
        "exits": many,
        "memory": { "resident_bytes": u64::MAX },
        "disks": -1,
        "\u{1b}[2J": "\u{1b}[2J",
    })
}

/// Writes to the log, to the console, and to each other socket of the launch as much as they accept.
fn flood(launch: &Value, files: &[OwnedFd]) {
    let line = [b'x'; 4096];
    let mut log = io::stderr().lock();
    for _ in 0..FLOOD_BYTES / line.len() {
        // The log is full at some time, which is no error here.
        let _ = log.write_all(&line);
    }
    let console = launch["launch"]["vm"]["console"].as_u64();
    for (index, file) in files.iter().enumerate() {
        let rounds = if Some(index as u64) == console {
            FLOOD_BYTES / line.len()
        } else {
            16
        };
        for _ in 0..rounds {
            // SAFETY: sends bytes of ours; a descriptor that is no socket refuses.
            let sent = unsafe {
                libc::send(
                    file.as_raw_fd(),
                    line.as_ptr().cast(),
                    line.len(),
                    libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT,
                )
            };
            if sent < 0 {
                std::thread::sleep(Duration::from_micros(100));
            }
        }
    }
}

/// The shard's end of the control socket.
struct Control(OwnedFd);

impl Control {
    /// Sends a message in a packet, or in several. Each part of its bytes follows their number and the offset
    /// of the first.
    fn report(&self, message: &Value) -> io::Result<()> {
        let bytes = serde_json::to_vec(message)?;
        for (index, part) in bytes.chunks(PACKET_BYTES - 8).enumerate() {
            let offset = (index * (PACKET_BYTES - 8)) as u32;
            let header = [(bytes.len() as u32).to_le_bytes(), offset.to_le_bytes()].concat();
            self.packet(&[&header, part].concat())?;
        }
        Ok(())
    }

    fn packet(&self, bytes: &[u8]) -> io::Result<()> {
        nix::sys::socket::send(self.0.as_raw_fd(), bytes, MsgFlags::MSG_NOSIGNAL)?;
        Ok(())
    }

    fn receive(&self) -> io::Result<(Vec<u8>, Vec<OwnedFd>)> {
        let mut bytes = vec![0; PACKET_BYTES];
        let mut rights = nix::cmsg_space!([RawFd; FILES_MAX]);
        let mut parts = [IoSliceMut::new(&mut bytes)];
        let received = recvmsg::<()>(
            self.0.as_raw_fd(),
            &mut parts,
            Some(&mut rights),
            MsgFlags::MSG_CMSG_CLOEXEC,
        )?;
        let mut files = Vec::new();
        for message in received.cmsgs()? {
            if let ControlMessageOwned::ScmRights(raw) = message {
                // SAFETY: the kernel has just given them to this process.
                files.extend(raw.iter().map(|&raw| unsafe { OwnedFd::from_raw_fd(raw) }));
            }
        }
        let count = received.bytes;
        if count == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        bytes.truncate(count);
        Ok((bytes, files))
    }

    /// The launch, and its files.
    fn receive_launch(&self) -> io::Result<(Value, Vec<OwnedFd>)> {
        let (first, files) = self.receive()?;
        let total = first.first_chunk().map_or(0, |total| u32::from_le_bytes(*total));
        let mut launch = first.get(8..).unwrap_or_default().to_vec();
        while launch.len() < total as usize {
            let (next, _) = self.receive()?;
            launch.extend_from_slice(next.get(8..).unwrap_or_default());
        }
        Ok((serde_json::from_slice(&launch)?, files))
    }

    /// Answers each order with `answer`. The answer to `Quit` is the report of an end.
    fn answer_all(&self, answer: &Value) -> io::Result<()> {
        loop {
            let (packet, _) = self.receive()?;
            let order: Value = serde_json::from_slice(packet.get(8..).unwrap_or_default())?;
            if order["order"] == "quit" {
                self.report(&json!({ "ended": { "how": "quit" } }))?;
            }
            let report = json!({ "answer": { "to": order["id"], "answer": answer } });
            self.report(&report)?;
        }
    }
}
