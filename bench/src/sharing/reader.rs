//! Process 1 of a guest that reads: mounts the disk, reads its file, prints a line of JSON behind `BENCH`,
//! stays idle.
//!
//! With the word `again` on the kernel's command line it drops its page cache and reads everything a second
//! time.

use std::fs::{self, File};
use std::io::{Error, Read};
use std::path::Path;
use std::time::{Duration, Instant};

use nix::kmod::{ModuleInitFlags, finit_module};
use nix::mount::{MsFlags, mount};

const PLACE: &str = "/mnt";
const LIMIT: Duration = Duration::from_secs(10);

fn main() {
    for (kind, place) in [("proc", "/proc"), ("sysfs", "/sys"), ("devtmpfs", "/dev")] {
        // A missing folder shows when the disk is mounted.
        let _ = fs::create_dir_all(place);
        let _ = mount(Some(kind), place, Some(kind), MsFlags::empty(), None::<&str>);
    }
    match read() {
        Ok(json) => println!("BENCH {json}"),
        Err(error) => println!("BENCH {{\"error\":\"{error}\"}}"),
    }
    loop {
        std::thread::sleep(Duration::from_secs(3600));
    }
}

fn read() -> Result<String, Error> {
    modules()?;
    let (device, options) = disk()?;
    fs::create_dir_all(PLACE)?;
    mount(Some(device), PLACE, Some("ext4"), MsFlags::MS_RDONLY, options).map_err(Error::from)?;
    let file = Path::new(PLACE).join("data");
    let (sum, bytes, read_s) = read_once(&file)?;
    let mut again_s = None;
    if fs::read_to_string("/proc/cmdline")?
        .split_whitespace()
        .any(|word| word == "again")
    {
        fs::write("/proc/sys/vm/drop_caches", "1")?;
        again_s = Some(read_once(&file)?.2);
    }
    let again_s = again_s.map_or_else(|| "null".to_owned(), |seconds| seconds.to_string());
    Ok(format!(
        "{{\"device\":\"{device}\",\"bytes\":{bytes},\"sum\":\"{sum:x}\",\"read_s\":{read_s},\
         \"again_s\":{again_s}}}"
    ))
}

/// The sum over the file, its bytes, and the seconds of the read.
fn read_once(file: &Path) -> Result<(u64, usize, f64), Error> {
    let start = Instant::now();
    let mut file = File::open(file)?;
    let mut buffer = vec![0_u8; 1 << 20];
    let (mut sum, mut bytes) = (0_u64, 0_usize);
    loop {
        let count = file.read(&mut buffer)?;
        if count == 0 {
            return Ok((sum, bytes, start.elapsed().as_secs_f64()));
        }
        for word in buffer[..count].chunks_exact(8) {
            sum = sum.rotate_left(1) ^ u64::from_le_bytes(word.try_into().map_err(Error::other)?);
        }
        bytes += count;
    }
}

/// The disk, and its mount options: persistent memory past the page cache.
fn disk() -> Result<(&'static str, Option<&'static str>), Error> {
    let deadline = Instant::now() + LIMIT;
    while Instant::now() < deadline {
        if Path::new("/dev/vda").exists() {
            return Ok(("/dev/vda", None));
        }
        if Path::new("/dev/pmem0").exists() {
            return Ok(("/dev/pmem0", Some("dax")));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Err(Error::other("no disk"))
}

fn modules() -> Result<(), Error> {
    let order = fs::read_to_string("/modules/order")?;
    for name in order.lines().filter(|name| !name.is_empty()) {
        let file = File::open(format!("/modules/{name}"))?;
        // A module without a device here, or one that is loaded already, is no error.
        let _ = finit_module(&file, c"", ModuleInitFlags::empty());
    }
    Ok(())
}
