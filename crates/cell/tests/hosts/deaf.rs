//! What stands in for the shards of a VM: a home that is loaded for ever, as one that waits for a page that nobody has any more, and
//! parts that fail after a while.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use shard::launch::{Launch, Report};

/// Before the milliseconds that a part lives.
const NAME: &str = "deaf-";

/// The status with which a part leaves.
const LEAVES: i32 = 7;

/// The name of a VM whose parts live that long.
pub fn name(life_ms: u64) -> String {
    format!("{NAME}{life_ms}")
}

/// How long the parts of the VM of that name live, if it is such a one.
pub fn life(name: &str) -> Option<Duration> {
    let life_ms = name.strip_prefix(NAME)?.parse().ok()?;
    Some(Duration::from_millis(life_ms))
}

/// Is one of its shards.
pub fn run(mut control: UnixStream, life: Duration) -> ! {
    let (launch, _files) = shard::process::receive(&mut control).expect("a launch");
    if let Launch::Vm(_) = launch {
        loop {
            std::thread::park();
        }
    }
    let running = Report::Running {
        sandbox_missing: Vec::new(),
    };
    let mut line = serde_json::to_vec(&running).expect("JSON");
    line.push(b'\n');
    control.write_all(&line).expect("a monitor");
    std::thread::sleep(life);
    // Its socket ends with it: a part that has closed that is killed.
    std::process::exit(LEAVES)
}
