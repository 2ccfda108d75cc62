//! Messages between drivers, events that a driver takes, and effects that it returns.

use super::entry::VcpuEntry;
use super::halt_rate::Sample;
use super::word::Word;
use super::{CpuId, Nanos, VcpuId, VmId};

/// Why a vCPU shall move.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum MoveReason {
    /// A CPU is idle, and the move lets the VM run.
    Idle,
    /// The periodic balancer found a CPU with less load.
    Balance,
    /// A person or a cell ordered it.
    Order,
    /// Its CPU is gone.
    Evacuation,
    /// Its CPU is gone, and no other one can take it without breaking a rule.
    LastResort,
}

/// Why a driver refuses a move.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Refusal {
    /// The vCPU is not on that queue.
    NotHere,
    /// It runs, so it does not wait for a CPU.
    Running,
    /// It has not waited long enough, or moved a short time ago.
    TooSoon,
    /// The loads differ by one at most.
    Balanced,
    /// The receiver has a vCPU of the same VM, or awaits one.
    SameVm,
    /// Affinity forbids it.
    NotAllowed,
    /// The receiver is offline, its queue is full, or it awaits too many vCPUs.
    NoRoom,
    /// The reservations of the receiver's vCPUs leave no room for the vCPU's.
    Reserved,
}

/// Number of kinds of refusals.
pub const REFUSALS: usize = 8;

/// Message from one driver to another. Messages from one sender to one receiver arrive in order.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Message {
    /// Run the algorithm again, because the sender's choice concerns a VM that you both have. It is no order
    /// to run that VM. The answer is [`Message::Answer`].
    Reconsider {
        /// VM that both drivers have.
        vm: VmId,
        /// Whether the sender has taken that VM off its CPU for another one, so that the gang is not whole.
        is_displaced: bool,
        /// Word of the sender.
        word: Word,
    },
    /// Word of the sender after its decision.
    Answer {
        /// Mode, gang and load of the sender's CPU.
        word: Word,
    },
    /// Take a vCPU from another driver. Only the receiver starts a transfer, so that it alone guards its
    /// queue against two vCPUs of one VM.
    Suggest {
        /// vCPU to request from its owner.
        vcpu: VcpuId,
        /// CPU that has it.
        owner: CpuId,
        /// Balancer or order behind the suggestion.
        reason: MoveReason,
    },
    /// Give me a vCPU. The answer is [`Message::Take`] or [`Message::Refuse`].
    Give {
        /// vCPU of the receiver's queue.
        vcpu: VcpuId,
        /// Reason by which the receiver decides whether it refuses.
        reason: MoveReason,
    },
    /// The vCPU, now the receiver's.
    Take {
        /// vCPU that is on no queue until this message is taken.
        vcpu: VcpuId,
        /// Entry that the sender published last.
        entry: VcpuEntry,
        /// Whether it was seen to spin without its gang.
        has_spun: bool,
        /// Reason of the move, for the receiver's counters.
        reason: MoveReason,
    },
    /// A move that was suggested or requested does not take place.
    Refuse {
        /// vCPU that stays where it is.
        vcpu: VcpuId,
        /// Rule that forbids the move.
        refusal: Refusal,
    },
    /// The VM's virtual time is to be within these bounds: it has slept, or has waited too long. The receiver
    /// has the VM's first vCPU. Repeating it has no effect.
    Adjust {
        /// VM that has slept, or waited too long.
        vm: VmId,
        /// The least virtual time.
        least: Nanos,
        /// The greatest virtual time.
        most: Nanos,
    },
    /// Event of a vCPU that the sender has given away.
    Forward {
        /// vCPU that the receiver, or a later CPU, has.
        vcpu: VcpuId,
        /// Event that came to the former CPU.
        change: Change,
    },
}

/// Event of a vCPU.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Change {
    /// The vCPU has work.
    Wake,
    /// The vCPU has halted.
    Halt,
    /// The vCPU spins, by the processor's report of pause loops.
    Spin,
    /// The vCPU has run without a stop, so far as the host's kernel counts.
    Sample(Sample),
    /// The vCPU's VM has ended: the driver drops the vCPU.
    Remove,
}

/// Event that a driver takes. Wake and halt may be repeated without effect.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Event {
    /// The time of the last [`Effect::Timer`] has come. An early or repeated one does nothing.
    Timer,
    /// Message of another driver.
    Message {
        /// CPU of its sender.
        from: CpuId,
        /// Message as it was sent.
        message: Message,
    },
    /// The cell places a new vCPU on this CPU.
    Add {
        /// vCPU that is on no queue.
        vcpu: VcpuId,
        /// Whether it has work.
        is_awake: bool,
    },
    /// Something happened to a vCPU.
    Vcpu {
        /// vCPU of this queue, or one that was given away.
        vcpu: VcpuId,
        /// Work, halt, spinning or end.
        change: Change,
    },
    /// Take a vCPU from its CPU, by order of a person or of the cell.
    Order {
        /// vCPU of another CPU's queue.
        vcpu: VcpuId,
    },
    /// The CPU is gone: unplugged, or no longer in the cell's set. Its driver runs on elsewhere.
    Offline,
    /// The CPU is back.
    Online,
}

/// Effect of an event, in the order in which they are applied.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Effect {
    /// Run exactly this vCPU of the queue, or none.
    Run(Option<VcpuId>),
    /// Publish the CPU's word.
    Word(Word),
    /// Publish the entry of a vCPU.
    Entry(VcpuId, VcpuEntry),
    /// Publish a slot of the queue.
    Slot(u8, Option<VcpuId>),
    /// Publish the CPU's copy of its node of the load tree.
    Load {
        /// Level of the tree; 0 is the CPU itself.
        level: u8,
        /// The load, vCPUs.
        load: u32,
    },
    /// Send a message to another driver.
    Send {
        /// CPU of the receiver.
        to: CpuId,
        /// Message, which arrives after all earlier ones to that CPU.
        message: Message,
    },
    /// The move that [`Event::Order`] ordered does not take place.
    Refused(VcpuId, Refusal),
    /// Wake the driver at this time of the caller's clock, and no longer at the time before.
    Timer(Nanos),
}
