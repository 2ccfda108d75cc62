//! Reserved time of CPUs: how much of a CPU the reservations of its vCPUs take.
//!
//! A reservation is of a VM, and its vCPUs may have it on any CPU. Assignment and the balancers count an
//! equal share of it for each vCPU, busy or not, so that the vCPUs of a queue can all have theirs. Two
//! vCPUs that have reserved most of a CPU each can't on one. Ours; the paper has no reservations.

use super::entitlement::RESERVABLE_PERMILLE;
use super::view::{Terms, View};
use super::{CpuId, VcpuId};

/// Share of its VM's reservation that a vCPU has, thousandths of a CPU. The shares of a VM are together at
/// least its reservation.
pub fn share(terms: &Terms) -> u32 {
    terms.reservation_permille.div_ceil(u32::from(terms.vcpus.max(1)))
}

/// Reserved time of some vCPUs together, thousandths of a CPU.
pub fn sum(view: &impl View, vcpus: impl Iterator<Item = VcpuId>) -> u32 {
    vcpus
        .map(|vcpu| share(&view.terms(vcpu.vm)))
        .fold(0, u32::saturating_add)
}

/// Reserved time of the vCPUs of a CPU's queue, as it is published.
pub fn of_queue(view: &impl View, cpu: CpuId) -> u32 {
    let slots = 0..usize::from(view.word(cpu).queued);
    sum(view, slots.filter_map(|slot| view.queued(cpu, slot)))
}

/// Reserved time of a CPU beyond what reservations may take of it.
pub fn excess(reserved_permille: u32) -> u32 {
    let reservable = u32::try_from(RESERVABLE_PERMILLE).unwrap_or(u32::MAX);
    reserved_permille.saturating_sub(reservable)
}

/// Whether a balancer may move a vCPU with this share from a CPU to another one, which have so much reserved
/// time: the receiver has room for it, or has less with it than the sender has now. No sequence of such moves
/// returns to its beginning unless each of them leaves its receiver without an excess.
pub fn may_move(share: u32, from: u32, to: u32) -> bool {
    let after = to.saturating_add(share);
    share == 0 || excess(after) == 0 || after < from
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn share_is_an_equal_part_of_the_reservation_rounded_up() {
        let of = |vcpus, reservation_permille| {
            share(&Terms {
                vcpus,
                reservation_permille,
                ..Terms::default()
            })
        };
        assert_eq!((of(1, 900), of(2, 900), of(4, 1_001)), (900, 450, 251));
        assert_eq!((of(3, 0), of(0, 7)), (0, 7));
    }

    #[test]
    fn vcpu_moves_to_a_cpu_with_room_or_with_less_reserved_time() {
        assert!(may_move(500, 500, 400), "room");
        assert!(!may_move(500, 500, 401), "no room");
        assert!(!may_move(500, 901, 401), "no room for as much as there was");
        assert!(may_move(500, 902, 401), "less than there was");
        assert!(may_move(0, 0, u32::MAX), "it has reserved nothing");
        assert!(!may_move(u32::MAX, u32::MAX, 1));
    }

    proptest! {
        /// The greater excess of the two CPUs never grows.
        #[test]
        fn move_makes_no_excess_worse(from in 0..3_000_u32, to in 0..3_000_u32, share in 0..1_500_u32) {
            let share = share.min(from);
            prop_assume!(may_move(share, from, to));
            let worst = excess(from).max(excess(to));
            prop_assert!(excess(from - share).max(excess(to + share)) <= worst);
            prop_assert!(share == 0 || excess(to + share) == 0 || to + share < from);
        }

        #[test]
        fn shares_cover_the_reservation(vcpus in 1..255_u16, reservation_permille in 0..255_000_u32) {
            let terms = Terms { vcpus, reservation_permille, ..Terms::default() };
            let all = share(&terms) * u32::from(vcpus);
            prop_assert!(all >= reservation_permille && all - reservation_permille < u32::from(vcpus));
        }
    }
}
