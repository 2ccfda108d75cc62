//! QEMU's command line for one lab host.

use std::ffi::OsString;
use std::os::fd::RawFd;
use std::path::Path;

use config::lab::HostSpec;

use crate::boot::{NetworkCard, PORT};
use crate::kernel::Kernel;

/// Configuration of a host's QEMU process.
pub struct Machine<'a> {
    /// The host's description in the lab's file.
    pub spec: &'a HostSpec,
    /// CPUs, without the spare one.
    pub cpus: u16,
    /// Memory of the host, bytes.
    pub memory_bytes: u64,
    /// The rate of the time stamp counter.
    pub tsc_khz: u64,
    /// Kernel of the host.
    pub kernel: &'a Kernel,
    /// The initramfs, open in QEMU.
    pub initramfs: RawFd,
    /// The monitor's socket, open in QEMU.
    pub monitor: RawFd,
    /// Where the console goes.
    pub console: &'a Path,
    /// The cards after the first, each with its socket, open in QEMU.
    pub links: &'a [(NetworkCard, RawFd)],
    /// Shared memory: file, open in QEMU, and size.
    pub shared: &'a [(RawFd, u64)],
}

/// How many CPUs a host has that no program runs on, from number 0: see [`arguments`].
pub const SPARE_CPUS: u16 = 1;

/// The host kernel's command line.
///
/// `tsc=reliable` keeps KVM from rewriting TSC offsets, which cost guests twenty times the timer interrupts;
/// the parameters after it only save time: they skip checks of timers, of absent ports and of ciphers, and
/// mitigations of processors' faults, which emulated hosts do not need.
///
/// `tsc_early_khz` is the rate of the time stamp counter, which is this machine's. On a busy machine the
/// kernel sometimes fails to measure it against emulated timers, and a guest's clock ran ten times too fast
/// there: every limit passed as early.
///
/// `highres=off` makes timers wait for the host's next tick. If QEMU's CPU takes an interrupt request just
/// after the host put an interrupt into a guest, it can deliver the guest's interrupt twice (7.2 and 10.0:
/// `helper_vmrun` leaves `exception_index` set). A guest that has not yet changed to its kernel's GS base
/// does not survive that. With fine timers such requests arrive at any time, with ticks hardly ever in that
/// moment. Guests run faster, too.
///
/// `nohz=off` keeps each CPU's timer periodic. At each exit of a guest QEMU clears a bit among the CPU's
/// pending interrupts without a lock (`do_vmexit`), and an interrupt that arrives in between is lost. A lost
/// tick of a periodic timer costs 4 ms. A timer that its own interrupt rearms never fires again, and threads
/// that wait for it on that CPU hang.
///
/// `maxcpus=1` starts the kernel on the first CPU; [`crate::init`] brings the others online once the drivers
/// are loaded. Two faults hang a host that starts on all its CPUs. First, the kernel patches its code many
/// times while it starts (`sched_clock_tick` of each tick among it), and a CPU that runs such code meanwhile
/// can keep a translation of the patch's breakpoint (see `init/kvm.rs`). Second, QEMU 7.2 gives all CPUs a
/// new memory map at once, when a driver enables a device, but makes each CPU drop addresses of the old one
/// later. Until then a CPU's access to its interrupt controller can reach another device, and an interrupt
/// whose end is lost so blocks those after it forever.
///
/// A host that is stuck for 40 s nevertheless dies, with the stacks of all CPUs on the console, instead of
/// running until a limit.
const COMMAND_LINE: &str = "console=ttyS0 panic=-1 quiet tsc=reliable no_timer_check random.trust_cpu=on \
                            8250.nr_uarts=1 maxcpus=1 cryptomgr.notests mitigations=off highres=off nohz=off \
                            softlockup_panic=1 softlockup_all_cpu_backtrace=1 watchdog_thresh=20";

/// CPU of a host. QEMU emulates a string instruction step by step: without the flags of fast byte strings the
/// host and its guests clear and copy memory in words of eight bytes instead of bytes, which halves the time
/// that a VM takes to start.
const CPU: &str = "EPYC-Milan,+svm,+npt,+nrip-save,-erms,-fsrm";

/// QEMU's own system call filter: it starts no program, gains no rights and makes no obsolete call. It does
/// not make the emulation a security boundary; it takes calls that QEMU never needs from a faulty device.
const FILTER: &str = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny";

/// QEMU's arguments.
///
/// Returns QEMU's arguments. The first CPU is a spare one: the host's first process keeps off it, and with it
/// every program. In QEMU (7.2 and 10.0), every CPU that loads floating-point state, as each task switch
/// does, reads, changes and writes back the flags of the *first* CPU without a lock (`cpu_clear_ignne`:
/// FERR#, a pin of the PC of 1981). Among these flags are SVM's: whether interrupts are enabled and whether
/// addresses are a guest's. A change by the first CPU meanwhile is lost. A first CPU that runs guests
/// therefore sometimes returns from one with a guest's page tables or with interrupts enabled, and the host
/// panics or the guest ends in a triple fault. Without guests, its flags do not change.
pub fn arguments(machine: &Machine) -> Vec<OsString> {
    let mut list: Vec<OsString> = Vec::new();
    let mut add = |flag: &str, value: String| list.extend([flag.into(), value.into()]);
    add("-sandbox", FILTER.into());
    add("-accel", "tcg,thread=multi".into());
    add("-cpu", CPU.into());
    add("-smp", (SPARE_CPUS + machine.cpus).to_string());
    add("-m", format!("{}K", machine.memory_bytes >> 10));
    add("-display", "none".into());
    add("-kernel", machine.kernel.image.display().to_string());
    add("-initrd", format!("/proc/self/fd/{}", machine.initramfs));
    add(
        "-append",
        format!("{COMMAND_LINE} tsc_early_khz={}", machine.tsc_khz),
    );
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
        // QEMU requires every CPU to be on a node, the spare one too.
        let count = node.cpus + if index == 0 { SPARE_CPUS } else { 0 };
        let cpus = if count == 0 {
            String::new()
        } else {
            format!(",cpus={cpu}-{}", cpu + count - 1)
        };
        cpu += count;
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
