//! Hosts and the network between them, with temporary faults.

use std::collections::BTreeMap;

use protocol::CellId;

use super::{Event, Fault, Input, SILENCE_MS, World};
use crate::{MILLISECOND, Time};

/// Time from host to host, and from a host to etcd. A data centre's; not measured.
pub(super) const HOP_NS: Time = 100_000;

/// The present faults.
#[derive(Debug, Default)]
pub(super) struct Network {
    /// Number of cuts from one host to another now.
    cuts: BTreeMap<(u16, u16), u64>,
    /// Number of cuts so far.
    cuts_ever: BTreeMap<(u16, u16), u64>,
    cut_off: BTreeMap<u16, u64>,
    no_etcd: u64,
    delays: BTreeMap<(u16, u16), Time>,
}

impl Network {
    /// Whether no message gets from one host to another.
    pub(super) fn is_cut(&self, from: u16, to: u16) -> bool {
        self.cuts.contains_key(&(from, to))
    }

    /// Number of times that the path from one host to another has been cut.
    pub(super) fn cuts_ever(&self, from: u16, to: u16) -> u64 {
        self.cuts_ever.get(&(from, to)).copied().unwrap_or(0)
    }

    /// Whether etcd replies to a host.
    pub(super) fn has_etcd(&self, host: u16) -> bool {
        self.no_etcd == 0 && !self.cut_off.contains_key(&host)
    }

    /// Time of a message from one host to another.
    pub(super) fn way_ns(&self, from: u16, to: u16) -> Time {
        HOP_NS + self.delays.get(&(from, to)).copied().unwrap_or(0)
    }
}

fn one_less<K: Ord>(counts: &mut BTreeMap<K, u64>, key: K) {
    if let Some(count) = counts.get_mut(&key) {
        *count -= 1;
        if *count == 0 {
            counts.remove(&key);
        }
    }
}

impl World {
    /// Begins a fault, for a time.
    pub fn inject(&mut self, fault: Fault, time: Time) {
        self.say(|| format!("for {} ms: {fault:?}", time / MILLISECOND));
        self.counts.faults += 1;
        match fault {
            Fault::Cut(from, to) => {
                *self.network.cuts.entry((from, to)).or_default() += 1;
                *self.network.cuts_ever.entry((from, to)).or_default() += 1;
                self.silence(from, to);
            }
            Fault::CutOff(host) => *self.network.cut_off.entry(host).or_default() += 1,
            Fault::NoEtcd => self.network.no_etcd += 1,
            Fault::LostKeys => self.etcd.lose_keys(),
            Fault::Slow(number, times) => {
                if let Some(process) = self.processes.get_mut(&number) {
                    process.slowness = times;
                }
            }
            Fault::Delay(one, other, by) => {
                self.network.delays.insert((one, other), by);
                self.network.delays.insert((other, one), by);
            }
            Fault::Down(host) => {
                if !self.down.insert(host) {
                    return;
                }
                self.go_down(host);
            }
        }
        self.queue.put(self.now + time, Event::Heal(fault));
    }

    pub(super) fn heal(&mut self, fault: Fault) {
        self.say(|| format!("over: {fault:?}"));
        match fault {
            Fault::Cut(from, to) => {
                one_less(&mut self.network.cuts, (from, to));
                if !self.network.is_cut(from, to) {
                    self.release(from, to);
                }
            }
            Fault::CutOff(host) => one_less(&mut self.network.cut_off, host),
            Fault::NoEtcd => {
                self.network.no_etcd -= 1;
                if self.network.no_etcd == 0 {
                    self.etcd.restart(self.now);
                }
            }
            Fault::LostKeys => {}
            Fault::Slow(number, _) => {
                if let Some(process) = self.processes.get_mut(&number) {
                    process.slowness = 1;
                }
            }
            Fault::Delay(one, other, _) => {
                self.network.delays.remove(&(one, other));
                self.network.delays.remove(&(other, one));
            }
            Fault::Down(host) => {
                self.down.remove(&host);
                for number in self.cells_of(host) {
                    self.start(number);
                }
            }
        }
    }

    fn cells_of(&self, host: u16) -> Vec<u16> {
        self.numbers()
            .filter(|number| self.host_of(*number) == host)
            .collect()
    }

    /// Ends a host. The other ends of its links receive nothing, not even the end of the connection.
    fn go_down(&mut self, host: u16) {
        let vms = self.monitors.iter();
        let vms = vms.filter(|(_, monitor)| self.host_of(monitor.cell) == host);
        for client in vms.map(|(client, _)| *client).collect::<Vec<_>>() {
            self.monitors.remove(&client);
        }
        for number in self.cells_of(host) {
            self.joiners.remove(&number);
            // It was in the runtime directory, which is memory.
            self.lent.remove(&number);
            self.requested.remove(&number);
            self.confirmed.remove(&number);
            self.lives[usize::from(number)] = 0;
            let Some(dead) = self.processes.remove(&number) else {
                continue;
            };
            self.counts.deaths += 1;
            for peer in dead.wires {
                self.wires.remove(&(dead.id, peer));
                let at = self.silent_at();
                self.to(peer, at, Input::Ended(dead.id));
            }
        }
    }

    /// Time at which a cell that is silent from now on has been silent for too long: it sent its last message
    /// a while ago.
    pub(super) fn silent_at(&mut self) -> Time {
        let silence = SILENCE_MS * MILLISECOND;
        self.now + silence - self.chance.below(silence / 4)
    }

    fn silence(&mut self, from: u16, to: u16) {
        let cut = self.network.cuts_ever(from, to);
        let receivers = self
            .processes
            .values()
            .filter(|process| self.host_of(process.id.number) == to);
        let wires: Vec<(CellId, CellId)> = receivers
            .flat_map(|process| process.wires.iter().map(|peer| (*peer, process.id)))
            .filter(|(peer, _)| self.host_of(peer.number) == from)
            .collect();
        for (peer, at) in wires {
            let when = self.silent_at();
            self.queue.put(when, Event::Silent(peer, at, cut));
        }
    }

    pub(super) fn fall_silent(&mut self, from: CellId, to: CellId, cut: u64) {
        let (here, there) = (self.host_of(from.number), self.host_of(to.number));
        if self.network.is_cut(here, there) && self.network.cuts_ever(here, there) == cut {
            self.to(to, self.now, Input::Ended(from));
        }
    }
}
