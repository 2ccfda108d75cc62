//! Starts one guest under one monitor and reads its output.

use std::net::TcpListener;
use std::process::{Command, Stdio};
use std::time::Duration;

use bench::exchange;
use bench::guest_files::GuestFiles;
use bench::guest_process::GuestProcess;

use crate::Outcome;
use crate::virtiofsd::Virtiofsd;

/// The monitors compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Vmm {
    /// The monitor of this repository.
    Mirrorball,
    /// QEMU's machine without the usual firmware tables, and virtio over MMIO.
    QemuMicrovm,
    /// QEMU's default PC, with virtio over PCI, and io_uring for its disks.
    QemuPc,
    /// The same with threads for its disks.
    QemuPcThreads,
    /// QEMU's default PC with vhost for its cards.
    QemuPcVhost,
}

/// Time limit of a guest.
pub const LIMIT: Duration = Duration::from_secs(90);
/// Words of the kernel's command line in every run.
const CMDLINE: &str = "console=ttyS0 quiet panic=-1 reboot=t tsc=reliable no_timer_check rdinit=/bench";
/// The first line of a guest's process 1.
pub const FIRST: &str = "BENCH first-user-process";
const TAP: &str = "mirrorbench0";

impl Vmm {
    /// The name in the table.
    pub fn name(self) -> &'static str {
        match self {
            Self::Mirrorball => "mirrorball",
            Self::QemuMicrovm => "qemu microvm",
            Self::QemuPc => "qemu pc",
            Self::QemuPcThreads => "qemu pc, aio=threads",
            Self::QemuPcVhost => "qemu pc, vhost",
        }
    }

    /// Starts a guest that does `task`.
    pub fn start(self, task: &str, files: &GuestFiles) -> Outcome<GuestProcess> {
        GuestProcess::start(self.command(task, files).stdin(Stdio::null()), LIMIT)
    }

    /// The command that starts a guest of 1 vCPU and 128 MiB, which does the task, before its devices.
    pub fn without_devices(self, task: &str, files: &GuestFiles) -> Command {
        let cmdline = format!("{CMDLINE} bench={task}");
        if self == Self::Mirrorball {
            let mut command = Command::new(&files.mirrorball);
            command.args([
                "run", "--lab", "never", "--cpus", "1", "--memory", "128M", "--kernel",
            ]);
            command
                .arg(&files.kernel)
                .arg("--initrd")
                .arg(&files.initrd)
                .args(["--cmdline", &cmdline]);
            return command;
        }
        let mut command = files.qemu();
        command.args([
            "-nodefaults",
            "-no-user-config",
            "-display",
            "none",
            "-no-reboot",
            "-serial",
            "stdio",
        ]);
        command.args(["-cpu", "host", "-smp", "1", "-m", "128M", "-kernel"]);
        command
            .arg(&files.kernel)
            .arg("-initrd")
            .arg(&files.initrd)
            .args(["-append", &cmdline]);
        match self {
            Self::QemuMicrovm => command.args(["-M", "microvm,accel=kvm,rtc=on"]),
            _ => command.args(["-M", "pc,accel=kvm"]),
        };
        command
    }

    /// The command that starts such a guest with the devices of the task.
    fn command(self, task: &str, files: &GuestFiles) -> Command {
        let mut command = self.without_devices(task, files);
        let disk = files.disk.display();
        if self == Self::Mirrorball {
            match task {
                "net" => command.args(["--net", &format!("tap={TAP}")]),
                _ => command.args(["--net", "none"]),
            };
            if task == "folders" {
                command.args(["--folder", &format!("{}:data", files.shared.display())]);
            }
            if task == "disk" {
                command.args(["--disk", &format!("{disk}:exclusive:persistent")]);
            }
            return command;
        }
        let transport = if self == Self::QemuMicrovm {
            "device"
        } else {
            "pci"
        };
        if task == "folders" {
            // The server maps the guest's memory.
            command.args(["-object", "memory-backend-memfd,id=m0,size=128M,share=on"]);
            command.args(["-machine", "memory-backend=m0", "-chardev"]);
            command.arg(format!(
                "socket,id=c0,path={}",
                files.virtiofsd_socket().display()
            ));
            command.args([
                "-device",
                &format!("vhost-user-fs-{transport},chardev=c0,tag=data"),
            ]);
        }
        if task == "disk" {
            command.args(["-object", "iothread,id=io0", "-drive"]);
            let aio = if self == Self::QemuPcThreads {
                "threads"
            } else {
                "io_uring"
            };
            command.arg(format!(
                "file={disk},if=none,id=d0,format=raw,cache=writeback,aio={aio}"
            ));
            command.args([
                "-device",
                &format!("virtio-blk-{transport},drive=d0,iothread=io0"),
            ]);
        }
        if task == "net" {
            command.args([
                "-netdev",
                &format!("tap,id=n0,ifname={TAP},script=no,downscript=no"),
            ]);
            command.args([
                "-device",
                &format!(
                    "virtio-net-{transport},netdev=n0{}",
                    if transport == "pci" { ",romfile=" } else { "" }
                ),
            ]);
        }
        command
    }
}

/// Seconds from the start of the monitor to the guest's first user process.
pub fn first_user_process(vmm: Vmm, files: &GuestFiles) -> Outcome<f64> {
    let mut guest = vmm.start("boot", files)?;
    let (_, time) = guest.wait_for(FIRST)?;
    guest.end()?;
    eprintln!("bench: {} booted in {:.2} s", vmm.name(), time.as_secs_f64());
    Ok(time.as_secs_f64())
}

/// Runs `task` in a fresh guest and returns its answer.
pub fn task(vmm: Vmm, task: &str, files: &GuestFiles) -> Outcome<serde_json::Value> {
    let peer = if task == "net" { Some(Tap::create()?) } else { None };
    let server = match (task, vmm) {
        ("folders", vmm) if vmm != Vmm::Mirrorball => Some(Virtiofsd::start(files)?),
        _ => None,
    };
    let mut guest = vmm.start(task, files)?;
    guest.wait_for(FIRST)?;
    let (json, _) = guest.wait_for("BENCH ")?;
    guest.end()?;
    drop((peer, server));
    eprintln!("bench: {} {task}: {json}", vmm.name());
    Ok(serde_json::from_str(&json)?)
}

/// A TAP device with a TCP peer behind it. Removed when dropped.
struct Tap;

impl Tap {
    fn create() -> Outcome<Self> {
        for words in [
            format!("tuntap add {TAP} mode tap"),
            format!("addr add 10.77.0.1/24 dev {TAP}"),
            format!("link set {TAP} up"),
        ] {
            ip(&words)?;
        }
        let tap = Self;
        let listener = TcpListener::bind("10.77.0.1:5077")?;
        std::thread::spawn(move || {
            // A peer that fails shows as a guest that fails.
            let _ = listener
                .accept()
                .and_then(|(mut stream, _)| exchange::answer(&mut stream));
        });
        Ok(tap)
    }
}

impl Drop for Tap {
    fn drop(&mut self) {
        let _ = ip(&format!("link del {TAP}"));
    }
}

/// Calls `ip`.
pub fn ip(words: &str) -> Outcome<()> {
    let status = Command::new("ip").args(words.split(' ')).status()?;
    if status.success() {
        Ok(())
    } else {
        Err(format!("ip {words}: {status}").into())
    }
}
