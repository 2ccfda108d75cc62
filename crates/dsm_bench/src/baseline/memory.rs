//! A request for 4 KiB by shared memory without a system call: two threads that poll, and a pipe for each
//! direction.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::ptr;

use dsm::{FRAME_BYTES, PAGE_FRAME_BYTES, PAGE_LEN, now_ns, prepare_server_thread};
use nix::sys::memfd::{MFdFlags, memfd_create};
use urpc::host::SharedPipe;
use urpc::pipe::{Pipe, Reader, Writer};

use super::REPLY_TIMEOUT_MS;

/// Words of a pipe: 128 KiB, as between hosts.
const WORDS: usize = 1 << 14;

/// One end of the two pipes.
struct PipeEnd {
    writer: Writer<SharedPipe>,
    reader: Reader<SharedPipe>,
}

/// Measures `count` requests for a page to another thread on `cpu`. Returns the time of each, nanoseconds.
///
/// # Errors
/// If there is no memory, or the other thread does not reply.
pub fn requests_ns(count: u32, cpu: usize, realtime: bool) -> io::Result<Vec<u64>> {
    let room = Pipe::bytes(WORDS).next_multiple_of(PAGE_LEN) as u64;
    let memory: File = memfd_create(c"bare-pipes", MFdFlags::MFD_CLOEXEC)?.into();
    memory.set_len(2 * room)?;
    let pipe = |at| SharedPipe::at(&memory, at, WORDS).map_err(io::Error::other);
    let side = |outgoing, incoming| -> io::Result<PipeEnd> {
        Ok(PipeEnd {
            writer: Writer::new(pipe(outgoing)?),
            reader: Reader::new(pipe(incoming)?),
        })
    };
    let (mut near, mut far) = (side(0, room)?, side(room, 0)?);
    std::thread::scope(|scope| {
        let answers = scope.spawn(move || {
            prepare_server_thread(Some(cpu), realtime);
            (0..count).try_for_each(|_| {
                far.receive(&mut [0; FRAME_BYTES])?;
                far.send(&[7; PAGE_FRAME_BYTES])
            })
        });
        let asks = scope.spawn(move || {
            prepare_server_thread(None, realtime);
            let one = |_| {
                let before = now_ns();
                near.send(&[1; FRAME_BYTES])?;
                near.receive(&mut [0; PAGE_FRAME_BYTES])?;
                Ok(now_ns() - before)
            };
            (0..count).map(one).collect()
        });
        let panicked = |_| io::Error::other("a thread panicked");
        let times = asks.join().map_err(panicked)?;
        answers.join().map_err(panicked)??;
        times
    })
}

impl PipeEnd {
    /// Writes all bytes. The pipe has room for them if it is read.
    fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        let none: *const [u8] = ptr::slice_from_raw_parts(ptr::null(), 0);
        // SAFETY: borrowed as long as the call.
        let count = unsafe { self.writer.write([bytes, none]) }.map_err(io::Error::other)?;
        if count == bytes.len() {
            Ok(())
        } else {
            Err(ErrorKind::WriteZero.into())
        }
    }

    fn receive(&mut self, bytes: &mut [u8]) -> io::Result<()> {
        let none: *mut [u8] = ptr::slice_from_raw_parts_mut(ptr::null_mut(), 0);
        let until = now_ns() + u64::from(REPLY_TIMEOUT_MS) * 1_000_000;
        let mut came = 0;
        while came < bytes.len() {
            let rest: *mut [u8] = &mut bytes[came..];
            // SAFETY: borrowed as long as the call.
            came += unsafe { self.reader.read([rest, none]) }.map_err(io::Error::other)?;
            if now_ns() > until {
                return Err(ErrorKind::TimedOut.into());
            }
            std::hint::spin_loop();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_request_gets_its_page_by_shared_memory() {
        let cpus = nix::sched::sched_getaffinity(nix::unistd::Pid::from_raw(0)).unwrap();
        let cpu = (0..1024).rfind(|cpu| cpus.is_set(*cpu) == Ok(true)).unwrap();
        let times = requests_ns(50, cpu, false).unwrap();
        assert!(
            times.len() == 50 && times.iter().all(|time| *time > 50),
            "{times:?}"
        );
    }
}
