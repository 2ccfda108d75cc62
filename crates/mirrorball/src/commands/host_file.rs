//! The settings of the host's file, as the commands take them.

use config::settings::{Settings, ShareBetween, Starter};
use miette::Result;
use nix::unistd::geteuid;

/// Which VMs share pages that this user starts by a command.
pub fn share_between() -> Result<ShareBetween> {
    let is_root = geteuid().is_root();
    Ok(Settings::load(is_root)?.share_between(Starter::command(is_root)))
}
