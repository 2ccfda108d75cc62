//! The version that a monitor and a shard must have in common. It goes with the first message, and the shard checks it
//! before it parses anything else.
//!
//! Monitor and shard are programs of their own, and an upgrade may replace one file before the other. The version is that
//! of the package, and a checksum of this crate's sources: two builds with another message or another calculation differ.

use std::os::fd::BorrowedFd;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::control::ControlSocket;
use crate::launch::Launch;
use crate::message::{Files, ReceiveError};

/// The version of this build, as `0.1.0+89abcdef`.
pub const VERSION: &str = match std::str::from_utf8(&TEXT) {
    Ok(text) => text,
    Err(_) => panic!("a version of ASCII"),
};

const PACKAGE: &[u8] = env!("CARGO_PKG_VERSION").as_bytes();
const TEXT: [u8; PACKAGE.len() + 9] = text(checksum());
/// This crate's sources, by the names of their files.
const SOURCES: [(&str, &[u8]); 14] = [
    ("chain.rs", include_bytes!("chain.rs")),
    ("cmdline.rs", include_bytes!("cmdline.rs")),
    ("control.rs", include_bytes!("control.rs")),
    ("cpuid.rs", include_bytes!("cpuid.rs")),
    ("launch.rs", include_bytes!("launch.rs")),
    ("layout.rs", include_bytes!("layout.rs")),
    ("lib.rs", include_bytes!("lib.rs")),
    ("memory.rs", include_bytes!("memory.rs")),
    ("message.rs", include_bytes!("message.rs")),
    ("platform.rs", include_bytes!("platform.rs")),
    ("ports.rs", include_bytes!("ports.rs")),
    ("relation.rs", include_bytes!("relation.rs")),
    ("saved.rs", include_bytes!("saved.rs")),
    ("version.rs", include_bytes!("version.rs")),
];

/// Computes FNV-1a over all sources.
const fn checksum() -> u32 {
    let mut sum = 0x811c_9dc5_u32;
    let mut file = 0;
    while file < SOURCES.len() {
        let (_, source) = SOURCES[file];
        let mut at = 0;
        while at < source.len() {
            sum = (sum ^ source[at] as u32).wrapping_mul(0x0100_0193);
            at += 1;
        }
        file += 1;
    }
    sum
}

const fn text(checksum: u32) -> [u8; PACKAGE.len() + 9] {
    let mut text = [b'+'; PACKAGE.len() + 9];
    let mut at = 0;
    while at < PACKAGE.len() {
        text[at] = PACKAGE[at];
        at += 1;
    }
    let mut digit = 0;
    while digit < 8 {
        let value = (checksum >> (28 - 4 * digit)) & 0xf;
        text[PACKAGE.len() + 1 + digit] = b"0123456789abcdef"[value as usize];
        digit += 1;
    }
    text
}

/// The first message as it is sent. This form is the same in all versions.
#[derive(Serialize)]
struct Sent<'a> {
    version: &'a str,
    launch: &'a Launch,
}

/// The first message as it is received: the launch is not parsed before the version has been checked.
#[derive(Deserialize)]
struct Received {
    version: String,
    launch: Box<RawValue>,
}

/// Reason for a launch that a shard does not carry out.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// The message did not arrive whole, or makes no sense.
    #[error(transparent)]
    Receive(#[from] ReceiveError),
    /// The monitor has another version.
    #[error("the monitor has version {monitor}, and this program has version {ours}", ours = VERSION)]
    OtherVersion {
        /// The monitor's version.
        monitor: String,
    },
}

/// Sends the first message to a shard: the other side of [`receive_launch`].
pub fn send_launch(
    socket: &ControlSocket,
    launch: &Launch,
    files: &[BorrowedFd<'_>],
) -> Result<(), ReceiveError> {
    let version = VERSION;
    socket.send(&Sent { version, launch }, files)
}

/// Receives the first message from a monitor, with its files.
pub fn receive_launch(socket: &ControlSocket) -> Result<(Launch, Files), LaunchError> {
    let (message, files) = socket.receive_with_files()?;
    let received: Received = serde_json::from_slice(&message).map_err(ReceiveError::from)?;
    if received.version != VERSION {
        return Err(LaunchError::OtherVersion {
            monitor: received.version,
        });
    }
    let launch = serde_json::from_str(received.launch.get()).map_err(ReceiveError::from)?;
    Ok((launch, files))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn version_covers_every_source_of_messages() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/src");
        let files = std::fs::read_dir(folder).unwrap();
        let files: BTreeSet<String> = files
            .map(|file| file.unwrap().file_name().into_string().unwrap())
            .collect();
        let covered = SOURCES.iter().map(|(name, _)| (*name).to_owned()).collect();
        assert_eq!(files, covered);
        let (package, checksum) = VERSION.split_once('+').unwrap();
        assert_eq!(package, env!("CARGO_PKG_VERSION"));
        assert_eq!(u32::from_str_radix(checksum, 16), Ok(super::checksum()));
    }

    fn received(message: &str) -> Result<(Launch, Files), LaunchError> {
        let (monitor, shard) = ControlSocket::pair().unwrap();
        let message: Box<RawValue> = serde_json::from_str(message).unwrap();
        monitor.send(&message, &[]).unwrap();
        receive_launch(&shard)
    }

    #[test]
    fn launch_of_another_version_is_refused_before_it_is_parsed() {
        let message = "{\"version\":\"0.0.9+00000000\",\"launch\":{\"unknown\":[1]},\"added\":true}";
        let refused = received(message).err().unwrap();
        let both = format!("the monitor has version 0.0.9+00000000, and this program has version {VERSION}");
        assert_eq!(refused.to_string(), both);
        // The same launch of this version is parsed, and makes no sense.
        let refused = received(&message.replace("0.0.9+00000000", VERSION))
            .err()
            .unwrap();
        assert!(
            matches!(refused, LaunchError::Receive(ReceiveError::Json(_))),
            "{refused}"
        );
    }
}
