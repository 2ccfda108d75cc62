//! Instructions, and the hardware's own walks.

use super::super::guest::{At, Cached, Op, Va};
use super::{PendingSend, Plan, Task, World};
use crate::Right;
use crate::merged::Entry;

impl World {
    /// Returns what a CPU's node must acquire for this instruction, if anything.
    pub fn lacks(&self, cpu: usize, op: Op) -> Option<(u32, Right)> {
        let driver = &self.nodes[self.cpus[cpu].node].driver;
        let lacks = |(page, _): At, right| (!driver.allows(page, right)).then_some((page, right));
        match op {
            Op::Acquire(at) | Op::Set(at, _) | Op::Add(at) | Op::Take(at) => lacks(at, Right::Write),
            Op::Await(at, _) | Op::IfIs(at, _, _) => lacks(at, Right::Read),
            Op::Touch { va, writes, .. } => self.walk(cpu, va, writes).err().flatten(),
            _ => None,
        }
    }

    /// Follows indices from the farthest cached table.
    fn follow(&self, cpu: usize, path: &[usize]) -> Result<u32, Option<(u32, Right)>> {
        let cpu = &self.cpus[cpu];
        let driver = &self.nodes[cpu.node].driver;
        let cached = |part: &&(Va, u32)| path.starts_with(part.0);
        let furthest = cpu.walks.iter().filter(cached).max_by_key(|part| part.0.len());
        let (begun, mut table) = match furthest {
            Some((part, table)) => (part.len(), *table),
            None => (0, cpu.cr3.ok_or(None)?),
        };
        for index in &path[begun..] {
            if !driver.allows(table, Right::Write) {
                return Err(Some((table, Right::Write)));
            }
            let entry = Entry(driver.copy[table as usize][*index]);
            if !entry.is_present() || entry.frame() >= driver.copy.len() as u64 {
                return Err(None);
            }
            table = u32::try_from(entry.frame()).expect("in memory");
        }
        Ok(table)
    }

    /// Translates through TLB, caches and tables. Returns what is missing, or `None` for a fault.
    fn walk(&self, cpu: usize, va: Va, writes: bool) -> Result<Cached, Option<(u32, Right)>> {
        let cached = self.cpus[cpu]
            .tlb
            .iter()
            .find(|(other, _)| *other == va)
            .map(|(_, cached)| *cached);
        if let Some(cached) = cached.filter(|cached| !writes || (cached.writes && cached.is_dirty)) {
            return Ok(cached);
        }
        let table = self.follow(cpu, &va[..va.len() - 1])?;
        let driver = &self.nodes[self.cpus[cpu].node].driver;
        if !driver.allows(table, Right::Write) {
            return Err(Some((table, Right::Write)));
        }
        let entry = Entry(driver.copy[table as usize][va[va.len() - 1]]);
        let may_write = entry.0 & Entry::WRITABLE != 0;
        if !entry.is_present() || (writes && !may_write) {
            return Err(None);
        }
        Ok(Cached {
            frame: entry.frame(),
            writes: may_write,
            is_dirty: entry.0 & Entry::DIRTY != 0 || writes,
        })
    }

    /// Walks and marks the entries. Returns false if the walk fails or changes nothing.
    pub fn fill(&mut self, cpu: usize, va: Va, writes: bool) -> bool {
        let Ok(cached) = self.walk(cpu, va, writes) else {
            return false;
        };
        if self.cpus[cpu].tlb.contains(&(va, cached)) {
            return false;
        }
        let table = self.follow(cpu, &va[..va.len() - 1]).expect("it was walked");
        let node = self.cpus[cpu].node;
        let word = &mut self.nodes[node].driver.copy[table as usize][va[va.len() - 1]];
        *word |= Entry::ACCESSED | if writes { Entry::DIRTY } else { 0 };
        let tlb = &mut self.cpus[cpu].tlb;
        tlb.retain(|(other, _)| *other != va);
        tlb.push((va, cached));
        true
    }

    /// Caches the path to the last table. Upper entries have their accessed bit in these worlds.
    pub fn cache_walk(&mut self, cpu: usize, va: Va, depth: usize) -> bool {
        let part = &va[..=depth];
        if self.cpus[cpu].walks.iter().any(|(other, _)| *other == part) {
            return false;
        }
        let Ok(next) = self.follow(cpu, part) else {
            return false;
        };
        self.cpus[cpu].walks.push((part, next));
        true
    }

    /// Executes an instruction that lacks nothing. Returns false if it must wait.
    pub fn execute(&mut self, plan: &Plan, cpu: usize, op: Op) -> bool {
        let node = self.cpus[cpu].node;
        let driver = &mut self.nodes[node].driver;
        let mut skip = 0;
        match op {
            Op::Acquire((page, word)) => {
                if driver.copy[page as usize][word] != 0 {
                    return false;
                }
                driver.copy[page as usize][word] = 1;
            }
            Op::Set((page, word), value) => driver.copy[page as usize][word] = value,
            Op::Add((page, word)) => driver.copy[page as usize][word] += 1,
            Op::Take((page, word)) => {
                self.cpus[cpu].register = std::mem::take(&mut driver.copy[page as usize][word]);
            }
            Op::Await((page, word), value) => {
                if driver.copy[page as usize][word] != value {
                    return false;
                }
            }
            Op::IfIs((page, word), value, leave) => {
                if driver.copy[page as usize][word] != value {
                    skip = leave;
                }
            }
            Op::IfClean(leave) => {
                if self.cpus[cpu].register & Entry::DIRTY != 0 {
                    skip = leave;
                }
            }
            Op::Interrupt(target) => {
                let to = self.cpus[target].node;
                if self.nodes[node].task.is_some() {
                    return false;
                }
                self.cpus[cpu].is_out = true;
                self.nodes[node].task = Some(Task {
                    to,
                    what: PendingSend::Interrupt(target, cpu),
                    collected: 0,
                    ticket: None,
                });
            }
            Op::Load(page) => {
                self.cpus[cpu].cr3 = Some(page);
                self.cpus[cpu].flush();
            }
            Op::Flush => self.cpus[cpu].flush(),
            Op::Touch { va, writes, fault } => match self.walk(cpu, va, writes) {
                Ok(cached) => {
                    self.fill(cpu, va, writes);
                    if self.freed.contains(&cached.frame) {
                        self.wrong = Some("a CPU uses a frame that is free");
                    }
                    if writes && !self.news.contains(&cached.frame) {
                        self.news.push(cached.frame);
                    }
                }
                Err(_) if fault == usize::MAX => self.wrong = Some("a fault persists"),
                Err(_) => skip = fault,
            },
            Op::Free(frame) => self.freed.push(frame),
            Op::Cleaned(frame) => self.news.retain(|other| *other != frame),
            Op::Discard(frame) => {
                if self.news.contains(&frame) {
                    self.wrong = Some("a dirty bit is lost");
                }
            }
            Op::Enter => {
                self.inside += 1;
                if self.inside > 1 {
                    self.wrong = Some("two CPUs have one lock");
                }
            }
            Op::Exit => self.inside -= 1,
            Op::Win => {
                self.wins += 1;
                if self.wins > 1 {
                    self.wrong = Some("an update is lost");
                }
            }
        }
        let cpu = &mut self.cpus[cpu];
        match &mut cpu.handler {
            Some(at) => {
                *at += 1 + skip;
                if *at == plan.handler.len() {
                    cpu.handler = None;
                }
            }
            None => cpu.at += 1 + skip,
        }
        true
    }

    /// Returns a CPU's current instruction.
    pub fn next_op(&self, plan: &Plan, cpu: usize) -> Option<Op> {
        let one = &self.cpus[cpu];
        match one.handler {
            _ if one.is_out => None,
            Some(at) => plan.handler.get(at).copied(),
            None => plan.programs[cpu].get(one.at).copied(),
        }
    }
}
