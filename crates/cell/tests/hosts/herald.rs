//! Replacement for the parts of a VM that checks their connections. Each shard sends on every connection
//! which one it is, and reports the received texts to its monitor.

use std::fs::File;
use std::io::{Read, Write};
use std::process::ExitCode;

use nix::sys::resource::{Resource, getrlimit};
use serde_json::{Value, json};
use shard::launch::{Answer, CoherenceLaunch, Ending, Fd, Launch, OrderId, Report};
use shard_api::control::{ControlSocket, ORDER_BYTES_MAX};

/// A VM whose parts are heralds.
pub const NAME: &str = "herald";
/// Bytes of each text.
const BYTES: usize = 64;

/// One connection of a shard.
pub struct Heard {
    socket: File,
    lane: usize,
    kind: &'static str,
    other: usize,
}

/// All connections of a shard, by lane and by other shard; `take` returns a file.
pub fn connections(launch: &CoherenceLaunch, mut take: impl FnMut(Fd) -> File) -> Vec<Heard> {
    let mut all = Vec::new();
    for (lane, row) in launch.lanes.iter().enumerate() {
        let sockets = row.iter().enumerate();
        for (other, sockets) in sockets.filter_map(|(other, sockets)| Some((other, (*sockets)?))) {
            for (kind, fd) in [("control", sockets.control), ("bulk", sockets.bulk)] {
                let socket = take(fd);
                all.push(Heard {
                    socket,
                    lane,
                    kind,
                    other,
                });
            }
        }
    }
    all
}

/// The text that a connection from the other shard must carry.
pub fn expected(boot: u64, one: &Heard, shard: usize) -> String {
    text(boot, one, one.other, shard)
}

fn text(boot: u64, one: &Heard, from: usize, to: usize) -> String {
    format!("boot {boot} lane {} {} from {from} to {to}", one.lane, one.kind)
}

/// Sends on each connection which one it is.
pub fn say(boot: u64, all: &[Heard], shard: usize) {
    for one in all {
        let said = text(boot, one, shard, one.other);
        let said = format!("{said:BYTES$}");
        (&one.socket).write_all(said.as_bytes()).expect("a connection");
    }
}

/// The text that each connection carries.
pub fn hear(all: &[Heard]) -> Vec<String> {
    let one = |one: &Heard| {
        let mut bytes = [0; BYTES];
        (&one.socket).read_exact(&mut bytes).expect("a connection");
        String::from_utf8_lossy(&bytes).trim_end().to_owned()
    };
    all.iter().map(one).collect()
}

/// Runs as one of its shards, until it receives an order. The start of the guest's kernel stands for the
/// boot.
pub fn run(control: &ControlSocket) -> ExitCode {
    let (launch, mut files) = shard::process::receive_launch(control).expect("a launch");
    let Launch::Secondary(part) = launch else {
        panic!("a part");
    };
    let launch = part.span.coherence.expect("coherent memory");
    let (boot, shard) = (launch.kernel.start, usize::from(part.span.shard));
    let device = launch
        .userfaultfd
        .map(|fd| files.take(fd).expect("a file").metadata().is_ok());
    let all = connections(&launch, |fd| files.take(fd).expect("a file"));
    let report = |report: Report| control.send(&report, &[]).expect("a monitor");
    report(Report::Running {
        sandbox_missing: Vec::new(),
        versions: urpc::version::Versions::FIRST,
        sandbox_notes: Vec::new(),
    });
    say(boot, &all, shard);
    let heard = hear(&all);
    let expected: Vec<String> = all.iter().map(|one| expected(boot, one, shard)).collect();
    let (_, priority) = getrlimit(Resource::RLIMIT_RTPRIO).expect("a limit");
    let status: Value = json!({
        "heard": heard,
        "expected": expected,
        "names": launch.names,
        "kernel": launch.kernel,
        "device": device,
        "priority": priority,
    });
    report(Report::Answer {
        to: OrderId::default(),
        answer: Answer::Status(status),
    });
    let order = control
        .receive_packet(ORDER_BYTES_MAX)
        .map(|order| order.is_some());
    assert!(matches!(order, Ok(true)), "{order:?}");
    report(Report::Ended(Ending::Quit));
    ExitCode::SUCCESS
}
