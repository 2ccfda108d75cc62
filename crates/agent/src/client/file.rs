//! Copies files to and from the guest.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use data_encoding::HEXLOWER;
use nix::sys::statvfs::fstatvfs;
use sha2::{Digest, Sha256};

use super::{ClientError, Stream, answer, broken, checked, gone, open};
use crate::protocol::{End, Kind, Request};
use crate::wire::{PEER_TIMEOUT, Wire};

/// Time limit for a peer to send or receive the next byte of a file.
const STALL_MAX: Duration = Duration::from_secs(120);

/// Copies `source` into the guest; calls `progress` with the number of bytes so far. Returns the number of
/// copied bytes.
pub fn put(
    stream: impl Stream,
    source: &mut File,
    name: &str,
    path: &str,
    progress: &mut dyn FnMut(u64),
) -> Result<u64, ClientError> {
    let about = source.metadata().map_err(unreadable)?;
    let place = Place {
        path,
        name,
        mode: about.permissions().mode() & 0o7777,
    };
    put_all(stream, source, place, progress).map(|sent| sent.bytes)
}

/// Place of a file in the guest.
#[derive(Clone, Copy, Debug)]
pub struct Place<'a> {
    /// Absolute path of the file.
    pub path: &'a str,
    /// Name of the file, if the path is that of a directory.
    pub name: &'a str,
    /// Permission bits.
    pub mode: u32,
}

/// End of a file that the guest has received.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sent {
    /// Length, bytes.
    pub bytes: u64,
    /// SHA-256 in hexadecimal digits. The guest has computed the same.
    pub sha256: String,
}

/// Copies all bytes of `source` into the guest; calls `progress` with the number of bytes so far. A source
/// that fails leaves no file in the guest.
pub fn put_all(
    stream: impl Stream,
    source: &mut dyn Read,
    place: Place<'_>,
    progress: &mut dyn FnMut(u64),
) -> Result<Sent, ClientError> {
    let mut wire = Wire::new(&stream)?;
    open(
        &mut wire,
        &Request::Put {
            path: place.path.into(),
            name: place.name.into(),
            mode: place.mode,
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
            Err(error) => return Err(unreadable(error)),
        };
        hash.update(&buffer[..length]);
        let sent = wire.send_frame(Kind::Data, &buffer[..length], Some(STALL_MAX));
        // The agent sends a frame before the end only to report an error.
        if sent.is_err() || wire.readable() {
            answer(&mut wire)?;
            sent?;
            return Err(ClientError::Protocol("an answer before the file's end".into()));
        }
        bytes += length as u64;
        progress(bytes);
    }
    let sha256 = HEXLOWER.encode(&hash.finalize());
    let end = End { bytes, sha256 };
    wire.send_json(Kind::End, &end)?;
    match answer(&mut wire)?.kind {
        Kind::Done => Ok(Sent {
            bytes,
            sha256: end.sha256,
        }),
        kind => Err(ClientError::Protocol(format!("unexpected {kind:?} frame"))),
    }
}

fn unreadable(source: io::Error) -> ClientError {
    ClientError::Local {
        what: "can't read the file to copy",
        source,
    }
}

fn unwritable(source: io::Error) -> ClientError {
    ClientError::Local {
        what: "can't write the copied file",
        source,
    }
}

/// A file that was copied from a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copied {
    /// Length, bytes.
    pub bytes: u64,
    /// Permission bits of owner, group and others in the guest. An agent of an older image does not send
    /// them; then only the owner may read and write the file.
    pub mode: u32,
}

/// Copies a guest's file into `target`; calls `progress` with the number of bytes so far. Refuses a file that
/// is larger than the room of the target's file system.
pub fn get(
    stream: impl Stream,
    path: &str,
    mut target: &File,
    progress: &mut dyn FnMut(u64),
) -> Result<Copied, ClientError> {
    let source = GuestFile::open(stream, path)?;
    let room = fstatvfs(target).map_err(|error| unwritable(error.into()))?;
    let room = room.blocks_available().saturating_mul(room.fragment_size());
    if source.size().unwrap_or(room) > room {
        return Err(unwritable(io::ErrorKind::StorageFull.into()));
    }
    let mut bytes = 0;
    source.receive(room, &mut |data| {
        target.write_all(data)?;
        bytes += data.len() as u64;
        progress(bytes);
        Ok(())
    })
}

/// A file of a guest whose agent is ready to send it.
#[derive(Debug)]
pub struct GuestFile {
    wire: Wire,
    size: Option<u64>,
    mode: u32,
}

impl GuestFile {
    /// Requests the agent to open the file at the absolute path `path`.
    pub fn open(stream: impl Stream, path: &str) -> Result<Self, ClientError> {
        let mut wire = Wire::new(&stream)?;
        let ready = open(&mut wire, &Request::Get { path: path.into() })?;
        Ok(Self {
            wire,
            size: ready.size,
            mode: ready.mode.unwrap_or(0o600) & 0o777,
        })
    }

    /// Returns the length in bytes that the agent claims; none for a file without one, such as those of
    /// `/proc`.
    pub fn size(&self) -> Option<u64> {
        self.size
    }

    /// Returns the permission bits of its owner, its group and others in the guest.
    pub fn mode(&self) -> u32 {
        self.mode
    }

    /// Receives the file in parts, and checks its length and its SHA-256. Receives at most its size, or
    /// `most` bytes if it has none. The parts are not trustworthy before this returns without an error.
    pub fn receive(
        mut self,
        most: u64,
        sink: &mut dyn FnMut(&[u8]) -> io::Result<()>,
    ) -> Result<Copied, ClientError> {
        let limit = self.size.unwrap_or(most);
        let mut hash = Sha256::new();
        let mut bytes = 0u64;
        loop {
            let deadline = std::time::Instant::now() + STALL_MAX.max(PEER_TIMEOUT);
            let frame = self
                .wire
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
                    sink(&frame.payload).map_err(unwritable)?;
                }
                Kind::End => {
                    let end: End = frame
                        .json()
                        .map_err(|error| ClientError::Protocol(error.to_string()))?;
                    if end.bytes != bytes || end.sha256 != HEXLOWER.encode(&hash.finalize()) {
                        return Err(ClientError::Protocol("the file's checksum is wrong".into()));
                    }
                    return Ok(Copied {
                        bytes,
                        mode: self.mode,
                    });
                }
                kind => return Err(ClientError::Protocol(format!("unexpected {kind:?} frame"))),
            }
        }
    }
}
