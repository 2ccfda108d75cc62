//! Disco's experiment (SOSP '97, section 5.3, Figure 6): eight builds of a C program at once, in 1, 2, 4 and
//! 8 VMs and on the bare host; the memory in the VMs' view (V), the memory that they take of the host (M),
//! and the time.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde::Serialize;
use serde_json::Value;

use crate::kinds::Kind;
use crate::{Options, Outcome, host};

/// Files of the folder: the image's root file system and the program's source.
const ROOT: &str = "root.raw";
const SOURCE: &str = "bzip2.tar";
const BUILDS: usize = 8;
/// Memory of all VMs together.
const MEMORY_MIB: usize = 2048;
const STEP: Duration = Duration::from_secs(5);
const LIMIT: Duration = Duration::from_secs(900);

/// One run. Bytes are those of the moment when the host spent most.
#[derive(Debug, Default, Serialize)]
struct Run {
    what: String,
    vms: usize,
    seconds: f64,
    /// Memory of the VMs, each counted by itself: V.
    virtual_bytes: u64,
    /// The host's memory that they take: M.
    machine_bytes: u64,
    /// `mirrorball mem`'s total at that moment, for the classes.
    total: Value,
    /// Pages of the images in the host's page cache that no VM maps; in neither V nor M.
    files_unmapped_bytes: u64,
    /// CPU time of the threads that share memory.
    sharing_cpu_s: f64,
    /// On the bare host: the drop of free memory.
    bare_bytes: Option<u64>,
}

#[derive(Serialize)]
struct Report<'a> {
    machine: &'a str,
    builds: usize,
    runs: &'a [Run],
}

/// Runs all, prints a table, writes the JSON.
pub fn builds(options: &Options) -> Outcome<()> {
    let mut runs = vec![bare(&options.folder)?];
    for count in &options.counts {
        for kind in &options.kinds {
            let Kind::MirrorballShare(policy) = kind else {
                return Err(format!("{} does not build", kind.name()).into());
            };
            for _ in 0..options.runs {
                let run = in_vms(options, policy, *count)?;
                eprintln!(
                    "bench-sharing: {}, {} VMs: {:.1} s, V {:.0} MB, M {:.0} MB",
                    run.what,
                    run.vms,
                    run.seconds,
                    run.virtual_bytes as f64 / 1e6,
                    run.machine_bytes as f64 / 1e6
                );
                runs.push(run);
                let report = Report {
                    machine: &options.machine,
                    builds: BUILDS,
                    runs: &runs,
                };
                fs::write(&options.out, serde_json::to_string_pretty(&report)? + "\n")?;
            }
        }
    }
    println!("{}\n", options.machine);
    println!(
        "| {BUILDS} builds | VMs | s | V, MB | M, MB | M/V | CPU for sharing, s |\n\
         | --- | --- | --- | --- | --- | --- | --- |"
    );
    for run in &runs {
        let mb = |bytes: u64| format!("{:.0}", bytes as f64 / 1e6);
        let [v, m, part] = match run.bare_bytes {
            Some(bytes) => [String::new(), mb(bytes), String::new()],
            None => [
                mb(run.virtual_bytes),
                mb(run.machine_bytes),
                format!(
                    "{:.2}",
                    run.machine_bytes as f64 / run.virtual_bytes.max(1) as f64
                ),
            ],
        };
        println!(
            "| {} | {} | {:.1} | {v} | {m} | {part} | {:.1} |",
            run.what, run.vms, run.seconds, run.sharing_cpu_s
        );
    }
    Ok(())
}

/// A shell's commands for `count` builds at once of the source in `tar`; fails if one does.
fn script(count: usize, tar: &str) -> String {
    format!(
        "mkdir -p /root/b && cd /root/b || exit 1; pids=; for i in $(seq {count}); do \
         (mkdir $i && cd $i && tar xf {tar} --strip-components=1 && \
         make -s CFLAGS='-O0 -D_FILE_OFFSET_BITS=64' bzip2 >log 2>&1 && ./bzip2 --help >/dev/null 2>&1) & \
         pids=\"$pids $!\"; done; for pid in $pids; do wait $pid || exit 1; done"
    )
}

fn in_vms(options: &Options, policy: &str, count: usize) -> Outcome<Run> {
    host::drop_caches(true)?;
    let source = options.folder.join(SOURCE);
    let cpus = (host_cpus() / count).max(1);
    let start = Instant::now();
    let mut command = Command::new(&options.mirrorball);
    command
        .args([
            "run",
            "--lab",
            "never",
            "--image",
            "debian-12",
            "--name",
            "build",
            "--net",
            "none",
        ])
        .args([
            "--count",
            &count.to_string(),
            "--cpus",
            &cpus.to_string(),
            "--share",
            policy,
        ])
        .args(["--memory", &format!("{}M", MEMORY_MIB / count), "--disk"])
        .arg(source)
        .args(["--", "/bin/sh", "-c", &script(BUILDS.div_ceil(count), "/dev/vdb")])
        .stdin(Stdio::null())
        .stdout(Stdio::null());
    let mut run = Run {
        what: format!("share = \"{policy}\""),
        vms: count,
        ..Run::default()
    };
    let mut child = command.spawn()?;
    let mut sharing_ns = BTreeMap::new();
    finish(&mut child, start, || {
        sharing_ns.extend(host::sharing_ns());
        let output = Command::new(&options.mirrorball)
            .args(["mem", "--json"])
            .output()?;
        // Between the last VM's end and the command's there is nothing to record.
        if let Ok(known) = serde_json::from_slice::<Value>(&output.stdout) {
            note(&mut run, &known);
        }
        Ok(())
    })?;
    run.seconds = start.elapsed().as_secs_f64();
    run.sharing_cpu_s = sharing_ns.into_values().sum::<u64>() as f64 / 1e9;
    Ok(run)
}

/// Keeps the report of `mirrorball mem` if the host spent more than at any time before.
fn note(run: &mut Run, known: &Value) {
    let total = &known["total"];
    let bytes = |name: &str| total[name].as_u64().unwrap_or(0);
    if bytes("host_bytes") <= run.machine_bytes {
        return;
    }
    run.machine_bytes = bytes("host_bytes");
    // Each VM by itself has all of the shared pages that it maps, not its part of them.
    run.virtual_bytes = run.machine_bytes - bytes("base_bytes") - bytes("clone_bytes")
        + bytes("base_resident_bytes")
        + bytes("clone_resident_bytes");
    run.files_unmapped_bytes = known["host"]["files_unmapped_bytes"].as_u64().unwrap_or(0);
    run.total = total.clone();
}

/// Waits for the end of `child`, with a look every few seconds.
fn finish(child: &mut Child, start: Instant, mut look: impl FnMut() -> Outcome<()>) -> Outcome<()> {
    let mut next = start + STEP;
    loop {
        if let Some(status) = child.try_wait()? {
            return if status.success() {
                Ok(())
            } else {
                Err(format!("the builds failed: {status}").into())
            };
        }
        if start.elapsed() > LIMIT {
            child.kill()?;
            child.wait()?;
            return Err(format!("the builds took more than {LIMIT:?}").into());
        }
        if Instant::now() >= next {
            look()?;
            next = Instant::now() + STEP;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// All builds under the host's own kernel, in the image's file system with changes in memory.
fn bare(folder: &Path) -> Outcome<Run> {
    host::drop_caches(true)?;
    let place = Bare::new(folder)?;
    let before = host::free_bytes()?;
    let start = Instant::now();
    let mut least = before;
    let mut child = Command::new("chroot")
        .arg(place.root())
        .args(["/bin/sh", "-c", &script(BUILDS, "/bzip2.tar")])
        .stdin(Stdio::null())
        .spawn()?;
    finish(&mut child, start, || {
        least = least.min(host::free_bytes()?);
        Ok(())
    })?;
    Ok(Run {
        what: "bare host".to_owned(),
        seconds: start.elapsed().as_secs_f64(),
        bare_bytes: Some(before.saturating_sub(least)),
        ..Run::default()
    })
}

fn host_cpus() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// The image's file system, mounted. Unmounted when dropped.
struct Bare(PathBuf);

impl Bare {
    fn new(folder: &Path) -> Outcome<Self> {
        let bare = Self(PathBuf::from(format!("/run/bench-builds-{}", std::process::id())));
        for name in ["base", "memory", "root"] {
            fs::create_dir_all(bare.0.join(name))?;
        }
        let [base, memory] = ["base", "memory"].map(|name| bare.0.join(name).display().to_string());
        let image = folder.join(ROOT).display().to_string();
        host::mount(&["-t", "tmpfs", "none", &memory])?;
        host::mount(&["-o", "loop,ro,noload", &image, &base])?;
        for name in ["upper", "work"] {
            fs::create_dir(bare.0.join("memory").join(name))?;
        }
        let layers = format!("lowerdir={base},upperdir={memory}/upper,workdir={memory}/work");
        host::mount(&[
            "-t",
            "overlay",
            "none",
            "-o",
            &layers,
            &bare.root().display().to_string(),
        ])?;
        fs::copy(folder.join(SOURCE), bare.root().join("bzip2.tar"))?;
        fs::create_dir_all(bare.root().join("dev"))?;
        host::mount(&["--bind", "/dev", &bare.root().join("dev").display().to_string()])?;
        Ok(bare)
    }

    fn root(&self) -> PathBuf {
        self.0.join("root")
    }
}

impl Drop for Bare {
    fn drop(&mut self) {
        for name in ["root/dev", "root", "base", "memory"] {
            let _ = Command::new("umount").arg("-l").arg(self.0.join(name)).status();
        }
        let _ = fs::remove_dir_all(&self.0);
    }
}
