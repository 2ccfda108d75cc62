//! Drops every capability irrevocably.

use std::io;

/// `_LINUX_CAPABILITY_VERSION_3`: two 32-bit words for each set.
const CAPABILITY_VERSION: u32 = 0x2008_0522;
/// Greatest number of a capability that fits into the two words.
const CAPABILITY_MAX: libc::c_ulong = 63;

#[repr(C)]
struct Header {
    version: u32,
    pid: i32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Sets {
    effective: u32,
    permitted: u32,
    inheritable: u32,
}

/// Empties the bounding set. It needs a right that the other sets may still have.
pub fn drop_bounding() -> io::Result<()> {
    for capability in 0..=CAPABILITY_MAX {
        // SAFETY: PR_CAPBSET_DROP takes a number; it touches no memory of ours.
        if unsafe { libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0) } != 0 {
            let error = io::Error::last_os_error();
            match error.raw_os_error() {
                // The kernel has no capability of this number or above.
                Some(libc::EINVAL) => break,
                // Without CAP_SETPCAP the bounding set grants nothing under no_new_privs.
                Some(libc::EPERM) => break,
                _ => return Err(error),
            }
        }
    }
    Ok(())
}

/// Empties the ambient, effective, permitted and inheritable sets and sets `no_new_privs`.
pub fn drop_all() -> io::Result<()> {
    // SAFETY: takes numbers only; an unknown operation is refused with EINVAL.
    unsafe { libc::prctl(libc::PR_CAP_AMBIENT, libc::PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0) };
    let header = Header {
        version: CAPABILITY_VERSION,
        pid: 0,
    };
    let sets = [Sets::default(); 2];
    // SAFETY: `header` and `sets` have the layout capset(2) gives for version 3 and live through the call.
    if unsafe { libc::syscall(libc::SYS_capset, &header, sets.as_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: takes numbers only.
    if unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
