//! The log of a shard, with its standard output and standard error: bounded, however much the shard writes.
//!
//! A shard gets the write end of a pipe, never a file: it may be under a guest's control, and a guest makes
//! devices complain and reboots without limit. The monitor reads the pipe, and keeps the first and the
//! last bytes of a VM's whole life, in memory and in a file for people.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read, Seek};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use locks::lock;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use process_log::message_of;
use shard_api::launch::Fd;

use crate::left::{Leaving, LeftFiles};
use crate::text::printable;

/// Number of bytes kept from the beginning, which shows the VM's start.
const HEAD_BYTES: usize = 64 << 10;
/// Number of bytes kept from the end, which has the errors.
const TAIL_BYTES: usize = 16 << 10;
/// Maximum length of the file, with the line about omitted bytes.
const FILE_BYTES_MAX: u64 = (HEAD_BYTES + TAIL_BYTES + 64) as u64;
/// Bytes read from the pipe at once: a pipe's default capacity.
const CHUNK_BYTES: usize = 64 << 10;
/// Bytes read at most to find the last line. A shard can enlarge its pipe to 1 MiB
/// (`/proc/sys/fs/pipe-max-size`).
const LATE_BYTES_MAX: usize = 2 << 20;
/// Pause between two reads once the beginning is full: a shard that floods its log then blocks instead of the
/// monitor.
const FLOOD_PAUSE: Duration = Duration::from_millis(10);
/// The prefix of a line that the monitor adds. A shard that writes it hides its own line.
const NOTE: &str = "monitor: ";
/// Maximum length of the last line, in characters.
const LINE_CHARS_MAX: usize = 500;

/// The log of one shard of a VM, through every reboot.
#[derive(Debug)]
pub(crate) struct ShardLog {
    reading: Arc<Mutex<Reading>>,
    write_end: OwnedFd,
}

/// The descriptors of a log, which a monitor leaves to its successor.
#[derive(Debug)]
struct LeftLog {
    /// The file for people.
    file: OwnedFd,
    /// The end of the pipe that the monitor reads.
    read_end: OwnedFd,
    /// The end that shards write.
    write_end: OwnedFd,
}

#[derive(Debug)]
struct Reading {
    pipe: File,
    kept: Kept,
    file: File,
}

/// The first and the last bytes of a stream.
#[derive(Debug, Default)]
struct Kept {
    head: Vec<u8>,
    tail: VecDeque<u8>,
    /// Number of bytes between the two.
    left_out: u64,
}

impl ShardLog {
    /// Creates a log that is kept in the file at `path` as far as that can be written.
    pub(crate) fn create(path: &Path) -> io::Result<Self> {
        let file = File::options()
            .create(true)
            .truncate(true)
            .read(true)
            .write(true)
            .mode(0o600)
            .open(path)?;
        let (read_end, write_end) = nix::unistd::pipe2(OFlag::O_CLOEXEC)?;
        // Only this end is non-blocking: a shard that writes may block.
        fcntl(&read_end, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
        let left = LeftLog {
            file: file.into(),
            read_end,
            write_end,
        };
        Ok(Self::of(left, Kept::default()))
    }

    /// Takes over the log of a predecessor.
    ///
    /// # Errors
    /// If the host has no files left.
    fn adopt(left: LeftLog) -> io::Result<Self> {
        let mut text = Vec::new();
        let file = File::from(left.file.try_clone()?);
        (&file).rewind()?;
        (&file).take(FILE_BYTES_MAX).read_to_end(&mut text)?;
        Ok(Self::of(left, Kept::of_file(&text)))
    }

    /// Leaves the log to a successor of this process.
    ///
    /// # Errors
    /// If the host has no files left.
    pub(crate) fn leave(&self, leaving: &mut Leaving) -> io::Result<[Fd; 3]> {
        let log = self.left()?;
        Ok([
            leaving.add(&log.file)?,
            leaving.add(&log.read_end)?,
            leaving.add(&log.write_end)?,
        ])
    }

    /// Takes over the log of a predecessor.
    ///
    /// # Errors
    /// If a descriptor is missing, or the host has no files left.
    pub(crate) fn take([file, read_end, write_end]: [Fd; 3], files: &mut LeftFiles) -> io::Result<Self> {
        Self::adopt(LeftLog {
            file: files.take(file)?,
            read_end: files.take(read_end)?,
            write_end: files.take(write_end)?,
        })
    }

    fn left(&self) -> io::Result<LeftLog> {
        let reading = lock(&self.reading);
        Ok(LeftLog {
            file: reading.file.try_clone()?.into(),
            read_end: reading.pipe.try_clone()?.into(),
            write_end: self.write_end.try_clone()?,
        })
    }

    fn of(left: LeftLog, kept: Kept) -> Self {
        Self {
            reading: Arc::new(Mutex::new(Reading {
                pipe: left.read_end.into(),
                kept,
                file: left.file.into(),
            })),
            write_end: left.write_end,
        }
    }

    /// Starts a thread that reads the shard's output, until no process can write any more. Of all processes
    /// that have the log only the one that serves the VM reads.
    ///
    /// # Errors
    /// If the host has no threads or files left.
    pub(crate) fn begin_to_read(&self) -> io::Result<()> {
        let reading = self.reading.clone();
        let watched = lock(&reading).pipe.try_clone()?.into();
        std::thread::Builder::new()
            .name("shard-log".into())
            .spawn(move || follow(&watched, &reading))
            .map(drop)
    }

    /// Adds a line of the monitor's own, without waiting for the shard.
    pub(crate) fn note(&self, line: &str) {
        let mut reading = lock(&self.reading);
        let begin = if reading.kept.is_at_a_line() { "" } else { "\n" };
        reading.keep(format!("{begin}{NOTE}{line}\n").as_bytes());
    }

    /// The last line that the shard wrote and that is not empty, fit for a terminal.
    pub(crate) fn last_line(&self) -> Option<String> {
        let mut reading = lock(&self.reading);
        // The last output of an ended shard may still be in the pipe.
        let mut read = 0;
        while let Ok(bytes @ 1..) = reading.advance() {
            read += bytes;
            if read > LATE_BYTES_MAX {
                break;
            }
        }
        reading.kept.last_line()
    }
}

impl AsFd for ShardLog {
    /// The end that a shard writes to.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.write_end.as_fd()
    }
}

/// Reads until no process can write any more.
fn follow(watched: &OwnedFd, reading: &Mutex<Reading>) {
    loop {
        let mut files = [PollFd::new(watched.as_fd(), PollFlags::POLLIN)];
        match poll(&mut files, PollTimeout::NONE) {
            Ok(_) | Err(nix::Error::EINTR) => {}
            Err(_) => return,
        }
        let mut reading = lock(reading);
        match reading.advance() {
            Ok(0) => return,
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => return,
            _ => {}
        }
        let is_flood = reading.kept.head.len() == HEAD_BYTES;
        drop(reading);
        if is_flood {
            std::thread::sleep(FLOOD_PAUSE);
        }
    }
}

impl Reading {
    /// Keeps the pipe's bytes, a chunk at most. Returns their number; none at the end.
    fn advance(&mut self) -> io::Result<usize> {
        let mut chunk = vec![0; CHUNK_BYTES];
        let count = loop {
            match self.pipe.read(&mut chunk) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                other => break other?,
            }
        };
        self.keep(&chunk[..count]);
        Ok(count)
    }

    fn keep(&mut self, bytes: &[u8]) {
        let head_bytes = self.kept.head.len();
        self.kept.add(bytes);
        // The file is for people; without room for it the memory has the same.
        let _ = self.write(head_bytes);
    }

    /// Updates the file, which has the first `head_bytes` already.
    fn write(&self, head_bytes: usize) -> io::Result<()> {
        let Kept { head, tail, left_out } = &self.kept;
        self.file.write_all_at(&head[head_bytes..], head_bytes as u64)?;
        if tail.is_empty() {
            return Ok(());
        }
        let mut end = Vec::with_capacity(TAIL_BYTES + 64);
        if *left_out > 0 {
            end.extend_from_slice(format!("\n[{left_out} bytes left out]\n").as_bytes());
        }
        end.extend(tail);
        self.file.write_all_at(&end, HEAD_BYTES as u64)?;
        self.file.set_len((HEAD_BYTES + end.len()) as u64)
    }
}

impl Kept {
    /// The bytes of a file. A shard that writes the line about omitted bytes itself hides some of its own.
    fn of_file(text: &[u8]) -> Self {
        let (head, rest) = text.split_at(text.len().min(HEAD_BYTES));
        let left_out = left_out_of(rest);
        let tail = left_out.map_or(rest, |(_, tail)| tail);
        let tail = &tail[tail.len().saturating_sub(TAIL_BYTES)..];
        Self {
            head: head.to_vec(),
            tail: tail.iter().copied().collect(),
            left_out: left_out.map_or(0, |(bytes, _)| bytes),
        }
    }

    fn add(&mut self, bytes: &[u8]) {
        let (head, tail) = bytes.split_at(bytes.len().min(HEAD_BYTES - self.head.len()));
        self.head.extend_from_slice(head);
        self.tail.extend(tail);
        let surplus = self.tail.len().saturating_sub(TAIL_BYTES);
        self.tail.drain(..surplus);
        self.left_out += surplus as u64;
    }

    fn is_at_a_line(&self) -> bool {
        let last = self.tail.back().or(self.head.last());
        last.is_none_or(|byte| *byte == b'\n')
    }

    fn last_line(&self) -> Option<String> {
        let bytes = if self.tail.is_empty() {
            self.head.clone()
        } else {
            self.tail.iter().copied().collect()
        };
        let text = String::from_utf8_lossy(&bytes);
        let said = |line: &&str| !line.trim().is_empty() && !line.starts_with(NOTE);
        let line = message_of(text.lines().rev().find(said)?);
        Some(printable(&line.chars().take(LINE_CHARS_MAX).collect::<String>()))
    }
}

/// The number in a line about omitted bytes, and the text after the line.
fn left_out_of(rest: &[u8]) -> Option<(u64, &[u8])> {
    let number = rest.strip_prefix(b"\n[")?;
    let digits = number.iter().take_while(|byte| byte.is_ascii_digit()).count();
    let tail = number[digits..].strip_prefix(b" bytes left out]\n")?;
    Some((std::str::from_utf8(&number[..digits]).ok()?.parse().ok()?, tail))
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::time::Instant;

    use super::*;

    fn started() -> (tempfile::TempDir, ShardLog, File) {
        let directory = tempfile::tempdir().unwrap();
        let log = ShardLog::create(&directory.path().join("shard.log")).unwrap();
        log.begin_to_read().unwrap();
        let shard = File::from(log.as_fd().try_clone_to_owned().unwrap());
        (directory, log, shard)
    }

    #[test]
    fn flood_of_a_shard_keeps_its_log_within_the_bounds() {
        let (directory, log, mut shard) = started();
        let path = directory.path().join("shard.log");
        shard.write_all(b"first\n").unwrap();
        for _ in 0..40 {
            shard.write_all(&[b'x'; CHUNK_BYTES]).unwrap();
        }
        shard.write_all(b"\nlast\n").unwrap();
        assert_eq!(log.last_line().unwrap(), "last");
        let text = std::fs::read_to_string(path).unwrap();
        assert!(text.len() < HEAD_BYTES + TAIL_BYTES + 64, "{}", text.len());
        assert!(text.starts_with("first\nxxx"));
        assert!(text.ends_with("x\nlast\n"));
        let left_out = 12 + 40 * CHUNK_BYTES - HEAD_BYTES - TAIL_BYTES;
        assert!(text.contains(&format!("\n[{left_out} bytes left out]\n")));
    }

    #[test]
    fn the_file_holds_what_was_written_in_every_boot() {
        let (directory, log, mut shard) = started();
        let mut next = shard.try_clone().unwrap();
        shard.write_all(b"one\n").unwrap();
        drop(shard);
        next.write_all(b"two\n\n").unwrap();
        assert_eq!(log.last_line().unwrap(), "two");
        let text = std::fs::read_to_string(directory.path().join("shard.log")).unwrap();
        assert_eq!(text, "one\ntwo\n\n");
    }

    #[test]
    fn successor_goes_on_with_the_log_whether_or_not_bytes_were_left_out() {
        let flood = HEAD_BYTES + 3 * TAIL_BYTES;
        for written in [0, 100, HEAD_BYTES, HEAD_BYTES + 100, flood] {
            let (directory, log, mut shard) = started();
            let path = directory.path().join("shard.log");
            // In pieces that the pipe has room for, each read before the next.
            for piece in vec![b'x'; written].chunks(CHUNK_BYTES / 2) {
                shard.write_all(piece).unwrap();
                log.last_line();
            }
            let before = std::fs::read(&path).unwrap();
            // The second log has a pipe of its own: the thread of the first log, which a killed monitor would
            // not have, reads the other.
            let (read_end, write_end) = nix::unistd::pipe2(OFlag::O_CLOEXEC | OFlag::O_NONBLOCK).unwrap();
            let mut shard = File::from(write_end.try_clone().unwrap());
            let left = LeftLog {
                read_end,
                write_end,
                ..log.left().unwrap()
            };
            let successor = ShardLog::adopt(left).unwrap();
            shard.write_all(b"\nlater\n").unwrap();
            assert_eq!(successor.last_line().unwrap(), "later", "{written}");
            let text = std::fs::read(&path).unwrap();
            assert!(text.ends_with(b"x\nlater\n") || written == 0, "{written}");
            assert!(text.len() < HEAD_BYTES + TAIL_BYTES + 64);
            let kept_head = before.len().min(HEAD_BYTES);
            assert!(text[..kept_head] == before[..kept_head], "{written}");
            if written == flood {
                let line = format!("\n[{} bytes left out]\n", flood + 7 - HEAD_BYTES - TAIL_BYTES);
                assert!(String::from_utf8_lossy(&text).contains(&line), "{line}");
            }
        }
    }

    #[test]
    fn line_of_the_monitor_is_kept_and_is_none_of_the_shards() {
        let (directory, log, mut shard) = started();
        log.note("net0: first");
        assert_eq!(log.last_line(), None);
        shard.write_all(b"one").unwrap();
        assert_eq!(log.last_line().unwrap(), "one");
        log.note("net0: second");
        assert_eq!(log.last_line().unwrap(), "one");
        let text = std::fs::read_to_string(directory.path().join("shard.log")).unwrap();
        assert_eq!(text, "monitor: net0: first\none\nmonitor: net0: second\n");
    }

    #[test]
    fn the_last_line_is_cut_and_carries_no_terminal_escapes() {
        let (_directory, log, mut shard) = started();
        assert_eq!(log.last_line(), None);
        shard.write_all(b"\x1b[31mred").unwrap();
        assert_eq!(log.last_line().unwrap(), " [31mred");
        shard.write_all(&[b'y'; 5000]).unwrap();
        assert_eq!(log.last_line().unwrap().chars().count(), LINE_CHARS_MAX);
    }

    #[test]
    fn the_last_line_is_found_while_another_process_floods_the_pipe() {
        let (_directory, log, mut shard) = started();
        fcntl(&shard, FcntlArg::F_SETFL(OFlag::O_NONBLOCK)).unwrap();
        std::thread::scope(|scope| {
            let flood = scope.spawn(move || {
                let until = Instant::now() + Duration::from_secs(1);
                while Instant::now() < until {
                    let _ = shard.write(&[b'z'; CHUNK_BYTES]);
                }
            });
            std::thread::sleep(Duration::from_millis(50));
            assert!(log.last_line().unwrap().starts_with("zzz"));
            drop(flood);
        });
    }
}
