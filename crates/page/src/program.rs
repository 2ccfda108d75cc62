//! The pages of the running program's own file: its code and constants.

use std::ffi::{c_int, c_void};
use std::fs;
use std::time::Duration;

use super::PAGE_LEN;

/// Stack size of a thread that only sleeps and makes system calls.
const STACK_BYTES: usize = 64 << 10;
/// Time after which the start of a VM has ended, in each process that takes part in it.
const START_LENGTH: Duration = Duration::from_secs(1);

/// Unmaps the pages of the program's file that this process has touched so far. A page that is used again is
/// mapped again from the page cache of the host (a minor fault).
///
/// A program that starts a VM touches most of its code once, and then waits for years in little of it. Pages
/// that it does not use again then count for no process, and the host may reclaim them. Writable segments,
/// and those of shared libraries, stay. Breakpoints that a tracer has set are lost, as they are in copies of
/// their pages.
pub fn release() {
    // SAFETY: the callback has the type that the function requires, and uses no data.
    unsafe { libc::dl_iterate_phdr(Some(release_object), std::ptr::null_mut()) };
}

/// Whether the process with this text of `/proc/PID/status` has a tracer, such as a debugger.
fn is_traced(status: &str) -> bool {
    let tracer = status.lines().find_map(|line| line.strip_prefix("TracerPid:"));
    tracer.is_some_and(|pid| pid.trim() != "0")
}

/// Calls [`release`] once after [`START_LENGTH`], on a thread of its own. A process that is traced by then
/// keeps its pages, and with them its breakpoints.
pub fn release_after_start() {
    let release = || {
        std::thread::sleep(START_LENGTH);
        let status = fs::read_to_string("/proc/self/status");
        if !status.is_ok_and(|status| is_traced(&status)) {
            release();
        }
    };
    let thread = std::thread::Builder::new().name("release".into());
    // Without the thread the pages only stay mapped.
    let _ = thread.stack_size(STACK_BYTES).spawn(release);
}

/// Releases the segments of the first object, which is the program, and ends the iteration.
unsafe extern "C" fn release_object(info: *mut libc::dl_phdr_info, _: usize, _: *mut c_void) -> c_int {
    // SAFETY: `dl_iterate_phdr` passes a valid object with that many headers.
    let (base, headers) = unsafe {
        let info = &*info;
        let headers = std::slice::from_raw_parts(info.dlpi_phdr, usize::from(info.dlpi_phnum));
        (info.dlpi_addr as usize, headers)
    };
    for header in headers {
        if header.p_type == libc::PT_LOAD && header.p_flags & libc::PF_W == 0 {
            let first = (base + header.p_vaddr as usize) & !(PAGE_LEN - 1);
            let end = base + header.p_vaddr as usize + header.p_memsz as usize;
            // SAFETY: the segment is a mapping of the program's file that was never writable, so each page
            // has the file's content, and is read from there again. A tracer that has written to it did so
            // by the kernel, and has the original bytes.
            unsafe { libc::madvise(first as *mut c_void, end - first, libc::MADV_DONTNEED) };
        }
    }
    1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn process_with_a_tracer_is_traced() {
        let own = fs::read_to_string("/proc/self/status").unwrap();
        assert!(own.contains("\nTracerPid:\t"), "{own}");
        assert!(is_traced("Name:\tcell\nTracerPid:\t17\nUid:\t0\n"));
        assert!(!is_traced("Name:\tcell\nTracerPid:\t0\nUid:\t0\n"));
    }

    /// Kilobytes of files that this process has mapped pages of.
    fn mapped_kib() -> u64 {
        let status = fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("RssFile:"));
        line.unwrap().trim().trim_end_matches(" kB").parse().unwrap()
    }

    #[test]
    fn pages_of_the_program_leave_the_process_and_come_back_with_their_content() {
        let before = mapped_kib();
        release();
        let after = mapped_kib();
        assert!(after < before, "{before} KiB before, {after} after");
        // Code and constants that were not in use a moment ago work as before.
        assert_eq!(format!("{:08.3}", 1.234_56), "0001.235");
    }
}
