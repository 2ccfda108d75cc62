//! A model of etcd, with the requests that membership uses.

use std::collections::BTreeMap;

use cell::cluster::membership::Members;
use cell::cluster::membership::member::{EtcdAnswer, EtcdRequest, Records};
use protocol::CellId;

use crate::Time;

/// A lease's number.
pub type Lease = u64;

/// The stored keys and leases.
#[derive(Debug)]
pub struct Etcd {
    lease_ns: Time,
    lives: BTreeMap<u16, u32>,
    entries: BTreeMap<u16, (u32, Lease)>,
    removed: BTreeMap<u16, u32>,
    /// Number of writes.
    revision: u64,
    /// The end of each lease.
    leases: BTreeMap<Lease, Time>,
    lease_next: Lease,
}

impl Etcd {
    /// An empty one, whose leases last for `lease_ns` after each renewal.
    pub fn new(lease_ns: Time) -> Self {
        Self {
            lease_ns,
            lives: BTreeMap::new(),
            entries: BTreeMap::new(),
            removed: BTreeMap::new(),
            revision: 0,
            leases: BTreeMap::new(),
            lease_next: 0,
        }
    }

    /// Carries out a request.
    pub fn ask(&mut self, now: Time, question: EtcdRequest<Lease>) -> EtcdAnswer<Lease> {
        self.expire(now);
        match question {
            EtcdRequest::LastLife(number) => EtcdAnswer::LastLife(self.lives.get(&number).copied()),
            EtcdRequest::Lease => {
                self.lease_next += 1;
                self.leases.insert(self.lease_next, now + self.lease_ns);
                EtcdAnswer::Lease(self.lease_next)
            }
            EtcdRequest::Enter { me, last, lease } => {
                // A lease that has ended in the meantime makes it fail.
                let enters = self.lives.get(&me.number).copied() == last && self.leases.contains_key(&lease);
                if enters {
                    self.revision += 1;
                    self.lives.insert(me.number, me.life);
                    self.entries.insert(me.number, (me.life, lease));
                }
                EtcdAnswer::Entered(enters)
            }
            EtcdRequest::Records => EtcdAnswer::Records(Records {
                members: self.members(),
                lives: self.lives.clone(),
                removed: self.removed.clone(),
                revision: self.revision,
            }),
            EtcdRequest::Keep(lease) => {
                let end = self.leases.get_mut(&lease);
                EtcdAnswer::Kept(end.map(|end| *end = now + self.lease_ns).is_some())
            }
            EtcdRequest::Remove { cell, accuser } => {
                let is_absent = !self.entries.contains_key(&cell.number)
                    && self.lives.get(&cell.number) == Some(&cell.life);
                if self.has(accuser) && (self.has(cell) || is_absent) {
                    self.revision += 1;
                    self.entries.remove(&cell.number);
                    self.removed.insert(cell.number, cell.life);
                }
                EtcdAnswer::Done
            }
            EtcdRequest::Restore {
                me,
                lease,
                lives,
                revision,
            } => {
                let restores = self.revision == revision && self.leases.contains_key(&lease);
                if restores {
                    self.revision += 1;
                    self.lives.extend(lives);
                    self.entries.insert(me.number, (me.life, lease));
                }
                EtcdAnswer::Entered(restores)
            }
        }
    }

    /// Deletes all keys, as a person by mistake. Leases are gone too.
    pub fn lose_keys(&mut self) {
        self.lives.clear();
        self.entries.clear();
        self.removed.clear();
    }

    /// Restarts after an outage, and gives every lease its full time again.
    pub fn restart(&mut self, now: Time) {
        self.leases
            .values_mut()
            .for_each(|end| *end = now + self.lease_ns);
    }

    /// Whether this life has an entry.
    pub fn has(&self, cell: CellId) -> bool {
        self.entries
            .get(&cell.number)
            .is_some_and(|(life, _)| *life == cell.life)
    }

    /// Returns all registered cells with their incarnations.
    pub fn members(&self) -> Members {
        let entries = self.entries.iter();
        entries.map(|(number, (life, _))| (*number, *life)).collect()
    }

    /// Ends leases whose time is over.
    pub fn expire(&mut self, now: Time) {
        self.leases.retain(|_, end| *end > now);
        let leases = &self.leases;
        self.entries.retain(|_, (_, lease)| leases.contains_key(lease));
    }
}
