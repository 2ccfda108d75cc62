//! Settings of the host's file for commands.

use config::settings::{Settings, ShareBetween, Starter};
use miette::Result;
use nix::unistd::geteuid;

/// Returns the rule for sharing pages between VMs that this user starts by a command.
pub fn share_between() -> Result<ShareBetween> {
    let is_root = geteuid().is_root();
    Ok(Settings::load(is_root)?.share_between(Starter::command(is_root)))
}
