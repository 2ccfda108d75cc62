//! Sixty-four cells of one host, whose trees have relays that gather votes, and that die or hang in the midst
//! of one.

use cell::cluster::routes::Route;
use knowledge::{Base, fact};
use registry::cluster::interface::{AdmitVm, VmShare};

use super::super::*;
use crate::machine::Cells;

/// Cell that claims the key.
const SOURCE: u16 = 0;
/// Time between two moments of a vote at which relays fail. A vote takes some 110 us.
const STEP_NS: Time = 15_000;
/// Number of these moments, until the vote is over.
const MOMENTS: u64 = 10;

/// Cells that have all met, and the relays of the claimer's tree.
fn sixty_four(seed: u64) -> (World, Vec<u16>) {
    let facts = include_str!("../../../../knowledge/machines/sixty-four-nodes.facts");
    let base: Base = fact::parse(facts).unwrap().into_iter().collect();
    let cells = Cells::of(&base, None).unwrap();
    let mut route = Route::new(cells.known.clone());
    let mut world = World::new(cells, Chance::new(seed));
    world.run(SECOND).unwrap();
    route.lead(SOURCE, world.living().into_iter().skip(1).collect());
    let relays = route.hops().iter().filter(|hop| hop.below > 0);
    (world, relays.map(|hop| hop.cell.number).collect())
}

fn ask_for_place(world: &mut World) {
    let share = VmShare {
        vcpus: 1,
        memory_bytes: 1 << 28,
        ..VmShare::default()
    };
    let host = AdmitVm {
        only: Some(SOURCE),
        ..AdmitVm::new("vm".to_owned(), share)
    };
    world.ask_for_place(SOURCE, host);
}

/// The cells that are not in their first lives.
fn newborn(world: &World) -> Vec<u16> {
    let living = world.living().into_iter();
    living
        .filter(|cell| cell.life > 1)
        .map(|cell| cell.number)
        .collect()
}

#[test]
fn two_relays_that_die_in_the_midst_of_a_vote_cost_no_vote_and_no_second() {
    for moment in 0..MOMENTS {
        let (mut world, relays) = sixty_four(moment);
        let relays = &relays[..2];
        ask_for_place(&mut world);
        world.run(world.now() + moment * STEP_NS).unwrap();
        for relay in relays {
            world.kill(*relay, 20 * MILLISECOND);
        }
        world.run(world.now() + SECOND).unwrap();
        // Others see the ends of processes within 5 ms.
        assert_eq!(world.counts.hosted, 1, "moment {moment}");
        assert!(
            world.counts.waits_ns[0] < 10 * MILLISECOND,
            "{:?}",
            world.counts.waits_ns
        );
        world.rest().unwrap();
        let mut newborn = newborn(&world);
        newborn.sort_by_key(|cell| relays.iter().position(|relay| relay == cell));
        assert_eq!(newborn, relays, "moment {moment}");
    }
}

/// The cells below a relay that hangs receive the request again, over their links, before they could be taken
/// for hanging too.
#[test]
fn a_relay_that_hangs_in_the_midst_of_a_vote_is_the_only_cell_that_is_given_up() {
    for moment in 1..4 {
        let (mut world, relays) = sixty_four(moment);
        ask_for_place(&mut world);
        world.run(world.now() + moment * STEP_NS).unwrap();
        world.hang(relays[0], 20 * SECOND);
        world.run(world.now() + 5 * SECOND).unwrap();
        assert_eq!(world.counts.hosted, 1, "moment {moment}");
        world.rest().unwrap();
        assert_eq!(newborn(&world), [relays[0]], "moment {moment}");
    }
}
