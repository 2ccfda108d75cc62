//! System calls that change the mappings of guest pages in this process.
//!
//! A caller passes a range inside one region of guest memory, to which no Rust reference exists, and keeps it
//! mapped. KVM and the kernel follow each change by themselves. Ranges begin and end at page boundaries, and
//! a file's pages lie at the given offsets.

use std::io;
use std::ops::Range;
use std::os::fd::RawFd;

use super::pages::PAGE_BYTES;

/// The kernel's treatment of a VM's memory. A new mapping gets that of the memory around it, with which it
/// becomes one mapping again where it can.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Advice {
    /// No advice.
    Ordinary,
    /// The memory's own file gets huge pages.
    Huge,
    /// The host's scanner (KSM) merges equal pages, which are small.
    Scan,
}

/// Maps `bytes` of a file privately over guest memory at `host`.
pub fn map_private(
    host: u64,
    bytes: u64,
    file: RawFd,
    offset: libc::off_t,
    advice: Advice,
) -> io::Result<()> {
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
    exclude_from_dumps(laid, bytes);
    if advice == Advice::Scan {
        // Pages of a mapping that the kernel does not accept are merged with no others.
        let _ = scan(host, bytes);
    }
    Ok(())
}

/// Lets the host's scanner merge equal pages of guest memory at `host` that are in no file.
///
/// # Errors
/// Fails if the kernel has no scanner.
pub fn scan(host: u64, bytes: u64) -> io::Result<()> {
    // A kernel without huge pages refuses this, and has small ones.
    let _ = advise(host, bytes, libc::MADV_NOHUGEPAGE);
    advise(host, bytes, libc::MADV_MERGEABLE)
}

/// Excludes the mapping from core dumps of the shard: it has the guest's secrets.
fn exclude_from_dumps(laid: *mut libc::c_void, bytes: u64) {
    // SAFETY: concerns guest memory alone (the module's promise); its content stays.
    unsafe { libc::madvise(laid, bytes as usize, libc::MADV_DONTDUMP) };
}

/// Maps zeroes over guest memory at `host`, without a place in a file.
pub fn map_zero(host: u64, bytes: u64, advice: Advice) -> io::Result<()> {
    // SAFETY: as in `map_private`.
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
    exclude_from_dumps(laid, bytes);
    if advice == Advice::Scan {
        // As in `map_private`.
        let _ = scan(host, bytes);
    }
    Ok(())
}

/// Maps the memory's own file at `host` again.
pub fn map_shared(host: u64, bytes: u64, file: RawFd, offset: libc::off_t, advice: Advice) -> io::Result<()> {
    let bytes = bytes as usize;
    // SAFETY: as in `map_private`. The flags and advices are those of the memory around it, so that the
    // kernel makes one mapping of both again.
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
        if advice == Advice::Huge {
            libc::madvise(laid, bytes, libc::MADV_HUGEPAGE);
        }
        exclude_from_dumps(laid, bytes as u64);
    }
    Ok(())
}

/// Populates the pages of a mapping for reading. A kernel without this call populates them at the first
/// access.
///
/// # Errors
/// Fails if the file can't be read.
pub fn populate(host: u64, bytes: u64) -> io::Result<()> {
    match advise(host, bytes, libc::MADV_POPULATE_READ) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(()),
        result => result,
    }
}

/// Populates pages of the memory's own file for writing; their content stays. A kernel that refuses populates
/// them at the first access.
pub fn populate_for_writing(host: u64, bytes: u64) {
    let _ = advise(host, bytes, libc::MADV_POPULATE_WRITE);
}

/// Discards writes to private mappings, whose content is no longer needed.
pub fn discard_written(host: u64, bytes: u64) -> io::Result<()> {
    advise(host, bytes, libc::MADV_DONTNEED)
}

fn advise(host: u64, bytes: u64, advice: libc::c_int) -> io::Result<()> {
    // SAFETY: concerns guest memory alone (the module's promise), which is valid for any content.
    match unsafe { libc::madvise(host as *mut libc::c_void, bytes as usize, advice) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Writes guest memory at `host` into a file. The VM is paused.
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

/// Releases guest pages of the memory's own file. A page that can't be released (part of a huge one) stays.
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

    /// Returns the kernel's flags of the mapping that begins at `host`.
    fn flags(host: u64) -> String {
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let start = format!("{host:x}-");
        let mapping = maps.split_once(&start).unwrap().1;
        let flags = mapping.lines().find(|line| line.starts_with("VmFlags:"));
        flags.unwrap().to_owned()
    }

    #[test]
    fn guest_memory_is_in_no_core_dump_and_scanned_if_requested_whatever_it_maps() {
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
        // Between two unchanged pages, so that it is a separate mapping.
        let (host, inner) = (memory as u64 + PAGE_BYTES, PAGE_BYTES * 2);
        let left_out = || flags(host).contains(" dd");
        let advice = Advice::Ordinary;
        map_private(host, inner, file.as_raw_fd(), 0, advice).unwrap();
        assert!(left_out(), "a file's pages");
        map_zero(host, inner, advice).unwrap();
        assert!(left_out(), "zeroes");
        map_shared(host, inner, file.as_raw_fd(), 0, advice).unwrap();
        assert!(left_out(), "the memory's own file");
        let merged = || flags(host).contains(" mg");
        assert!(!merged(), "memory is scanned that did not ask for it");
        map_zero(host, inner, Advice::Scan).unwrap();
        assert!(left_out() && merged(), "zeroes: {}", flags(host));
        map_private(host, inner, file.as_raw_fd(), 0, Advice::Scan).unwrap();
        assert!(left_out() && merged(), "a file's pages: {}", flags(host));
    }
}
