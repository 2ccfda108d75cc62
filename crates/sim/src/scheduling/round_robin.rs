//! Plain scheduler to compare with: each CPU alternates between its busy vCPUs and looks at no other CPU.

use std::collections::VecDeque;

use policy::cpu::entry::{VcpuEntry, VcpuState};
use policy::cpu::message::{Change, Effect, Event};
use policy::cpu::{CpuId, VcpuId};

use crate::Time;

/// Scheduler of one CPU.
#[derive(Debug)]
pub struct RoundRobin {
    cpu: CpuId,
    /// Busy vCPUs; the first one runs.
    ready: VecDeque<VcpuId>,
    running: Option<VcpuId>,
    slice_end: Time,
}

impl RoundRobin {
    /// The scheduler of a CPU.
    pub fn new(cpu: CpuId) -> Self {
        Self {
            cpu,
            ready: VecDeque::new(),
            running: None,
            slice_end: 0,
        }
    }

    /// Takes an event; others than those of vCPUs and the timer have no meaning here.
    pub fn handle(&mut self, now: Time, event: Event, slice_ns: Time, out: &mut Vec<Effect>) {
        match event {
            Event::Add { vcpu, is_awake } => {
                let entry = VcpuEntry {
                    cpu: self.cpu,
                    state: if is_awake {
                        VcpuState::Waiting
                    } else {
                        VcpuState::Idle
                    },
                    ..VcpuEntry::default()
                };
                out.push(Effect::Entry(vcpu, entry));
                if is_awake {
                    self.ready.push_back(vcpu);
                }
            }
            Event::Vcpu { vcpu, change } => match change {
                Change::Wake if !self.ready.contains(&vcpu) => self.ready.push_back(vcpu),
                Change::Halt | Change::Remove => self.ready.retain(|one| *one != vcpu),
                Change::Wake | Change::Spin | Change::Sample(_) => {}
            },
            _ => {}
        }
        if self.running.is_some() && self.running == self.ready.front().copied() && now >= self.slice_end {
            self.ready.rotate_left(1);
            self.slice_end = now + slice_ns;
            out.push(Effect::Timer(self.slice_end));
        }
        let next = self.ready.front().copied();
        if next != self.running {
            self.running = next;
            self.slice_end = now + slice_ns;
            out.push(Effect::Run(next));
            out.push(Effect::Timer(self.slice_end));
        }
    }
}
