//! The variables of the litmus tests, and the instructions that access them.
//!
//! The accesses are written as instructions: neither the compiler nor a library may join, split or move them.

use std::arch::asm;

/// A word of the shared memory. Threads of all nodes access it at the same time, and any value may be read.
#[derive(Clone, Copy)]
pub(super) struct Variable(*mut u64);

/// Four bytes of a variable.
#[derive(Clone, Copy)]
pub(super) struct Half(*mut u32);

impl Variable {
    /// A variable at `word`, which need not be aligned: one may cross two pages.
    ///
    /// # Safety
    /// The eight bytes stay mapped and writable as long as the variable is used, and only variables and
    /// perturbers access them.
    pub(super) unsafe fn new(word: *mut u64) -> Self {
        Self(word)
    }

    /// The lower four bytes, then the upper ones.
    pub(super) fn halves(self) -> [Half; 2] {
        let low = self.0.cast::<u32>();
        [Half(low), Half(low.wrapping_add(1))]
    }

    /// Reads all eight bytes by one plain instruction.
    #[inline(always)]
    pub(super) fn load(self) -> u64 {
        let value;
        // SAFETY: the word is mapped, as `new` requires.
        unsafe { asm!("mov {}, [{}]", out(reg) value, in(reg) self.0, options(nostack, preserves_flags)) };
        value
    }

    /// Writes all eight bytes by one plain instruction.
    #[inline(always)]
    pub(super) fn store(self, value: u64) {
        // SAFETY: the word is mapped and writable, as `new` requires.
        unsafe { asm!("mov [{}], {}", in(reg) self.0, in(reg) value, options(nostack, preserves_flags)) };
    }

    /// Writes all eight bytes and returns the former value, by a locked instruction.
    #[inline(always)]
    pub(super) fn exchange(self, value: u64) -> u64 {
        let mut value = value;
        // SAFETY: the word is mapped and writable, as `new` requires.
        unsafe { asm!("xchg [{}], {}", in(reg) self.0, inout(reg) value, options(nostack, preserves_flags)) };
        value
    }

    /// Adds to it and returns the former value, by a locked instruction.
    #[inline(always)]
    pub(super) fn add(self, value: u64) -> u64 {
        let mut value = value;
        // SAFETY: the word is mapped and writable, as `new` requires.
        unsafe { asm!("lock xadd [{}], {}", in(reg) self.0, inout(reg) value, options(nostack)) };
        value
    }
}

impl Half {
    /// Reads the four bytes by one plain instruction.
    #[inline(always)]
    pub(super) fn load(self) -> u64 {
        let value: u64;
        // SAFETY: the variable's bytes are mapped, as `Variable::new` requires.
        unsafe { asm!("mov {:e}, [{}]", out(reg) value, in(reg) self.0, options(nostack, preserves_flags)) };
        value
    }

    /// Writes the lower four bytes of `value` by one plain instruction.
    #[inline(always)]
    pub(super) fn store(self, value: u64) {
        // SAFETY: the variable's bytes are mapped and writable, as `Variable::new` requires.
        unsafe { asm!("mov [{}], {:e}", in(reg) self.0, in(reg) value, options(nostack, preserves_flags)) };
    }
}

/// Orders all accesses before it and all after it.
#[inline(always)]
pub(super) fn fence() {
    // SAFETY: orders accesses, and nothing else.
    unsafe { asm!("mfence", options(nostack, preserves_flags)) };
}
