//! The other CPUs of a gang: which of them a driver asks to choose again, and which of them have not
//! followed.
//!
//! A call makes its receiver choose, and that choice may make calls. Where each driver reads another age of
//! the state, choices may change without an end, and one call may cause several. So a driver sends each CPU
//! [`CALLS_MAX`] calls between two ticks at most. Those that it leaves out are made up for at the tick.

use super::super::entry::VcpuState;
use super::super::gang::{self, Gang};
use super::super::message::{Effect, Message};
use super::super::view::View;
use super::super::word::Mode;
use super::super::{CpuId, MILLISECOND, Nanos, VcpuId, VmId};
use super::{Driver, Seen, sight};

/// Calls that a driver sends to one CPU between two ticks at most. Ours: three times the most that simulated
/// machines need, whose drivers wake and halt at random.
pub const CALLS_MAX: u8 = 16;

/// Calls that a driver has sent since its last tick.
#[derive(Debug, Default)]
pub(super) struct Calls {
    /// By the number of the receiver.
    sent: Vec<u8>,
    /// Whether one was left out.
    is_short: bool,
}

impl Calls {
    /// Counts a call to a CPU. Returns whether it may be sent.
    fn take(&mut self, to: CpuId) -> bool {
        if self.sent.len() <= to.index() {
            self.sent.resize(to.index() + 1, 0);
        }
        let sent = &mut self.sent[to.index()];
        let may = *sent < CALLS_MAX;
        *sent = sent.saturating_add(1);
        self.is_short |= !may;
        may
    }

    /// Begins a tick. Returns whether a call was left out in the last one.
    pub(super) fn begin_tick(&mut self) -> bool {
        self.sent.fill(0);
        std::mem::take(&mut self.is_short)
    }
}

impl Driver {
    /// Sends to the CPUs of a VM: on a start to those that do not run it yet (section 4.3, step 2), on a
    /// displacement to those that still do. CPUs that get a message by effects from `begin` on get no other.
    pub(super) fn call_gang(
        &mut self,
        vm: VmId,
        is_displaced: bool,
        begin: usize,
        now: Nanos,
        view: &impl View,
        out: &mut Vec<Effect>,
    ) {
        let seen = sight!(self, view);
        let gang = Gang::of(&seen, vm, now, &self.tunables);
        if !is_displaced && !gang.is_bound() || !gang.terms.is_gang {
            return;
        }
        for index in 0..gang.terms.vcpus {
            let entry = seen.vcpu(VcpuId { vm, index });
            if !entry.state.is_gated() || entry.cpu == self.cpu {
                continue;
            }
            let word = seen.word(entry.cpu);
            let runs = word.mode == Mode::Entitled && word.vm == vm;
            let has_message = |effect: &Effect| matches!(effect, Effect::Send { to, .. } if *to == entry.cpu);
            if runs != is_displaced || out[begin..].iter().any(has_message) {
                continue;
            }
            if self.calls.take(entry.cpu) {
                let message = Message::Reconsider {
                    vm,
                    is_displaced,
                    word: self.word,
                };
                out.push(Effect::Send {
                    to: entry.cpu,
                    message,
                });
                self.counters.reconsiders += 1;
            } else {
                self.counters.calls_left_out += 1;
            }
        }
    }

    /// Leaves a gang whose other CPUs have not followed in time.
    pub(super) fn check_stragglers(&mut self, now: Nanos, view: &impl View) {
        let Some(current) = self.current else { return };
        if current.check_at.is_none_or(|at| now < at) {
            return;
        }
        let seen = sight!(self, view);
        let vm = current.vcpu.vm;
        let gang = Gang::of(&seen, vm, now, &self.tunables);
        let (mut is_incomplete, mut has_straggler) = (false, false);
        for index in 0..gang.terms.vcpus {
            let entry = seen.vcpu(VcpuId { vm, index });
            // A vCPU that woke later joins the gang at its next choice.
            if entry.state != VcpuState::Waiting || entry.cpu == self.cpu || entry.since > current.started {
                continue;
            }
            let word = seen.word(entry.cpu);
            let is_gone = word.mode == Mode::Offline || word.is_stalled(now, self.tunables.stall_timeout_ns);
            let has_followed = word.mode == Mode::Entitled && word.vm == vm;
            if !is_gone && !has_followed {
                is_incomplete = true;
                // A CPU that has published since has decided otherwise, and will choose again.
                let is_silent = word.age_ms(now) > now.saturating_sub(current.started) / MILLISECOND;
                has_straggler |=
                    is_silent && gang::admits(&seen, &word, &gang.rank, &mut None, now, &self.tunables);
            }
        }
        let hold = now + self.tunables.straggler_hold_ns;
        if let Some(current) = &mut self.current {
            current.check_at = None;
            current.is_broken |= is_incomplete && gang.is_bound();
        }
        if has_straggler
            && gang.is_bound()
            && let Some(queued) = self.queue.find_mut(current.vcpu)
        {
            queued.held_until = hold;
            self.counters.stragglers += 1;
        }
    }
}
