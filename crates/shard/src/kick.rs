//! Signal that makes a vCPU's thread leave the guest, or prevents its entry.

use std::cell::Cell;
use std::io;
use std::ptr;
use std::sync::atomic::{AtomicU8, Ordering};

use vmm_sys_util::signal::{SIGRTMIN, register_signal_handler};

thread_local! {
    /// `kvm_run.immediate_exit` of this thread's vCPU. Constant at first and without a destructor, so the
    /// handler may read it.
    static EXIT: Cell<*const AtomicU8> = const { Cell::new(ptr::null()) };
}

/// Returns the signal's number.
pub fn signal() -> libc::c_int {
    SIGRTMIN()
}

/// Sets the flag that prevents the entry into the guest. Otherwise a signal just before the entry would be
/// lost.
extern "C" fn kicked(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {
    let flag = EXIT.get();
    if !flag.is_null() {
        // SAFETY: `Kickable` promises that the flag lives until it takes the pointer back, on this same
        // thread.
        unsafe { &*flag }.store(1, Ordering::SeqCst);
    }
}

/// Makes the signal interrupt `KVM_RUN` and do nothing else, in the whole process.
pub fn catch() -> io::Result<()> {
    register_signal_handler(signal(), kicked).map_err(io::Error::from)
}

/// Registration of the calling thread: a kick sets its vCPU's flag until this is dropped.
pub struct Kickable(*const AtomicU8);

impl Kickable {
    /// # Safety
    /// `flag` must live, and be accessed as an atomic or by the kernel only, as long as the value, which must
    /// be dropped on this thread.
    pub unsafe fn new(flag: *mut u8) -> Self {
        let flag = flag.cast::<AtomicU8>().cast_const();
        EXIT.set(flag);
        Self(flag)
    }

    /// Clears the flag of earlier kicks. A sender posts its reason before it kicks, and the thread checks for
    /// reasons after this.
    pub fn clear(&self) {
        // SAFETY: as `new` says; an AtomicU8 has the size and alignment of a byte.
        unsafe { &*self.0 }.store(0, Ordering::SeqCst);
    }
}

impl Drop for Kickable {
    fn drop(&mut self) {
        EXIT.set(ptr::null());
    }
}
