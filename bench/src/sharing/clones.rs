//! Clones of an idle VM of the image `debian-12`: the pause of the parent, the time until all answer, and the
//! host's memory that each takes; beside a start from cold.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::{Options, Outcome, host};

const PARENT: &str = "clones-parent";
const MEMORY: &str = "512M";
const BOOT_LIMIT: Duration = Duration::from_secs(180);

/// One call of `mirrorball clone`.
#[derive(Debug, Serialize)]
struct Row {
    clones: usize,
    /// From the parent's start to its first answer to `exec`.
    cold_boot_s: f64,
    /// Time from the command until all clones run and have their own identity, and so have answered.
    all_answer_s: f64,
    /// The pause of the parent.
    pause_ms: f64,
    /// Free memory that the host lost, for each clone, in MB (10^6 bytes).
    mb_each: f64,
}

#[derive(Serialize)]
struct Report<'a> {
    machine: &'a str,
    memory: &'static str,
    rows: &'a [Row],
}

/// Makes 1, 10, 50 clones (the counts), each time of a new parent; prints a table and writes the JSON.
pub fn clones(options: &Options) -> Outcome<()> {
    let mut rows = Vec::new();
    for count in &options.counts {
        for _ in 0..options.runs {
            let row = sample(options, *count)?;
            eprintln!("bench-sharing: {row:?}");
            rows.push(row);
            let report = Report {
                machine: &options.machine,
                memory: MEMORY,
                rows: &rows,
            };
            std::fs::write(&options.out, serde_json::to_string_pretty(&report)? + "\n")?;
        }
    }
    println!("{}\n", options.machine);
    println!("| clones | cold boot, s | all answer, s | of a cold boot | parent still, ms | MB each |");
    println!("| --- | --- | --- | --- | --- | --- |");
    for row in &rows {
        println!(
            "| {} | {:.1} | {:.2} | {:.3} | {:.0} | {:.1} |",
            row.clones,
            row.cold_boot_s,
            row.all_answer_s,
            row.all_answer_s / row.cold_boot_s,
            row.pause_ms,
            row.mb_each
        );
    }
    Ok(())
}

fn sample(options: &Options, count: usize) -> Outcome<Row> {
    let mut vms = Vms {
        options,
        names: vec![PARENT.to_owned()],
    };
    let start = Instant::now();
    let words = [
        "run",
        "-d",
        "--lab",
        "never",
        "--image",
        "debian-12",
        "--name",
        PARENT,
    ];
    vms.call(&[&words[..], &["--memory", MEMORY, "--net", "none"]].concat())?;
    while vms.call(&["exec", PARENT, "--", "true"]).is_err() {
        if start.elapsed() > BOOT_LIMIT {
            return Err(format!("{PARENT} does not answer after {BOOT_LIMIT:?}").into());
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    let cold_boot_s = start.elapsed().as_secs_f64();
    // Until its services have started and the pages that it read are shared or not.
    let before = host::settle(Duration::from_secs(10), Duration::from_secs(90))?;
    let start = Instant::now();
    let (names, told) = vms.call(&["clone", PARENT, "--count", &count.to_string()])?;
    let all_answer_s = start.elapsed().as_secs_f64();
    vms.names.extend(names.lines().map(str::to_owned));
    let with = host::settle(Duration::from_secs(10), Duration::from_secs(90))?;
    Ok(Row {
        clones: count,
        cold_boot_s,
        all_answer_s,
        pause_ms: told
            .split_once("stood still for ")
            .and_then(|(_, rest)| rest.split(' ').next()?.parse().ok())
            .ok_or("clone does not say how long its parent stood still")?,
        mb_each: before.saturating_sub(with) as f64 / 1e6 / count as f64,
    })
}

/// Running VMs. Killed when dropped.
struct Vms<'a> {
    options: &'a Options,
    names: Vec<String>,
}

impl Vms<'_> {
    /// Calls Mirrorball; returns its output on stdout and stderr.
    fn call(&self, words: &[&str]) -> Outcome<(String, String)> {
        let output = Command::new(&self.options.mirrorball)
            .args(words)
            .stdin(Stdio::null())
            .output()?;
        let [said, told] =
            [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
        if output.status.success() {
            Ok((said, told))
        } else {
            Err(format!("mirrorball {}: {}", words[0], told.trim()).into())
        }
    }
}

impl Drop for Vms<'_> {
    fn drop(&mut self) {
        for name in &self.names {
            let _ = self.call(&["kill", name]);
        }
    }
}
