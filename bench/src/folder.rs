//! A guest's accesses to a folder of the host, which it mounts by the tag `data`.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Result};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::time::Instant;

use nix::mount::{MsFlags, mount};
use serde_json::json;

use crate::{DISK_BLOCK, DISK_RUN, ONE_AT_A_TIME, aligned};

const PLACE: &str = "/data";
/// Number of files that are made, looked at and removed.
const FILES: usize = 1000;

/// Mounts the folder and measures; returns the figures as JSON.
pub fn run() -> Result<String> {
    fs::create_dir_all(PLACE)?;
    mount(
        Some("data"),
        PLACE,
        Some("virtiofs"),
        MsFlags::empty(),
        None::<&str>,
    )?;
    let read = sequential_read()?;
    let random = random_read()?;
    let [create, stat, unlink] = metadata()?;
    Ok(json!({
        "read_mb_s": read,
        "random_read_iops": random,
        "creates_s": create,
        "stats_s": stat,
        "unlinks_s": unlink,
    })
    .to_string())
}

/// Forgets files' data, names and attributes in this guest.
fn forget() -> Result<()> {
    fs::write("/proc/sys/vm/drop_caches", "3")
}

/// Rate of a read of the whole file, MB/s.
fn sequential_read() -> Result<f64> {
    forget()?;
    let mut file = File::open(format!("{PLACE}/file"))?;
    let run = aligned(DISK_RUN);
    let (start, mut bytes) = (Instant::now(), 0);
    loop {
        match file.read(run)? {
            0 => break,
            count => bytes += count,
        }
    }
    Ok(bytes as f64 / start.elapsed().as_secs_f64() / 1e6)
}

/// Rate of reads of one block each, past the guest's cache.
fn random_read() -> Result<f64> {
    let path = format!("{PLACE}/file");
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_DIRECT)
        .open(path)?;
    let blocks = file.metadata()?.len() as usize / DISK_BLOCK;
    let block = aligned(DISK_BLOCK);
    let (start, mut count, mut seed) = (Instant::now(), 0_usize, 12_345_u64);
    while start.elapsed() < ONE_AT_A_TIME {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let at = (seed >> 33) as usize % blocks;
        file.read_exact_at(block, (at * DISK_BLOCK) as u64)?;
        count += 1;
    }
    Ok(count as f64 / start.elapsed().as_secs_f64())
}

/// Rates at which files are made, looked at and removed.
fn metadata() -> Result<[f64; 3]> {
    let folder = format!("{PLACE}/many");
    fs::create_dir(&folder)?;
    let names: Vec<_> = (0..FILES).map(|number| format!("{folder}/{number}")).collect();
    let rate = |of_one: &dyn Fn(&String) -> Result<()>| -> Result<f64> {
        let start = Instant::now();
        names.iter().try_for_each(of_one)?;
        Ok(FILES as f64 / start.elapsed().as_secs_f64())
    };
    let create = rate(&|name| File::create(name).map(drop))?;
    forget()?;
    let stat = rate(&|name| fs::symlink_metadata(name).map(drop))?;
    let unlink = rate(&|name| fs::remove_file(name))?;
    fs::remove_dir(&folder)?;
    Ok([create, stat, unlink])
}
