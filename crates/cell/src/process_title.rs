//! The command line that `ps` shows for this process.

use std::ffi::CStr;
use std::io;

/// Fields of `/proc/self/stat` behind the name of the program: the first is the third of all (`proc(5)`).
const ARGUMENTS_START: usize = 48 - 3;
const ARGUMENTS_END: usize = 49 - 3;

/// Replaces the arguments of this process by `title`, as far as they have room.
///
/// # Errors
/// If `/proc` can't be read.
pub(crate) fn set(title: &CStr) -> io::Result<()> {
    let stat = std::fs::read_to_string("/proc/self/stat")?;
    let (_, fields) = stat.rsplit_once(')').ok_or(io::ErrorKind::InvalidData)?;
    let fields: Vec<&str> = fields.split_whitespace().collect();
    let address = |index: usize| fields.get(index).and_then(|field| field.parse::<usize>().ok());
    let (Some(start), Some(end)) = (address(ARGUMENTS_START), address(ARGUMENTS_END)) else {
        return Err(io::ErrorKind::InvalidData.into());
    };
    // The last byte stays zero: the kernel takes the environment for a part of the title otherwise.
    let room = end.saturating_sub(start).saturating_sub(1);
    let title = title.to_bytes();
    let count = title.len().min(room);
    if start == 0 || room == 0 {
        return Ok(());
    }
    // SAFETY: the kernel has put the arguments there, on the stack of the first thread, below which this code
    // runs; they are writable, and no other code reads or writes them: the caller is the only thread that
    // runs, and does not read its arguments any more.
    unsafe {
        std::ptr::copy_nonoverlapping(title.as_ptr(), start as *mut u8, count);
        std::ptr::write_bytes((start + count) as *mut u8, 0, end - start - count);
    }
    Ok(())
}
