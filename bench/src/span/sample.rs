//! All figures of one VM of one kind.

use std::time::Instant;

use bench::Outcome;
use bench::mirrorball::Cluster;
use serde_json::Value;

use crate::environment::Environment;
use crate::exits::Exits;
use crate::kinds::Kind;
use crate::vm::Vm;

/// In a file system in memory, since disks are not compared (as in vNUMA, USENIX ATC '09, section 5.3).
const UNPACK: &str = "mkdir /dev/shm/b && cd /dev/shm/b && tar xf /dev/vdb --strip-components=1";
const CLEAN: &str = "cd /dev/shm/b && make -s clean >/dev/null 2>&1";
const COMPILE: &str = "cd /dev/shm/b && \
                       make -s -j4 CFLAGS='-O0 -D_FILE_OFFSET_BITS=64' bzip2 >log 2>&1 || \
                       { tail log >&2; exit 1; }";
/// Compilations that count. The one before them reads the compiler from the disk.
const COMPILES: usize = 3;
/// The vCPU that is moved, at first in the second cell, and the number of its moves to the first one and
/// back.
const MOVED: u8 = 3;
const MOVES: usize = 10;

/// One VM's figures.
#[derive(Debug, Default)]
pub struct Sample {
    /// Time until the agent answers, seconds.
    pub answer_s: f64,
    /// Output of the guest's program.
    pub guest: Value,
    /// Time of each compilation, seconds by the host's clock.
    pub compile_s: Vec<f64>,
    /// Exits from the start until all services run.
    pub start_exits: Exits,
    /// Exits of each compilation.
    pub compile_exits: Vec<Exits>,
    /// Pause of each move of a vCPU while the guest had nothing to do, microseconds.
    pub idle_moves_us: Vec<f64>,
    /// The same while all vCPUs interrupted one another.
    pub storm_moves_us: Vec<f64>,
}

/// Takes all figures.
pub fn take(environment: &Environment, kind: Kind) -> Outcome<Sample> {
    let _cluster = cluster(environment, kind)?;
    let vm = Vm::start(environment, kind)?;
    let mut sample = Sample {
        answer_s: vm.answers_s()?,
        start_exits: vm.exits()?,
        guest: vm.figures()?,
        ..Sample::default()
    };
    let shell = |script: &str| vm.exec(&["/bin/sh", "-c", script]);
    shell(UNPACK)?;
    shell(COMPILE)?;
    for _ in 0..COMPILES {
        shell(CLEAN)?;
        let before = vm.exits()?;
        let start = Instant::now();
        shell(COMPILE)?;
        sample.compile_s.push(start.elapsed().as_secs_f64());
        sample.compile_exits.push(vm.exits()?.since(&before));
    }
    if kind == Kind::Two {
        sample.idle_moves_us = moves(&vm)?;
        sample.storm_moves_us = vm.in_storm(|| moves(&vm))?;
    }
    Ok(sample)
}

/// This host as the cells of the kind.
fn cluster(environment: &Environment, kind: Kind) -> Outcome<Cluster<'_>> {
    Cluster::up(&environment.mirrorball, &["--cells", &kind.cells().to_string()])
}

/// Starts a VM and ends it.
pub fn boot(environment: &Environment, kind: Kind) -> Outcome<()> {
    let _cluster = cluster(environment, kind)?;
    let vm = Vm::start(environment, kind)?;
    vm.answers_s()?;
    Ok(())
}

/// Moves a vCPU away and back; returns each pause, microseconds.
fn moves(vm: &Vm) -> Outcome<Vec<f64>> {
    (0..2 * MOVES)
        .map(|number| vm.move_us(MOVED, (number % 2) as u16))
        .collect()
}
