//! Two guests under one monitor that exchange bytes by TCP: on Mirrorball's subnet, or on TAP devices and a
//! bridge of the host.

use std::process::{Command, Stdio};

use bench::guest_files::GuestFiles;
use bench::guest_process::GuestProcess;

use crate::Outcome;
use crate::vmm::{FIRST, LIMIT, Vmm, ip};

const BRIDGE: &str = "mirrorbr0";
/// Addresses of the guest that answers and of the one that calls, on the subnet's range.
const ADDRESSES: [&str; 2] = ["10.213.7.2", "10.213.7.3"];
const RANGE_BITS: u8 = 16;

/// Runs the exchange in two fresh guests with cards of this MTU, and returns the caller's figures.
pub fn exchange(vmm: Vmm, mtu: u16, files: &GuestFiles) -> Outcome<serde_json::Value> {
    let bridge = (vmm != Vmm::Mirrorball)
        .then(|| Bridge::create(mtu))
        .transpose()?;
    let mut answerer = start(vmm, 0, mtu, files)?;
    answerer.wait_for("BENCH listening")?;
    let mut caller = start(vmm, 1, mtu, files)?;
    caller.wait_for(FIRST)?;
    let (json, _) = caller.wait_for("BENCH ")?;
    caller.end()?;
    answerer.end()?;
    drop(bridge);
    eprintln!("bench: {}, MTU {mtu}: {json}", vmm.name());
    Ok(serde_json::from_str(&json)?)
}

/// Starts one of both guests.
fn start(vmm: Vmm, number: usize, mtu: u16, files: &GuestFiles) -> Outcome<GuestProcess> {
    let address = ADDRESSES[number];
    let mut task = format!("pair bench.address={address}/{RANGE_BITS} bench.mtu={mtu}");
    if number == 1 {
        task += &format!(" bench.peer={}", ADDRESSES[0]);
    }
    let mut command = vmm.without_devices(&task, files);
    if vmm == Vmm::Mirrorball {
        let net = format!("subnet,network=bench,address={address}");
        command.args(["--name", &format!("bench-pair-{number}"), "--net", &net]);
    } else {
        add_tap(&mut command, vmm, number, mtu);
    }
    GuestProcess::start(command.stdin(Stdio::null()), LIMIT)
}

fn add_tap(command: &mut Command, vmm: Vmm, number: usize, mtu: u16) {
    let vhost = if vmm == Vmm::QemuPcVhost { "on" } else { "off" };
    let tap = tap(number);
    command.args([
        "-netdev",
        &format!("tap,id=n0,ifname={tap},script=no,downscript=no,vhost={vhost}"),
        "-device",
        &format!("virtio-net-pci,netdev=n0,romfile=,mac=52:54:00:77:00:0{number},host_mtu={mtu}"),
    ]);
}

fn tap(number: usize) -> String {
    format!("mirrorpair{number}")
}

/// A bridge with a TAP device for each guest. Removed when dropped.
struct Bridge;

impl Bridge {
    fn create(mtu: u16) -> Outcome<Self> {
        let bridge = Self;
        ip(&format!("link add {BRIDGE} type bridge"))?;
        for tap in [tap(0), tap(1)] {
            ip(&format!("tuntap add {tap} mode tap"))?;
            ip(&format!("link set {tap} mtu {mtu} master {BRIDGE} up"))?;
        }
        ip(&format!("link set {BRIDGE} mtu {mtu} up"))?;
        Ok(bridge)
    }
}

impl Drop for Bridge {
    fn drop(&mut self) {
        for device in [&tap(0), &tap(1), BRIDGE] {
            // One that was not made is not there.
            let _ = ip(&format!("link del {device}"));
        }
    }
}
