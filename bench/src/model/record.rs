//! The input: faults of programs and their phases, the stalls of a VM, and the parts of a fault on this
//! machine.

use bench::Outcome;
use bench::tables::median;
use serde::Deserialize;

/// The used part of `bench/results/dsm.json`.
#[derive(Debug, Deserialize)]
pub struct Measured {
    runs: Vec<MeasuredRun>,
}

#[derive(Debug, Deserialize)]
struct MeasuredRun {
    bare_fault_same_cpu_us: f64,
    bare_request_polling_us: f64,
    faults: Vec<MeasuredFault>,
}

#[derive(Debug, Deserialize)]
struct MeasuredFault {
    kind: String,
    median_us: f64,
}

/// Parts of a fault on this machine, microseconds.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct Costs {
    /// All of a stall but its messages.
    pub local_us: f64,
    /// The part of that which the replying node does.
    pub serve_us: f64,
    /// One message over the loopback, software of both ends.
    pub message_us: f64,
}

/// Content of `bench/results/dsm-stalls.json`.
#[derive(Debug, Deserialize)]
pub struct Stalls {
    /// A record for each number of nodes.
    pub records: Vec<Record>,
}

/// Output of `mirrorball dsm bench --kernels --phases --json`.
#[derive(Debug, Deserialize)]
pub struct Record {
    pub programs: Vec<Program>,
}

/// A program of the bench, with its runs.
#[derive(Debug, Deserialize)]
pub struct Program {
    pub kernel: String,
    pub size: u32,
    pub runs: Vec<Run>,
}

/// A run on one node, and one on several.
#[derive(Clone, Debug, Deserialize)]
pub struct Run {
    pub alone_cpu_us: f64,
    pub nodes: Vec<Node>,
}

/// One of several nodes.
#[derive(Clone, Debug, Deserialize)]
pub struct Node {
    pub messages: u64,
    pub pages: u64,
    pub invalidated: u64,
    /// Each: CPU, us; faults for reading, writing and upgrades; the same four while it had a lock.
    pub phases: Vec<[u64; 8]>,
}

/// `bench/results/dsm-compile.json`: the waits of builds in VMs over several nodes.
#[derive(Debug, Deserialize)]
pub struct Builds {
    /// Time of the build on one CPU outside of VMs, seconds.
    pub alone_s: f64,
    /// The part of that which several CPUs do together.
    pub parallel: f64,
    builds: Vec<RecordedBuild>,
}

#[derive(Debug, Deserialize)]
pub struct RecordedBuild {
    /// CPUs of each node.
    pub cpus: u32,
    before: Heat,
    after: Heat,
}

/// The used part of the output of `mirrorball heat VM --json`.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct Heat {
    pub shards: Vec<Shard>,
}

/// A node of a VM's memory.
#[derive(Clone, Copy, Debug, Deserialize)]
pub struct Shard {
    pub faults: Faults,
    pub messages: u64,
    pub pages: u64,
}

/// Its waits, by kind.
#[derive(Clone, Copy, Debug, Deserialize)]
pub struct Faults {
    pub read: Count,
    pub write: Count,
    pub upgrade: Count,
}

/// A number of waits.
#[derive(Clone, Copy, Debug, Deserialize)]
pub struct Count {
    pub count: u64,
}

impl Measured {
    /// Medians over runs; none without runs and read fetches.
    pub fn costs(&self) -> Option<Costs> {
        let of = |what: fn(&MeasuredRun) -> Option<f64>| {
            median(&self.runs.iter().filter_map(what).collect::<Vec<f64>>())
        };
        let fetch_us = of(|run| {
            let fault = run.faults.iter().find(|fault| fault.kind == "read fetch");
            fault.map(|fault| fault.median_us)
        })?;
        let request_us = of(|run| Some(run.bare_request_polling_us))?;
        let fault_us = of(|run| Some(run.bare_fault_same_cpu_us))?;
        let local_us = (fetch_us - request_us).max(0.0);
        Some(Costs {
            local_us,
            serve_us: (local_us - fault_us).max(0.0),
            message_us: request_us / 2.0,
        })
    }
}

impl Builds {
    /// Each build, with its counts.
    ///
    /// # Errors
    /// If the record contradicts itself.
    pub fn each(&self) -> Outcome<Vec<(&RecordedBuild, Heat)>> {
        if !(self.alone_s > 0.0 && (0.0..=1.0).contains(&self.parallel)) {
            return Err("`alone_s` is more than 0, and `parallel` from 0 to 1; record it again".into());
        }
        let mut each = Vec::with_capacity(self.builds.len());
        for build in &self.builds {
            let heat = build.after.since(&build.before);
            let heat = heat.ok_or("`before` is not of the same VM before `after`; record both again")?;
            if heat.shards.len() < 2 {
                return Err("a VM of one shard has no waits; record one of two".into());
            }
            each.push((build, heat));
        }
        Ok(each)
    }
}

impl Heat {
    /// The counts since `before`; none if that has other shards.
    pub fn since(&self, before: &Self) -> Option<Self> {
        let less = |now: Count, before: Count| {
            Some(Count {
                count: now.count.checked_sub(before.count)?,
            })
        };
        let shard = |(now, before): (&Shard, &Shard)| {
            Some(Shard {
                faults: Faults {
                    read: less(now.faults.read, before.faults.read)?,
                    write: less(now.faults.write, before.faults.write)?,
                    upgrade: less(now.faults.upgrade, before.faults.upgrade)?,
                },
                messages: now.messages.checked_sub(before.messages)?,
                pages: now.pages.checked_sub(before.pages)?,
            })
        };
        if self.shards.len() != before.shards.len() {
            return None;
        }
        let shards: Option<Vec<Shard>> = self.shards.iter().zip(&before.shards).map(shard).collect();
        Some(Self { shards: shards? })
    }
}
