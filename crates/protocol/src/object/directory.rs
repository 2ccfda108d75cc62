//! One cell's part of the directory.

use std::collections::{BTreeMap, BTreeSet};

use super::{Claim, Members, ObjectId};
use crate::CellId;

/// Claims of this round, and who has sent its census.
#[derive(Clone, Debug, Default, Eq, Hash, PartialEq)]
pub struct Directory {
    claims: BTreeMap<ObjectId, Claim>,
    counted: BTreeSet<CellId>,
}

impl Directory {
    /// Notes a claim, unless a later one is known.
    pub fn note(&mut self, claim: Claim) {
        let known = self.claims.entry(claim.object).or_insert(claim);
        if known.version < claim.version {
            *known = claim;
        }
    }

    /// Notes all claims of `from`.
    pub fn count(&mut self, from: CellId, claims: &[Claim]) {
        claims.iter().for_each(|claim| self.note(*claim));
        self.counted.insert(from);
    }

    /// Who has the object, if that is a later version than `above`, which its cell has no longer, or that nobody has it.
    /// `None` if neither can be said yet.
    pub fn find(&self, object: ObjectId, above: u64, members: &Members) -> Option<Claim> {
        let known = self.claims.get(&object).copied();
        let later = known.filter(|claim| claim.version > above);
        let is_complete = members.live.is_subset(&self.counted);
        later.or(is_complete.then_some(Claim {
            object,
            version: above,
            owner: None,
        }))
    }
}
