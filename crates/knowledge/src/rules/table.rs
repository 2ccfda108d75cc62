//! The rows of one relation, indexed by each term.

use std::collections::{HashMap, HashSet};
use std::rc::Rc;

use crate::fact::Term;

/// The rows of one relation, without duplicates.
#[derive(Debug, Default)]
pub(super) struct Table {
    rows: Vec<Rc<[Term]>>,
    known: HashSet<Rc<[Term]>>,
    /// Rows by position and term, in order of insertion.
    places: Vec<HashMap<Term, Vec<usize>>>,
}

impl Table {
    /// Adds a row. Returns false if the table has it already.
    pub(super) fn add(&mut self, terms: Vec<Term>) -> bool {
        let row: Rc<[Term]> = terms.into();
        if !self.known.insert(row.clone()) {
            return false;
        }
        if self.places.len() < row.len() {
            self.places.resize_with(row.len(), HashMap::new);
        }
        for (place, term) in self.places.iter_mut().zip(row.iter()) {
            // A term is copied once, not for each row.
            match place.get_mut(term) {
                Some(rows) => rows.push(self.rows.len()),
                None => _ = place.insert(term.clone(), vec![self.rows.len()]),
            }
        }
        self.rows.push(row);
        true
    }

    /// Returns a superset of the rows with the `bound` terms at their positions: the rows of the rarest term.
    pub(super) fn candidates<'a>(
        &'a self,
        bound: impl Iterator<Item = (usize, &'a Term)>,
    ) -> impl Iterator<Item = &'a [Term]> {
        let mut fewest: Option<&[usize]> = None;
        for (place, term) in bound {
            let rows = self.places.get(place).and_then(|terms| terms.get(term));
            let rows = rows.map_or(&[][..], Vec::as_slice);
            if fewest.is_none_or(|fewest| rows.len() < fewest.len()) {
                fewest = Some(rows);
            }
        }
        let all = fewest.is_none().then_some(&self.rows[..]);
        let some = fewest.unwrap_or_default().iter().map(|row| &*self.rows[*row]);
        all.into_iter().flatten().map(|row| &**row).chain(some)
    }
}
