//! Entitlement of a VM to CPU time: weight, cap, reservation, and the virtual time by which gangs take turns.

use std::fmt;

use super::Nanos;
use super::view::Terms;
use super::windows::WindowState;

/// Weight of a VM that names none, as in the kernel's `cpu.weight`.
pub const WEIGHT_DEFAULT: u32 = 100;
/// Share of each CPU that reservations may take, thousandths. Ours: a tenth is left to the host and to the
/// switches between gangs.
pub const RESERVABLE_PERMILLE: u64 = 900;

/// Class of a VM, before all other criteria of the order. The better class is the lesser one.
#[derive(Clone, Copy, Debug, Default, Eq, Ord, PartialEq, PartialOrd)]
pub enum Class {
    /// It has not had its reservation in this period.
    Reserved,
    /// It spans cells, and has its window.
    Windowed,
    /// It competes by its weight.
    #[default]
    Shared,
}

/// Claim of a VM at a time.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Standing {
    /// Whether its reservation or its weight decides now.
    pub class: Class,
    /// Whether it has reached its cap.
    pub is_throttled: bool,
    /// CPU time up to its cap, microseconds, if it has a cap.
    pub left_us: Option<u64>,
}

impl Standing {
    /// The standing of a VM whose vCPUs have used `used_us` microseconds in a period of `period` nanoseconds.
    pub fn of(terms: &Terms, used_us: u64, period: Nanos) -> Self {
        let used_ns = used_us.saturating_mul(1_000);
        let part_ns = |permille: u32| period.saturating_mul(u64::from(permille)) / 1_000;
        let cap_ns = terms.cap_permille.map(part_ns);
        Self {
            class: match terms.window {
                WindowState::Open => Class::Windowed,
                _ if used_ns < part_ns(terms.reservation_permille) => Class::Reserved,
                _ => Class::Shared,
            },
            is_throttled: terms.window == WindowState::Closed
                || cap_ns.is_some_and(|cap_ns| used_ns >= cap_ns),
            left_us: cap_ns.map(|cap_ns| cap_ns.saturating_sub(used_ns) / 1_000),
        }
    }
}

/// Number of the entitlement period at a time.
pub fn period(now: Nanos, length: Nanos) -> u32 {
    (now / length.max(1)) as u32
}

/// Virtual time of a run of one vCPU, of `busy` that its VM has at that time.
///
/// A gang that runs for a time with all its busy vCPUs advances by that time, divided by its weight, however
/// many they are. Gangs on the same CPUs therefore have time in proportion to their weights.
pub fn charge(run: Nanos, weight: u32, busy: u16) -> Nanos {
    let divisor = u128::from(weight.max(1)) * u128::from(busy.max(1));
    let time = u128::from(run) * u128::from(WEIGHT_DEFAULT) / divisor;
    u64::try_from(time).unwrap_or(u64::MAX)
}

/// Reason against the entitlement of a VM.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum EntitlementError {
    /// The reservation is above what its vCPUs can use.
    AboveVcpus {
        /// CPU time that its vCPUs can use, thousandths of a CPU.
        usable_permille: u64,
    },
    /// The CPUs have promised too much to other VMs.
    NoRoom {
        /// CPU time that others have reserved, thousandths of a CPU.
        reserved_permille: u64,
        /// CPU time that is left for reservations, thousandths of a CPU.
        free_permille: u64,
    },
}

impl fmt::Display for EntitlementError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AboveVcpus { usable_permille } => write!(
                f,
                "its vCPUs can use {} CPUs with a reservation",
                cpus(*usable_permille)
            ),
            Self::NoRoom {
                reserved_permille,
                free_permille,
            } => write!(
                f,
                "{} CPUs are reserved for other VMs, and {} are left",
                cpus(*reserved_permille),
                cpus(*free_permille)
            ),
        }
    }
}

/// Thousandths of a CPU as a decimal number of CPUs.
pub fn cpus(permille: u64) -> String {
    format!("{}.{:03}", permille / 1000, permille % 1000)
}

impl std::error::Error for EntitlementError {}

/// Checks the reservation of a VM on `cpus` CPUs, of which other VMs have reserved `reserved_permille`.
/// That it is at most the VM's cap is checked where both are written.
///
/// # Errors
/// The first reason against it.
pub fn admit(terms: &Terms, cpus: u16, reserved_permille: u64) -> Result<(), EntitlementError> {
    let wanted = u64::from(terms.reservation_permille);
    let usable_permille = RESERVABLE_PERMILLE * u64::from(terms.vcpus.min(cpus));
    if wanted > usable_permille {
        return Err(EntitlementError::AboveVcpus { usable_permille });
    }
    let free_permille = (RESERVABLE_PERMILLE * u64::from(cpus)).saturating_sub(reserved_permille);
    if wanted > free_permille {
        return Err(EntitlementError::NoRoom {
            reserved_permille,
            free_permille,
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn terms(vcpus: u16, reservation_permille: u32, cap_permille: Option<u32>) -> Terms {
        Terms {
            vcpus,
            reservation_permille,
            cap_permille,
            ..Terms::default()
        }
    }

    #[test]
    fn vm_is_reserved_below_its_reservation_and_throttled_at_its_cap() {
        let terms = terms(4, 500, Some(2_000));
        let standing = |used_us| Standing::of(&terms, used_us, 100_000_000);
        let expected = |class, is_throttled, left_us| Standing {
            class,
            is_throttled,
            left_us: Some(left_us),
        };
        assert_eq!(standing(0), expected(Class::Reserved, false, 200_000));
        assert_eq!(standing(49_999), expected(Class::Reserved, false, 150_001));
        assert_eq!(standing(50_000), expected(Class::Shared, false, 150_000));
        assert_eq!(standing(199_999), expected(Class::Shared, false, 1));
        assert_eq!(standing(200_000), expected(Class::Shared, true, 0));
        let free = Standing::of(&Terms::default(), 0, 1);
        assert_eq!(
            (free.class, free.is_throttled, free.left_us),
            (Class::Shared, false, None)
        );
    }

    #[test]
    fn reservation_is_refused_with_the_reason_and_the_amount_that_fits() {
        assert_eq!(admit(&terms(2, 1_800, None), 4, 0), Ok(()));
        let error = admit(&terms(2, 1_801, None), 4, 0).unwrap_err();
        assert_eq!(
            error,
            EntitlementError::AboveVcpus {
                usable_permille: 1_800
            }
        );
        let error = admit(&terms(4, 601, None), 4, 3_000).unwrap_err();
        assert_eq!(
            error,
            EntitlementError::NoRoom {
                reserved_permille: 3_000,
                free_permille: 600
            }
        );
        let why = "3.000 CPUs are reserved for other VMs, and 0.600 are left";
        assert_eq!(error.to_string(), why);
        assert_eq!(admit(&terms(4, 600, None), 4, 3_000), Ok(()));
    }

    proptest! {
        /// A gang's virtual time does not depend on the number of its busy vCPUs.
        #[test]
        fn gang_advances_by_its_time_over_its_weight(
            run in 0..1_u64 << 40,
            weight in 1..10_000_u32,
            busy in 1..255_u16
        ) {
            let gang: u64 = (0..busy).map(|_| charge(run, weight, busy)).sum();
            let exact = u128::from(run) * 100 / u128::from(weight);
            prop_assert!(u128::from(gang) <= exact);
            prop_assert!(exact - u128::from(gang) <= u128::from(busy));
        }
    }
}
