//! Copying files to and from the guest.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use nix::sys::statvfs::fstatvfs;
use sha2::{Digest, Sha256};

use super::{ClientError, Stream, answer, broken, checked, gone, hex, open};
use crate::protocol::{End, Kind, Request};
use crate::wire::{PATIENCE, Wire};

/// How long a peer that takes or gives no byte of a file is waited for.
const STALL_MAX: Duration = Duration::from_secs(120);

/// Copies `source` into the guest; `progress` is called with the bytes so far. Returns the bytes copied.
pub fn put(
    stream: impl Stream,
    source: &mut File,
    name: &str,
    path: &str,
    progress: &mut dyn FnMut(u64),
) -> Result<u64, ClientError> {
    let local = |source| ClientError::Local {
        what: "can't read the file to copy",
        source,
    };
    let mode = source.metadata().map_err(local)?.permissions().mode() & 0o7777;
    let mut wire = Wire::new(&stream)?;
    open(
        &mut wire,
        &Request::Put {
            path: path.into(),
            name: name.into(),
            mode,
        },
    )?;
    let mut hash = Sha256::new();
    let mut bytes = 0u64;
    let mut buffer = vec![0; 32 << 10];
    loop {
        let length = match source.read(&mut buffer) {
            Ok(0) => break,
            Ok(length) => length,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(local(error)),
        };
        hash.update(&buffer[..length]);
        let sent = wire.send_frame(Kind::Data, &buffer[..length], Some(STALL_MAX));
        // The agent says something before the end only when something is wrong.
        if sent.is_err() || wire.readable() {
            answer(&mut wire)?;
            sent?;
            return Err(ClientError::Protocol("an answer before the file's end".into()));
        }
        bytes += length as u64;
        progress(bytes);
    }
    wire.send_json(
        Kind::End,
        &End {
            bytes,
            sha256: hex(&hash.finalize()),
        },
    )?;
    match answer(&mut wire)?.kind {
        Kind::Done => Ok(bytes),
        kind => Err(ClientError::Protocol(format!("unexpected {kind:?} frame"))),
    }
}

/// A file that was copied from a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copied {
    /// Its length.
    pub bytes: u64,
    /// What its owner, its group and others may do with it in the guest. An agent of an older image does not say, and then only
    /// the owner reads and writes it.
    pub mode: u32,
}

/// Copies a guest's file into `target`; `progress` is called with the bytes so far. Refused when the file is larger than the
/// room the target's file system has.
pub fn get(
    stream: impl Stream,
    path: &str,
    mut target: &File,
    progress: &mut dyn FnMut(u64),
) -> Result<Copied, ClientError> {
    let local = |source| ClientError::Local {
        what: "can't write the copied file",
        source,
    };
    let mut wire = Wire::new(&stream)?;
    let ready = open(&mut wire, &Request::Get { path: path.into() })?;
    let room = fstatvfs(target).map_err(|error| local(error.into()))?;
    let room = room.blocks_available().saturating_mul(room.fragment_size());
    let limit = ready.size.unwrap_or(room);
    if limit > room {
        return Err(local(io::ErrorKind::StorageFull.into()));
    }
    let mut hash = Sha256::new();
    let mut bytes = 0u64;
    loop {
        let deadline = std::time::Instant::now() + STALL_MAX.max(PATIENCE);
        let frame = wire
            .wait_frame(Some(deadline))
            .map_err(broken)?
            .ok_or_else(gone)?;
        let frame = checked(frame)?;
        match frame.kind {
            Kind::Data => {
                bytes += frame.payload.len() as u64;
                if bytes > limit {
                    return Err(ClientError::Protocol("more bytes than the file has".into()));
                }
                hash.update(&frame.payload);
                target.write_all(&frame.payload).map_err(local)?;
                progress(bytes);
            }
            Kind::End => {
                let end: End = frame
                    .json()
                    .map_err(|error| ClientError::Protocol(error.to_string()))?;
                if end.bytes != bytes || end.sha256 != hex(&hash.finalize()) {
                    return Err(ClientError::Protocol("the file's checksum is wrong".into()));
                }
                let mode = ready.mode.unwrap_or(0o600) & 0o777;
                return Ok(Copied { bytes, mode });
            }
            kind => return Err(ClientError::Protocol(format!("unexpected {kind:?} frame"))),
        }
    }
}
