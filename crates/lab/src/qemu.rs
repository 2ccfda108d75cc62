//! QEMU's command line for one lab host.

use std::ffi::OsString;
use std::os::fd::RawFd;
use std::path::Path;

use config::lab::HostSpec;

use crate::boot::{Card, PORT};
use crate::kernel::Kernel;

/// What a host is made of, with everything chosen.
pub struct Machine<'a> {
    /// Its description.
    pub spec: &'a HostSpec,
    /// CPUs.
    pub cpus: u16,
    /// Memory.
    pub memory_bytes: u64,
    /// Kernel.
    pub kernel: &'a Kernel,
    /// The initramfs, open in QEMU.
    pub initramfs: RawFd,
    /// The monitor's socket, open in QEMU.
    pub monitor: RawFd,
    /// Where the console goes.
    pub console: &'a Path,
    /// The cards after the first, each with its socket, open in QEMU.
    pub links: &'a [(Card, RawFd)],
    /// Shared memory: file, open in QEMU, and size.
    pub shared: &'a [(RawFd, u64)],
}

/// The host kernel's command line.
///
/// `tsc=reliable` keeps KVM from rewriting TSC offsets, which cost guests twenty times the timer interrupts; what
/// follows it only saves time: checks of timers, of ports that aren't there, of ciphers.
///
/// The emulation now and then delivers a host's interrupt right at the exit from a guest, before KVM has its own registers
/// back; the host then panics, or a guest ends in a triple fault (seen with QEMU 7.2 and 10.0). With four guests on two CPUs
/// that hit four runs of five; without the host's mitigations of processor faults, which nobody needs in here, and without
/// preemption inside its kernel, none of the first four.
///
/// Now and then the CPUs of a host on a busy machine lock up in KVM: a host that is stuck for 40 s dies, with its stacks on
/// the console, instead of going on until a limit.
const COMMAND_LINE: &str = "console=ttyS0 panic=-1 quiet tsc=reliable no_timer_check random.trust_cpu=on \
                            8250.nr_uarts=1 cryptomgr.notests softlockup_panic=1 watchdog_thresh=20 \
                            mitigations=off preempt=none";

/// QEMU's arguments.
pub fn arguments(machine: &Machine) -> Vec<OsString> {
    let mut list: Vec<OsString> = Vec::new();
    let mut add = |flag: &str, value: String| list.extend([flag.into(), value.into()]);
    add("-accel", "tcg,thread=multi".into());
    add("-cpu", "EPYC-Milan,+svm,+npt,+nrip-save".into());
    add("-smp", machine.cpus.to_string());
    add("-m", format!("{}K", machine.memory_bytes >> 10));
    add("-display", "none".into());
    add("-kernel", machine.kernel.image.display().to_string());
    add("-initrd", format!("/proc/self/fd/{}", machine.initramfs));
    add("-append", COMMAND_LINE.into());
    add(
        "-chardev",
        format!("file,id=console,path={}", escaped(machine.console)),
    );
    add("-serial", "chardev:console".into());
    add("-chardev", format!("socket,id=monitor,fd={}", machine.monitor));
    add("-mon", "chardev=monitor,mode=control".into());
    // Only root can keep owners; for others every file is theirs, as it is outside.
    let model = if nix::unistd::geteuid().is_root() {
        "passthrough"
    } else {
        "none"
    };
    for tag in ["root", "root-cached"] {
        add(
            "-fsdev",
            format!("local,id={tag},path=/,security_model={model},multidevs=remap"),
        );
        add("-device", format!("virtio-9p-pci,fsdev={tag},mount_tag={tag}"));
    }
    add("-device", "virtio-rng-pci".into());
    add(
        "-netdev",
        format!("user,id=out,hostfwd=tcp:127.0.0.1:0-10.0.2.15:{PORT}"),
    );
    add(
        "-device",
        format!("virtio-net-pci,netdev=out,romfile=,mac={OUT_MAC}"),
    );
    for (index, (card, socket)) in machine.links.iter().enumerate() {
        add(
            "-netdev",
            format!("stream,id=link{index},addr.type=fd,addr.str={socket}"),
        );
        add(
            "-device",
            format!("virtio-net-pci,netdev=link{index},romfile=,mac={}", card.mac),
        );
    }
    for (index, (file, size)) in machine.shared.iter().enumerate() {
        add(
            "-object",
            format!(
                "memory-backend-file,id=shared{index},mem-path=/proc/self/fd/{file},size={size},share=on"
            ),
        );
        add("-device", format!("ivshmem-plain,memdev=shared{index}"));
    }
    let mut cpu = 0;
    for (index, node) in machine.spec.nodes.iter().enumerate() {
        add(
            "-object",
            format!("memory-backend-ram,id=node{index},size={}", node.memory.0),
        );
        let cpus = if node.cpus == 0 {
            String::new()
        } else {
            format!(",cpus={cpu}-{}", cpu + node.cpus - 1)
        };
        cpu += node.cpus;
        add("-numa", format!("node,nodeid={index},memdev=node{index}{cpus}"));
    }
    for (from, node) in machine.spec.nodes.iter().enumerate() {
        for (to, distance) in node.distances.iter().flatten().enumerate() {
            add("-numa", format!("dist,src={from},dst={to},val={distance}"));
        }
    }
    list.extend([
        "-nodefaults".into(),
        "-no-reboot".into(),
        "-no-user-config".into(),
    ]);
    list
}

/// The hardware address of the card that leads out.
pub const OUT_MAC: &str = "52:54:00:12:34:56";

/// In QEMU's option values a comma is written twice.
fn escaped(path: &Path) -> String {
    path.display().to_string().replace(',', ",,")
}
