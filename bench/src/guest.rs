//! Process 1 of a benchmarked guest: reports that it runs, runs the task of the command line, prints one line
//! of JSON behind `BENCH`, powers off.
//!
//! `bench=boot`, `bench=compute`, `bench=disk`, `bench=net` (peer 10.77.0.1), `bench=pair` (with
//! `bench.address=ADDRESS/BITS`, `bench.mtu=BYTES`, and `bench.peer=ADDRESS` for the caller), `bench=folders`
//! (with the tag `data`), `bench=idle`, `bench=paging` (with `bench.mib=N`, `bench.loops=N`, and `bench.swap`
//! for a guest that swaps to its disk).

use std::alloc::{Layout, alloc};
use std::fs::{self, File, OpenOptions};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use bench::exchange;
use nix::mount::{MsFlags, mount};
use nix::sys::reboot::{RebootMode, reboot};

mod folder;
mod stress;
mod work;

/// Bytes moved in each direction by the sequential disk measurement.
const BULK_BYTES: usize = 48 << 20;
const DISK_BLOCK: usize = 4096;
const DISK_RUN: usize = 1 << 20;
/// How long accesses of one block each, one at a time, are counted.
const ONE_AT_A_TIME: Duration = Duration::from_secs(2);

fn main() {
    // SAFETY: every x86-64 processor has the instruction.
    let tsc = unsafe { core::arch::x86_64::_rdtsc() };
    let clock = nix::time::clock_gettime(nix::time::ClockId::CLOCK_BOOTTIME);
    println!("BENCH first-user-process");
    for (kind, place) in [("proc", "/proc"), ("sysfs", "/sys"), ("devtmpfs", "/dev")] {
        let _ = fs::create_dir_all(place);
        let _ = mount(Some(kind), place, Some(kind), MsFlags::empty(), None::<&str>);
    }
    let cmdline = fs::read_to_string("/proc/cmdline").unwrap_or_default();
    let task = cmdline
        .split_whitespace()
        .find_map(|word| word.strip_prefix("bench="))
        .unwrap_or("boot");
    let outcome = match task {
        "boot" => Ok(String::from("{}")),
        "compute" => Ok(format!("{{\"compute_s\":{}}}", work::compute().as_secs_f64())),
        "disk" => modules().and_then(|()| disk()),
        "net" => modules().and_then(|()| net()),
        "pair" => modules().and_then(|()| pair(&cmdline)),
        "folders" => modules().and_then(|()| folder::run()),
        "paging" => modules().and_then(|()| stress::run(&cmdline)),
        "idle" => {
            let clock_s = clock.map_or(0.0, |time| Duration::from(time).as_secs_f64());
            println!("BENCH {{\"tsc\":{tsc},\"clock_s\":{clock_s}}}");
            std::thread::sleep(Duration::from_secs(3600));
            Ok(String::new())
        }
        other => Err(std::io::Error::other(format!("no task {other}"))),
    };
    match outcome {
        Ok(json) => println!("BENCH {json}"),
        Err(error) => println!("BENCH {{\"error\":\"{error}\"}}"),
    }
    // SAFETY: flushes the console before the power goes.
    unsafe { libc::tcdrain(1) };
    if task == "paging" {
        // The host reads its counters before the guest's memory is gone.
        let _ = stress::wait_for_line();
    }
    let _ = reboot(RebootMode::RB_POWER_OFF);
}

fn modules() -> std::io::Result<()> {
    for name in fs::read_to_string("/modules/order")?
        .lines()
        .filter(|name| !name.is_empty())
    {
        let file = File::open(format!("/modules/{name}"))?;
        // A module without a device here, or one that is loaded already, is no error.
        let _ = nix::kmod::finit_module(&file, c"", nix::kmod::ModuleInitFlags::empty());
    }
    Ok(())
}

/// A buffer that direct I/O accepts.
fn aligned(bytes: usize) -> &'static mut [u8] {
    let layout = Layout::from_size_align(bytes, DISK_BLOCK).expect("a power of two");
    // SAFETY: the layout has a size; the memory is never freed, initialised here, and owned by the slice
    // alone.
    unsafe {
        let start = alloc(layout);
        assert!(!start.is_null());
        start.write_bytes(0x5a, bytes);
        std::slice::from_raw_parts_mut(start, bytes)
    }
}

/// Waits until the first disk is there.
fn wait_for_disk() -> std::io::Result<()> {
    let deadline = Instant::now() + Duration::from_secs(10);
    while !fs::exists("/dev/vda")? && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

fn disk() -> std::io::Result<String> {
    wait_for_disk()?;
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_DIRECT)
        .open("/dev/vda")?;
    let run = aligned(DISK_RUN);
    let rate = |start: Instant| BULK_BYTES as f64 / start.elapsed().as_secs_f64() / 1e6;
    let start = Instant::now();
    for offset in (0..BULK_BYTES).step_by(DISK_RUN) {
        file.write_all_at(run, offset as u64)?;
    }
    let write = rate(start);
    let start = Instant::now();
    for offset in (0..BULK_BYTES).step_by(DISK_RUN) {
        file.read_exact_at(run, offset as u64)?;
    }
    let read = rate(start);
    let block = aligned(DISK_BLOCK);
    let blocks = BULK_BYTES / DISK_BLOCK;
    let mut seed = 12_345_u64;
    let mut rate = |write: bool, random: bool| -> std::io::Result<f64> {
        let start = Instant::now();
        let mut count = 0usize;
        while start.elapsed() < ONE_AT_A_TIME {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let at = if random { (seed >> 33) as usize } else { count };
            let offset = (at % blocks * DISK_BLOCK) as u64;
            if write {
                file.write_all_at(block, offset)?;
            } else {
                file.read_exact_at(block, offset)?;
            }
            count += 1;
        }
        Ok(count as f64 / start.elapsed().as_secs_f64())
    };
    let sequential_read = rate(false, false)?;
    let sequential_write = rate(true, false)?;
    let random_read = rate(false, true)?;
    let random_write = rate(true, true)?;
    Ok(format!(
        "{{\"write_mb_s\":{write},\"read_mb_s\":{read},\"sequential_read_iops\":{sequential_read},\
         \"sequential_write_iops\":{sequential_write},\"random_read_iops\":{random_read},\
         \"random_write_iops\":{random_write}}}"
    ))
}

/// Calls a program of busybox.
fn busybox(program: &str, arguments: &[&str]) -> std::io::Result<()> {
    let mut command = Command::new("/bin/busybox");
    let status = command
        .arg(program)
        .args(arguments)
        .stdout(Stdio::null())
        .status()?;
    if !status.success() {
        return Err(std::io::Error::other(format!(
            "{program} {arguments:?}: {status}"
        )));
    }
    Ok(())
}

/// Waits for the card, and gives it an address.
fn configure(address: &str, mtu: &str) -> std::io::Result<()> {
    let deadline = Instant::now() + Duration::from_secs(10);
    while !fs::exists("/sys/class/net/eth0")? && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(5));
    }
    for arguments in [
        ["addr", "add", address, "dev", "eth0"].as_slice(),
        &["link", "set", "eth0", "mtu", mtu, "up"],
    ] {
        busybox("ip", arguments)?;
    }
    Ok(())
}

fn net() -> std::io::Result<String> {
    configure("10.77.0.2/24", "1500")?;
    let mut stream = TcpStream::connect("10.77.0.1:5077")?;
    let (send, receive) = exchange::call(&mut stream)?;
    Ok(format!("{{\"send_mbit_s\":{send},\"receive_mbit_s\":{receive}}}"))
}

/// Exchanges bytes with another guest. The one without a peer waits for the other's call.
fn pair(cmdline: &str) -> std::io::Result<String> {
    const PORT: u16 = 5078;
    let word = |name: &str| {
        let mut words = cmdline.split_whitespace();
        words.find_map(|word| word.strip_prefix(name)?.strip_prefix('='))
    };
    let missing = || std::io::Error::other("bench.address and bench.mtu are missing");
    let address = word("bench.address").ok_or_else(missing)?;
    configure(address, word("bench.mtu").ok_or_else(missing)?)?;
    let Some(peer) = word("bench.peer") else {
        let listener = TcpListener::bind(("0.0.0.0", PORT))?;
        println!("BENCH listening");
        let (mut stream, _) = listener.accept()?;
        exchange::answer(&mut stream)?;
        exchange::echo(&mut stream)?;
        return Ok(String::from("{}"));
    };
    let mut stream = TcpStream::connect((peer, PORT))?;
    let (send, receive) = exchange::call(&mut stream)?;
    let round_trip = exchange::round_trips(&mut stream)?;
    Ok(format!(
        "{{\"send_mbit_s\":{send},\"receive_mbit_s\":{receive},\"round_trip_us\":{round_trip}}}"
    ))
}
