//! Where a vCPU's thread is, and so how it is called when there is mail for it. Decisions only, which [`super::event_slot`] carries
//! out under its lock.
//!
//! A call costs a system call, and one into the guest an exit besides. So who is about to look anyway is not called, and
//! nobody is called twice before he looks.

/// How to call it.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Call {
    /// Not at all: it looks before it enters the guest or sleeps, or somebody else calls it now.
    Not,
    /// Out of the guest.
    Kick,
    /// Out of its sleep.
    Wake,
}

/// One thread's.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
pub struct Whereabouts(Place);

#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
enum Place {
    #[default]
    Awake,
    /// In the guest, or about to be.
    Inside,
    /// Asleep, or about to be.
    Asleep,
}

impl Whereabouts {
    /// It looks at its mail, or serves the guest, and looks again afterwards.
    pub fn wake(&mut self) {
        self.0 = Place::Awake;
    }

    /// It has seen that there is no mail, and is about to enter the guest. The flag that a kick sets was cleared before it
    /// looked.
    pub fn enter(&mut self) {
        self.0 = Place::Inside;
    }

    /// It has seen that there is no mail, and is about to sleep.
    pub fn sleep(&mut self) {
        self.0 = Place::Asleep;
    }

    /// It is to leave the guest, and to look before it enters again; who sleeps need not know.
    pub fn call_out(&mut self) -> Call {
        match self.0 {
            Place::Inside => self.call(),
            Place::Awake | Place::Asleep => Call::Not,
        }
    }

    /// There is mail: whoever put it there must call it so.
    pub fn call(&mut self) -> Call {
        match std::mem::take(&mut self.0) {
            Place::Awake => Call::Not,
            Place::Inside => Call::Kick,
            Place::Asleep => Call::Wake,
        }
    }
}

#[cfg(test)]
mod tests;
