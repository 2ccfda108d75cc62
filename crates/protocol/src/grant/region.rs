//! Regions that cells share, and the rings of channels: memory that one cell holds and others map. Taking such a mapping from
//! all of them is one phase with a receipt from each, since their order does not matter (Multikernel, section 4.7).
//!
//! A dead process maps nothing, so its death is its receipt; and who dies takes its regions along.

use std::collections::BTreeSet;

use super::{Effect, Ledger, Message, Use};
use crate::agreement::CellNumber;

/// Who maps a region.
#[derive(Clone, Debug, Default, Eq, Hash, PartialEq)]
pub(super) struct Region {
    mapped_by: BTreeSet<CellNumber>,
    is_revoked: bool,
}

impl Ledger {
    /// Puts free memory to a region that these cells may map; those that are not there are left out. `None` if there is
    /// not so much, a region of this number already, or the use is a VM, or a channel to anything but one cell.
    pub fn share(&mut self, what: Use, bytes: u64, with: &[CellNumber]) -> Option<Vec<Effect>> {
        match what {
            Use::Vm(_) => return None,
            Use::Channel(_) if with.len() != 1 => return None,
            Use::Channel(_) | Use::Shared(_) => {}
        }
        self.occupy(what.clone(), bytes)?;
        let cells: Vec<_> = with.iter().filter_map(|number| self.met(*number)).collect();
        let region = Region {
            mapped_by: cells.iter().map(|cell| cell.number).collect(),
            is_revoked: false,
        };
        self.regions.insert(what.clone(), region);
        let map = |cell| Effect::Send(cell, Message::Map(what.clone()));
        Some(cells.into_iter().map(map).collect())
    }

    /// Takes a region from all that map it. [`Effect::Revoked`] comes when none does, and its memory is free.
    pub fn revoke(&mut self, what: &Use) -> Vec<Effect> {
        // Asked twice, receipts would come twice, and the second one for the next region of this number.
        let Some(region) = self.regions.get_mut(what).filter(|region| !region.is_revoked) else {
            return Vec::new();
        };
        region.is_revoked = true;
        let mapped_by = region.mapped_by.clone();
        let cells = mapped_by.into_iter().filter_map(|number| self.met(number));
        let unmap = |cell| Effect::Send(cell, Message::Unmap(what.clone()));
        let mut effects: Vec<Effect> = cells.map(unmap).collect();
        effects.extend(self.end_region(what));
        effects
    }

    /// What this cell may map of others.
    pub fn mapped(&self) -> impl Iterator<Item = (CellNumber, &Use)> {
        self.mapped.iter().map(|(owner, what)| (*owner, what))
    }

    /// Who may map a region of this cell's.
    pub fn mapped_by(&self, what: &Use) -> impl Iterator<Item = CellNumber> {
        let region = self.regions.get(what);
        region
            .into_iter()
            .flat_map(|region| region.mapped_by.iter().copied())
    }

    pub(super) fn map(&mut self, owner: CellNumber, what: Use) -> Vec<Effect> {
        self.mapped.insert((owner, what.clone()));
        vec![Effect::Mapped(owner, what)]
    }

    pub(super) fn unmap(&mut self, owner: crate::CellId, what: Use) -> Vec<Effect> {
        self.mapped.remove(&(owner.number, what.clone()));
        let unmapped = Effect::Unmapped(owner.number, what.clone());
        vec![unmapped, Effect::Send(owner, Message::Unmapped(what))]
    }

    /// A receipt.
    pub(super) fn is_unmapped(&mut self, by: CellNumber, what: &Use) -> Option<Effect> {
        self.regions.get_mut(what)?.mapped_by.remove(&by);
        self.end_region(what)
    }

    /// A cell is dead: it maps nothing, and nobody maps what was its.
    pub(super) fn unmap_all(&mut self, dead: CellNumber) -> Vec<Effect> {
        let gone = self.mapped.extract_if(.., |(owner, _)| *owner == dead);
        let mut effects: Vec<Effect> = gone.map(|(owner, what)| Effect::Unmapped(owner, what)).collect();
        let regions: Vec<Use> = self.regions.keys().cloned().collect();
        effects.extend(regions.iter().filter_map(|what| self.is_unmapped(dead, what)));
        effects
    }

    fn end_region(&mut self, what: &Use) -> Option<Effect> {
        let region = self.regions.get(what)?;
        if !region.is_revoked || !region.mapped_by.is_empty() {
            return None;
        }
        self.regions.remove(what);
        self.uses.remove(what);
        Some(Effect::Revoked(what.clone()))
    }
}
