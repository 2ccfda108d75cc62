//! Model checking of every interleaving of a model's steps.

use std::fmt::Debug;
use std::hash::Hash;

use stateright::{Checker, HasDiscoveries, Model};

/// Checks every interleaving. Fails below `states_least` states, so that a model without steps does not count
/// as a proof.
#[track_caller]
pub(crate) fn check<M>(model: M, states_least: usize)
where
    M: Model + Send + Sync + 'static,
    M::State: Clone + Debug + Hash + PartialEq + Send + Sync + 'static,
    M::Action: Clone + Debug + PartialEq,
{
    let checker = model
        .checker()
        .threads(2)
        .finish_when(HasDiscoveries::AnyFailures)
        .spawn_bfs()
        .join();
    let states = checker.unique_state_count();
    println!("{states} states");
    checker.assert_properties();
    assert!(states >= states_least, "{states} states");
}
