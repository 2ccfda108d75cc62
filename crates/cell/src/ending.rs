//! How a VM ended, as an exit status and a line of text.

use shard::launch::Ending;

/// The exit status of `mirrorball run` for an ending (`docs/cli.md`).
pub fn status(ending: &Ending) -> u8 {
    match ending {
        Ending::PowerOff | Ending::Reboot => 0,
        Ending::Panic => 70,
        Ending::TripleFault => 71,
        Ending::KvmInternalError { .. } => 72,
        Ending::ShardFailed { .. } | Ending::PeerLost { .. } => 73,
        Ending::Quit => 74,
    }
}

/// One line for a person; `None` for a clean ending.
pub fn reason(ending: &Ending) -> Option<String> {
    Some(match ending {
        Ending::PowerOff | Ending::Reboot => return None,
        Ending::Panic => "the guest's kernel panicked".to_owned(),
        Ending::TripleFault => "the guest ended in a triple fault".to_owned(),
        Ending::KvmInternalError { detail } => format!("KVM could not go on: {detail}"),
        Ending::ShardFailed { detail } | Ending::PeerLost { detail } => format!("the shard failed: {detail}"),
        Ending::Quit => "killed".to_owned(),
    })
}
