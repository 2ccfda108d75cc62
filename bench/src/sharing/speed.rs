//! Speed of one guest's reads of a disk on an ext4 file system in the host's memory: when the host has not
//! cached it, when it has, and when the guest reads again after it has dropped its own cache.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde::Serialize;

use crate::guests::{Guests, Read};
use crate::measure::Runtime;
use crate::{Options, Outcome, host, stage};

const READ_MB: f64 = (150 << 20) as f64 / 1e6;

#[derive(Serialize)]
struct Row {
    kind: String,
    /// Speed of the reads in MB (10^6 bytes) per second, the host's page cache dropped before.
    cold_mb_s: Vec<f64>,
    /// That of the next guest.
    warm_mb_s: Vec<f64>,
    /// That of the same guest, after it has dropped its own cache.
    again_mb_s: Vec<f64>,
}

#[derive(Serialize)]
struct Report<'a> {
    machine: &'a str,
    rows: &'a [Row],
}

/// Times all kinds in turn, `runs` times; prints medians and writes the JSON.
pub fn speed(options: &Options) -> Outcome<()> {
    let runtime = Runtime::new()?;
    let disk = Disk::new(&options.folder)?;
    let mut rows: Vec<Row> = options
        .kinds
        .iter()
        .map(|kind| Row {
            kind: kind.name(),
            cold_mb_s: Vec::new(),
            warm_mb_s: Vec::new(),
            again_mb_s: Vec::new(),
        })
        .collect();
    for run in 0..options.runs {
        for (kind, row) in options.kinds.iter().zip(&mut rows) {
            host::drop_caches(true)?;
            let start = |words: &str| -> Outcome<Read> {
                let mut guests = Guests::start(
                    kind,
                    1,
                    &disk.files(),
                    &options.mirrorball,
                    &runtime.folder,
                    words,
                )?;
                guests.wait()?.first().copied().ok_or_else(|| "no answer".into())
            };
            let cold: Read = start("")?;
            let warm: Read = start("again")?;
            let again_s = warm.again_s.ok_or("the guest has not read again")?;
            let speeds = [cold.first_s, warm.first_s, again_s].map(|seconds| READ_MB / seconds);
            let rows = [&mut row.cold_mb_s, &mut row.warm_mb_s, &mut row.again_mb_s];
            rows.into_iter()
                .zip(speeds)
                .for_each(|(row, speed)| row.push(speed));
            eprintln!("bench-sharing: run {run}, {}: {speeds:.0?} MB/s", row.kind);
        }
        let report = Report {
            machine: &options.machine,
            rows: &rows,
        };
        std::fs::write(&options.out, serde_json::to_string_pretty(&report)? + "\n")?;
    }
    println!(
        "{}\n\n| reads of 150 MiB, MB/s | cold | warm | again |\n| --- | --- | --- | --- |",
        options.machine
    );
    for row in &rows {
        println!(
            "| {} | {:.0} | {:.0} | {:.0} |",
            row.kind,
            median(&row.cold_mb_s),
            median(&row.warm_mb_s),
            median(&row.again_mb_s)
        );
    }
    Ok(())
}

/// A file system in memory, with a page cache as that of a disk. Unmounted when dropped.
struct Disk(PathBuf);

impl Disk {
    /// Makes one with the guests' files.
    fn new(folder: &Path) -> Outcome<Self> {
        let disk = Self(PathBuf::from(format!("/run/bench-speed-{}", std::process::id())));
        let [memory, place] = ["memory", "place"].map(|name| disk.0.join(name));
        fs::create_dir_all(&memory)?;
        fs::create_dir_all(&place)?;
        host::mount(&["-t", "tmpfs", "none", &memory.display().to_string()])?;
        let whole = memory.join("disk");
        fs::File::create(&whole)?.set_len(2 * stage::DISK_BYTES)?;
        let made = Command::new("mke2fs")
            .args(["-q", "-F", "-t", "ext4", "-b", "4096"])
            .arg(&whole)
            .status()?;
        if !made.success() {
            return Err(format!("mke2fs: {made}").into());
        }
        host::mount(&[
            "-o",
            "loop",
            &whole.display().to_string(),
            &place.display().to_string(),
        ])?;
        for file in fs::read_dir(stage::files(folder))? {
            let file = file?;
            fs::copy(file.path(), place.join(file.file_name()))?;
        }
        Ok(disk)
    }

    fn files(&self) -> PathBuf {
        self.0.join("place")
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        for name in ["place", "memory"] {
            let _ = Command::new("umount").arg("-l").arg(self.0.join(name)).status();
        }
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// The lower one of two in the middle.
fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted
        .get(sorted.len().saturating_sub(1) / 2)
        .copied()
        .unwrap_or(f64::NAN)
}
