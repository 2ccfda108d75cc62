//! Borrowing of memory between the cells of a host, in a cluster file.

use serde::{Deserialize, Serialize};

use super::ClusterSpec;
use crate::fault::{Fault, fault};
use crate::size::Size;

/// Smallest amount of each kind.
const AMOUNT_MIN_BYTES: u64 = 1 << 20;

/// Whether and at which amounts the cells of a host borrow memory by themselves. An absent amount follows
/// from `chunk`, and an absent `chunk` from the host's measured rate of allocation.
#[derive(Clone, Debug, Eq, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BorrowingSpec {
    /// Whether borrowing begins by itself. If not, only commands lend and reclaim.
    #[serde(default = "yes")]
    pub automatic: bool,
    /// Amount of one loan in advance.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chunk: Option<Size>,
    /// A cell with less free memory of its own borrows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub low_water: Option<Size>,
    /// A lender keeps at least this much free memory of its own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub floor: Option<Size>,
}

fn yes() -> bool {
    true
}

impl Default for BorrowingSpec {
    fn default() -> Self {
        Self {
            automatic: true,
            chunk: None,
            low_water: None,
            floor: None,
        }
    }
}

impl ClusterSpec {
    /// Checks that each amount is large enough, and that none is set where borrowing is off.
    pub(super) fn check_borrowing(&self) -> Result<(), Fault> {
        let Some(spec) = &self.borrowing else {
            return Ok(());
        };
        let amounts = [
            ("chunk", spec.chunk),
            ("low_water", spec.low_water),
            ("floor", spec.floor),
        ];
        for (key, amount) in amounts {
            let Some(amount) = amount else { continue };
            if !spec.automatic {
                return Err(fault(
                    &["borrowing", key],
                    "an amount, and `automatic = false`: cells borrow nothing by themselves",
                    "leave out one of the two",
                ));
            }
            if amount.0 < AMOUNT_MIN_BYTES {
                return Err(fault(
                    &["borrowing", key],
                    format!("{amount} is too little to lend"),
                    "write 1M at least",
                ));
            }
        }
        if let (Some(low_water), Some(floor)) = (spec.low_water, spec.floor)
            && floor < low_water
        {
            return Err(fault(
                &["borrowing", "floor"],
                format!("a floor of {floor} below the low water of {low_water}"),
                "write the low water at least: a lender below it recalls what it has just lent",
            ));
        }
        Ok(())
    }
}
