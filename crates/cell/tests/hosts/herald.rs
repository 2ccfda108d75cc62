//! What stands in for the parts of a VM where it is told what their connections are. Each shard says on all
//! of them what it takes them for, and its monitor is told what it has heard.

use std::fs::File;
use std::io::{Read, Write};
use std::process::ExitCode;

use nix::sys::resource::{Resource, getrlimit};
use serde_json::{Value, json};
use shard::launch::{Answer, CoherenceLaunch, Ending, Fd, Launch, OrderId, Report};
use shard_api::control::{ControlSocket, ORDER_BYTES_MAX};

/// A VM whose parts are heralds.
pub const NAME: &str = "herald";
/// Bytes of all that is said.
const BYTES: usize = 64;

/// One connection of a shard.
pub struct Heard {
    socket: File,
    lane: usize,
    kind: &'static str,
    other: usize,
}

/// All that a shard has, by lane, by other shard; `take` gives a file.
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

/// What is heard on a connection from the other shard, if it is the right one.
pub fn expected(boot: u64, one: &Heard, shard: usize) -> String {
    text(boot, one, one.other, shard)
}

fn text(boot: u64, one: &Heard, from: usize, to: usize) -> String {
    format!("boot {boot} lane {} {} from {from} to {to}", one.lane, one.kind)
}

/// Says on all what they are.
pub fn say(boot: u64, all: &[Heard], shard: usize) {
    for one in all {
        let said = text(boot, one, shard, one.other);
        let said = format!("{said:BYTES$}");
        (&one.socket).write_all(said.as_bytes()).expect("a connection");
    }
}

/// What comes on each.
pub fn hear(all: &[Heard]) -> Vec<String> {
    let one = |one: &Heard| {
        let mut bytes = [0; BYTES];
        (&one.socket).read_exact(&mut bytes).expect("a connection");
        String::from_utf8_lossy(&bytes).trim_end().to_owned()
    };
    all.iter().map(one).collect()
}

/// Is one of its shards, until it is given an order. Where the guest's kernel begins stands for the boot.
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
