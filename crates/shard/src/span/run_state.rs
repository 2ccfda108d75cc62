//! Run state of a vCPU's thread, which decides how a sender notifies it of a new event. Pure decisions, which
//! [`super::event_slot`] applies under its lock.
//!
//! A notification costs a system call, and one into the guest an exit besides. So a thread that is about to
//! check its events is not notified, and no thread is notified twice before it checks. KVM's `vcpu->mode`
//! (`OUTSIDE_GUEST_MODE`, `IN_GUEST_MODE`; Linux, `Documentation/virt/kvm/vcpu-requests.rst`) serves the same
//! purpose.

/// Notification that a vCPU's thread needs.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub enum Notification {
    /// None: the thread checks its events before it enters the guest or blocks, or another sender notifies it
    /// now.
    None,
    /// A signal that makes it leave the guest.
    Kick,
    /// A wake-up of the blocked thread.
    Wake,
}

/// Run state of one vCPU's thread.
#[derive(Clone, Copy, Debug, Default, Eq, Hash, PartialEq)]
pub enum RunState {
    /// The thread checks its events or serves an exit, and checks its events again before it enters the guest
    /// or blocks.
    #[default]
    OutsideGuest,
    /// The thread is in the guest or about to enter it.
    InGuest,
    /// The thread is blocked or about to block.
    Blocked,
}

impl RunState {
    /// Records that the thread has left the guest or was woken: it checks its events before it enters or
    /// blocks.
    pub fn set_outside_guest(&mut self) {
        *self = Self::OutsideGuest;
    }

    /// Records that the thread found no event and is about to enter the guest. It cleared the flag that a
    /// kick sets before it checked.
    pub fn set_in_guest(&mut self) {
        *self = Self::InGuest;
    }

    /// Records that the thread found no event and is about to block.
    pub fn set_blocked(&mut self) {
        *self = Self::Blocked;
    }

    /// Requests that the thread leaves the guest and checks its events before it enters again. A blocked
    /// thread needs no notification.
    pub fn request_exit(&mut self) -> Notification {
        match self {
            Self::InGuest => self.notify(),
            Self::OutsideGuest | Self::Blocked => Notification::None,
        }
    }

    /// Records a new event, and returns the notification that its sender must make.
    pub fn notify(&mut self) -> Notification {
        match std::mem::take(self) {
            Self::OutsideGuest => Notification::None,
            Self::InGuest => Notification::Kick,
            Self::Blocked => Notification::Wake,
        }
    }
}

#[cfg(test)]
mod tests;
