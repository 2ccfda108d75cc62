//! Reaction of a host's cells to a shortage of memory, in a cluster file.

use serde::{Deserialize, Serialize};

use super::ClusterSpec;
use crate::fault::{Fault, fault};
use crate::size::Size;

/// Smallest low water: a smaller one comes after the host's own reaction.
const LOW_WATER_MIN_BYTES: u64 = 1 << 20;

/// Available memory of the host below which cells trim their paged VMs.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PressureSpec {
    /// Cells trim below it, and restore above one and a half times as much; by the host's memory when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub low_water: Option<Size>,
}

impl ClusterSpec {
    /// Checks that the low water is an amount that can be reached.
    pub(super) fn check_pressure(&self) -> Result<(), Fault> {
        let low_water = self.pressure.as_ref().and_then(|spec| spec.low_water);
        if let Some(low_water) = low_water
            && low_water.0 < LOW_WATER_MIN_BYTES
        {
            return Err(fault(
                &["pressure", "low_water"],
                format!("a low water of {low_water} is never reached"),
                "write 1M at least, or leave it out",
            ));
        }
        Ok(())
    }
}
