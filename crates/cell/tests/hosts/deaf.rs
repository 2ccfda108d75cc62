//! Replacement for the shards of a VM: a home that loads forever, as one that waits for a page that no shard
//! has any more, or one that has seen a part end; and parts that are killed after a while.

use std::process::ExitCode;
use std::time::Duration;

use shard::launch::{Ending, Launch, Report};
use shard_api::control::ControlSocket;

/// The behaviour of a home.
#[derive(Clone, Copy)]
pub enum Home {
    /// Loads forever.
    Deaf,
    /// Runs, and has seen a part end at once.
    Witness,
}

impl Home {
    /// The prefix of the name, before the milliseconds that a part lives.
    fn prefix(self) -> &'static str {
        match self {
            Self::Deaf => "deaf-",
            Self::Witness => "witness-",
        }
    }
}

/// The name of a VM with such a home whose parts live that long.
pub fn name(home: Home, life_ms: u64) -> String {
    format!("{}{life_ms}", home.prefix())
}

/// The kind of home that the name stands for, and the lifetime of its parts, if it is such a name.
pub fn kind(name: &str) -> Option<(Home, Duration)> {
    let known = |home: Home| Some((home, name.strip_prefix(home.prefix())?.parse().ok()?));
    let (home, life_ms) = [Home::Deaf, Home::Witness].into_iter().find_map(known)?;
    Some((home, Duration::from_millis(life_ms)))
}

/// Runs as one of its shards.
pub fn run(control: &ControlSocket, home: Home, life: Duration) -> ExitCode {
    let (launch, _files) = shard::process::receive_launch(control).expect("a launch");
    let is_home = matches!(launch, Launch::Vm(_));
    if let (true, Home::Deaf) = (is_home, home) {
        loop {
            std::thread::park();
        }
    }
    let report = |report: Report| control.send(&report, &[]).expect("a monitor");
    report(Report::Running {
        sandbox_missing: Vec::new(),
        versions: urpc::version::Versions::FIRST,
        sandbox_notes: Vec::new(),
    });
    if is_home {
        let detail = "another shard is gone".to_owned();
        report(Report::Ended(Ending::PeerLost { detail }));
        return ExitCode::SUCCESS;
    }
    std::thread::sleep(life);
    std::process::abort()
}
