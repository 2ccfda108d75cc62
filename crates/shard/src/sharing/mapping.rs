//! The kernel's calls that change what guest pages of this process are.
//!
//! Who calls names a range inside one region of guest memory, to which no Rust reference exists, and keeps it
//! mapped; KVM and the kernel follow each change by themselves. Ranges begin and end with pages, and a file's
//! own pages lie where it says.

use std::io;
use std::ops::Range;
use std::os::fd::RawFd;

use super::pages::PAGE_BYTES;

/// Maps `bytes` of a file privately over guest memory at `host`.
pub fn lay(host: u64, bytes: u64, file: RawFd, offset: libc::off_t) -> io::Result<()> {
    // SAFETY: replaces guest memory alone (the module's promise), which is valid for any content.
    let laid = unsafe {
        libc::mmap(
            host as *mut libc::c_void,
            bytes as usize,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_FIXED | libc::MAP_NORESERVE,
            file,
            offset,
        )
    };
    if laid == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    leave_out_of_dumps(laid, bytes);
    Ok(())
}

/// Keeps the guest's secrets out of a core dump of the shard.
fn leave_out_of_dumps(laid: *mut libc::c_void, bytes: u64) {
    // SAFETY: concerns guest memory alone (the module's promise); its content stays.
    unsafe { libc::madvise(laid, bytes as usize, libc::MADV_DONTDUMP) };
}

/// Lays nothing over guest memory at `host`: zeroes, and no place in any file.
pub fn lay_nothing(host: u64, bytes: u64) -> io::Result<()> {
    // SAFETY: as in `lay`.
    let laid = unsafe {
        libc::mmap(
            host as *mut libc::c_void,
            bytes as usize,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE,
            -1,
            0,
        )
    };
    if laid == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    leave_out_of_dumps(laid, bytes);
    Ok(())
}

/// Shows the memory's own file at `host` again. `huge` says that the memory around it asks for huge pages.
pub fn show(host: u64, bytes: u64, file: RawFd, offset: libc::off_t, huge: bool) -> io::Result<()> {
    let bytes = bytes as usize;
    // SAFETY: as in `lay`. The flags and advices are those of the memory around it, so that the kernel makes
    // one mapping of both again.
    unsafe {
        let laid = libc::mmap(
            host as *mut libc::c_void,
            bytes,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED | libc::MAP_FIXED | libc::MAP_NORESERVE,
            file,
            offset,
        );
        if laid == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        if huge {
            libc::madvise(laid, bytes, libc::MADV_HUGEPAGE);
        }
        leave_out_of_dumps(laid, bytes as u64);
    }
    Ok(())
}

/// Brings the pages of a mapping in, to be read. A kernel that knows no such call brings them in at the
/// touch.
///
/// # Errors
/// When the file can't be read.
pub fn bring_in(host: u64, bytes: u64) -> io::Result<()> {
    match advise(host, bytes, libc::MADV_POPULATE_READ) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(()),
        result => result,
    }
}

/// Brings pages of the memory's own file in, to be written; their content stays. A kernel that refuses brings
/// them in at the touch.
pub fn bring_in_to_write(host: u64, bytes: u64) {
    let _ = advise(host, bytes, libc::MADV_POPULATE_WRITE);
}

/// Forgets what was written to private mappings, whose content counts for nothing.
pub fn forget_written(host: u64, bytes: u64) -> io::Result<()> {
    advise(host, bytes, libc::MADV_DONTNEED)
}

fn advise(host: u64, bytes: u64, advice: libc::c_int) -> io::Result<()> {
    // SAFETY: concerns guest memory alone (the module's promise), which is valid for any content.
    match unsafe { libc::madvise(host as *mut libc::c_void, bytes as usize, advice) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Writes guest memory at `host` into a file. The VM is held still.
pub fn write_out(host: u64, bytes: u64, file: RawFd, offset: libc::off_t) -> io::Result<()> {
    let (host, bytes) = (host as *const u8, bytes as usize);
    let mut done = 0;
    while done < bytes {
        // SAFETY: reads `bytes - done` bytes of guest memory, which is mapped; the kernel does the copying.
        let written = unsafe {
            libc::pwrite(
                file,
                host.add(done).cast(),
                bytes - done,
                offset + done as libc::off_t,
            )
        };
        match usize::try_from(written) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => done += written,
            Err(_) => match io::Error::last_os_error() {
                error if error.kind() == io::ErrorKind::Interrupted => (),
                error => return Err(error),
            },
        }
    }
    Ok(())
}

/// Gives guest pages of the memory's own file back; one that can't be (part of a huge one) just stays.
pub fn punch(file: RawFd, range: &Range<u64>) {
    // SAFETY: the call takes no pointers.
    unsafe {
        libc::fallocate(
            file,
            libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE,
            (range.start * PAGE_BYTES) as libc::off_t,
            ((range.end - range.start) * PAGE_BYTES) as libc::off_t,
        );
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;

    /// The kernel's flags of the mapping that begins at `host`.
    fn flags(host: u64) -> String {
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let start = format!("{host:x}-");
        let mapping = maps.split_once(&start).unwrap().1;
        let flags = mapping.lines().find(|line| line.starts_with("VmFlags:"));
        flags.unwrap().to_owned()
    }

    #[test]
    fn no_guest_memory_is_in_a_core_dump_whatever_it_stands_for() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(PAGE_BYTES * 4).unwrap();
        let bytes = PAGE_BYTES * 4;
        // SAFETY: fresh memory, which nothing else uses.
        let memory = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes as usize,
                libc::PROT_NONE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        assert_ne!(memory, libc::MAP_FAILED);
        // Between two pages that stay as they are, so that it is a mapping by itself.
        let (host, inner) = (memory as u64 + PAGE_BYTES, PAGE_BYTES * 2);
        let left_out = || flags(host).contains(" dd");
        lay(host, inner, file.as_raw_fd(), 0).unwrap();
        assert!(left_out(), "a file's pages");
        lay_nothing(host, inner).unwrap();
        assert!(left_out(), "zeroes");
        show(host, inner, file.as_raw_fd(), 0, false).unwrap();
        assert!(left_out(), "the memory's own file");
    }
}
