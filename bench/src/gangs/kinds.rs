//! The compared kinds: programs in guests, the guests, and ways to schedule their vCPUs.

/// A program of the guest.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Program {
    /// Barriers that spin in user space.
    Spin,
    /// Barriers that sleep in the kernel.
    Sleep,
    /// One spin lock of the kernel, which both threads take all the time.
    Lock,
}

impl Program {
    /// All programs, in the order in which they run.
    pub const ALL: [Self; 3] = [Self::Spin, Self::Sleep, Self::Lock];

    /// The name on the guest program's command line.
    pub fn word(self) -> &'static str {
        match self {
            Self::Spin => "spin",
            Self::Sleep => "sleep",
            Self::Lock => "lock",
        }
    }

    /// The name in the tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Spin => "barriers that spin",
            Self::Sleep => "barriers that sleep",
            Self::Lock => "a spin lock of the kernel",
        }
    }
}

/// Guest, by the spin locks of its kernel and the cells of its VM.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Guest {
    /// A waiter halts its vCPU after a while, and the holder wakes it: the default under KVM.
    Paravirtual,
    /// A waiter spins, as on hardware.
    Native,
    /// The VM spans two cells of a CPU each, and its kernel has no paravirtual spin locks.
    Spanning,
}

impl Guest {
    /// All kinds, in the order in which they run.
    pub const ALL: [Self; 3] = [Self::Paravirtual, Self::Native, Self::Spanning];

    /// The name in the tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Paravirtual => "paravirtual spin locks",
            Self::Native => "`nopvspin`",
            Self::Spanning => "spanning two cells",
        }
    }

    /// Words of the kernel's command line.
    pub fn cmdline(self) -> Option<&'static str> {
        match self {
            Self::Paravirtual | Self::Spanning => None,
            Self::Native => Some("nopvspin"),
        }
    }

    /// Goal for the time under Linux, as a multiple of that with gangs.
    pub fn goal(self) -> f64 {
        match self {
            Self::Paravirtual => 1.0,
            Self::Native | Self::Spanning => 1.3,
        }
    }
}

/// How the vCPUs are scheduled.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Scheduling {
    /// One VM, by Linux: the base.
    Alone,
    /// Two VMs, by Linux, which may run each vCPU on both CPUs.
    Linux,
    /// Two VMs, by Linux, with the vCPUs of each VM on a CPU of their own.
    Balance,
    /// Two VMs, by the cell's drivers.
    Gangs,
}

impl Scheduling {
    /// All kinds, in the order in which they run.
    pub const ALL: [Self; 4] = [Self::Alone, Self::Linux, Self::Balance, Self::Gangs];

    /// The name in the tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Alone => "one VM alone",
            Self::Linux => "two VMs, Linux",
            Self::Balance => "two VMs, balance scheduling",
            Self::Gangs => "two VMs, gangs",
        }
    }
}
