//! Receives and sends files, with checksums. A received file appears whole or not at all.

use std::fmt;
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use data_encoding::HEXLOWER;
use sha2::{Digest, Sha256};

use super::{ready, ready_to_send, refuse};
use crate::protocol::{End, FrameError, Kind};
use crate::wire::Wire;

/// Receives a file into `path`, or into the directory `path` as `name`.
pub(super) fn receive(wire: &mut Wire, path: &str, name: &str, mode: u32) -> io::Result<()> {
    let mut incoming = match Incoming::open(path, name, mode) {
        Ok(incoming) => incoming,
        Err(reason) => return refuse(wire, &reason.to_string()),
    };
    ready(wire)?;
    loop {
        // A client may take any time; the end of a client closes its connection.
        let Some(frame) = wire.wait_frame(None)? else {
            return Ok(());
        };
        let step = match frame.kind {
            Kind::Data => incoming.write(&frame.payload),
            Kind::End => match frame.json::<End>() {
                Ok(end) => match incoming.finish(&end) {
                    Ok(()) => return wire.send_frame(Kind::Done, &[], None),
                    refused => refused,
                },
                Err(error) => Err(FileError::End(error)),
            },
            kind => Err(FileError::Frame(kind)),
        };
        if let Err(reason) = step {
            // The temporary file is removed before the client reads the answer.
            drop(incoming);
            return refuse(wire, &reason.to_string());
        }
    }
}

/// The reason why a file is not received or sent, for the client.
#[derive(Debug, thiserror::Error)]
enum FileError {
    #[error("{0}: not an absolute path")]
    Relative(String),
    #[error("{0:?} does not end with the name of a file")]
    Name(String),
    #[error("{0}: no such directory")]
    NoDirectory(String),
    #[error("{0}: is a directory")]
    Directory(String),
    #[error("{0}: not a regular file")]
    Irregular(String),
    #[error("{0}: not a file")]
    NotAFile(String),
    #[error("{0}: the bytes that arrived differ from those that were sent; copy it again")]
    Damaged(String),
    #[error("unexpected {0:?} frame in a file")]
    Frame(Kind),
    #[error("{path}: {error}")]
    Io { path: String, error: io::Error },
    #[error("{0}")]
    End(FrameError),
}

impl FileError {
    fn io(path: impl fmt::Display) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_string();
        |error| Self::Io { path, error }
    }
}

/// A file that is being received: written beside its place under a temporary name, and removed unless
/// finished.
struct Incoming {
    file: File,
    temporary: PathBuf,
    place: PathBuf,
    mode: u32,
    hash: Sha256,
    bytes: u64,
    finished: bool,
}

impl Incoming {
    fn open(path: &str, name: &str, mode: u32) -> Result<Self, FileError> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let given = Path::new(path);
        if !given.is_absolute() {
            return Err(FileError::Relative(path.to_owned()));
        }
        let mut place = given.to_path_buf();
        if place.is_dir() {
            if name.is_empty() || name == "." || name == ".." || name.contains(['/', '\0']) {
                return Err(FileError::Name(name.to_owned()));
            }
            place.push(name);
        } else if path.ends_with('/') {
            return Err(FileError::NoDirectory(path.to_owned()));
        }
        // Through symbolic links, as a write to the file would go.
        if let Ok(real) = place.canonicalize() {
            place = real;
        }
        match fs::metadata(&place) {
            Ok(meta) if meta.is_dir() => return Err(FileError::Directory(place.display().to_string())),
            Ok(meta) if !meta.is_file() => return Err(FileError::Irregular(place.display().to_string())),
            _ => {}
        }
        let directory = place
            .parent()
            .ok_or_else(|| FileError::NotAFile(path.to_owned()))?;
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let temporary = directory.join(format!(".mirrorball-{}-{count}", std::process::id()));
        let file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&temporary)
            .map_err(FileError::io(place.display()))?;
        Ok(Self {
            file,
            temporary,
            place,
            mode,
            hash: Sha256::new(),
            bytes: 0,
            finished: false,
        })
    }

    fn write(&mut self, data: &[u8]) -> Result<(), FileError> {
        self.hash.update(data);
        self.bytes += data.len() as u64;
        self.file
            .write_all(data)
            .map_err(FileError::io(self.place.display()))
    }

    fn finish(&mut self, end: &End) -> Result<(), FileError> {
        let sum = HEXLOWER.encode(&std::mem::take(&mut self.hash).finalize());
        if end.bytes != self.bytes || end.sha256 != sum {
            return Err(FileError::Damaged(self.place.display().to_string()));
        }
        let place = || -> io::Result<()> {
            self.file
                .set_permissions(Permissions::from_mode(self.mode & 0o7777))?;
            self.file.sync_data()?;
            fs::rename(&self.temporary, &self.place)
        };
        place().map_err(FileError::io(self.place.display()))?;
        self.finished = true;
        Ok(())
    }
}

impl Drop for Incoming {
    fn drop(&mut self) {
        if !self.finished {
            // Best effort: no receiver of an error is left.
            let _ = fs::remove_file(&self.temporary);
        }
    }
}

/// Sends the file `path`.
pub(super) fn send(wire: &mut Wire, path: &str) -> io::Result<()> {
    let mut file = match open_to_send(path) {
        Ok(file) => file,
        Err(reason) => return refuse(wire, &reason.to_string()),
    };
    // Files of /proc and similar file systems report size 0 and have more bytes.
    let about = file.metadata()?;
    let size = Some(about.len()).filter(|&size| size > 0);
    ready_to_send(wire, size, Some(about.permissions().mode() & 0o7777))?;
    let mut buffer = vec![0; 32 << 10];
    let mut hash = Sha256::new();
    let mut bytes = 0u64;
    loop {
        // At most the announced size, should the file grow meanwhile.
        let room = size
            .map_or(buffer.len() as u64, |size| size - bytes)
            .min(buffer.len() as u64) as usize;
        let length = match file.read(&mut buffer[..room]) {
            Ok(length) => length,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return refuse(wire, &format!("{path}: {error}")),
        };
        if length == 0 {
            break;
        }
        hash.update(&buffer[..length]);
        bytes += length as u64;
        wire.send_frame(Kind::Data, &buffer[..length], None)?;
    }
    wire.send_json(
        Kind::End,
        &End {
            bytes,
            sha256: HEXLOWER.encode(&hash.finalize()),
        },
    )
}

fn open_to_send(path: &str) -> Result<File, FileError> {
    if !Path::new(path).is_absolute() {
        return Err(FileError::Relative(path.to_owned()));
    }
    let open = || -> io::Result<File> {
        // Nonblocking, so that opening a pipe without a writer does not wait forever.
        let file = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NONBLOCK)
            .open(path)?;
        Ok(file)
    };
    let file = open().map_err(FileError::io(path))?;
    match file.metadata() {
        Ok(meta) if meta.is_file() => Ok(file),
        Ok(meta) if meta.is_dir() => Err(FileError::Directory(path.to_owned())),
        Ok(_) => Err(FileError::Irregular(path.to_owned())),
        Err(error) => Err(FileError::io(path)(error)),
    }
}
