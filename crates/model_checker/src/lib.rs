//! Explicit-state model checking for the tests of other crates: every interleaving of a model's steps, by
//! breadth-first search.
//!
//! A [`Model`] has initial states, the actions of a state, and the state after each. A [`Property`] holds
//! `always`, in all states, or `sometimes`, in at least one. The second kind shows that the model does its
//! work: without it, a model whose steps stop early passes. One thread searches, so that the counterexample
//! is among the shortest, and the same in each run.

use std::fmt::Debug;
use std::hash::Hash;

use stateright::{Checker, Expectation, HasDiscoveries};
pub use stateright::{Model, Property};

/// Limit on the steps of one search, over all states. A model without a bound fails at it. The largest model
/// of the workspace has 464,312 states (November 2026).
const STEPS_MAX: usize = 20_000_000;

/// Outcome of a search.
pub struct Outcome<M: Model> {
    /// Number of different states.
    pub states: usize,
    /// Violation of the first property that does not hold in all states.
    pub violation: Option<Counterexample<M>>,
    /// Properties that hold in none of the states, and should in some.
    pub unmet: Vec<&'static str>,
}

/// Shortest run to a state without a property.
pub struct Counterexample<M: Model> {
    /// Name of the property.
    pub property: &'static str,
    /// Steps from the initial state.
    pub actions: Vec<M::Action>,
    /// State after the last step.
    pub state: M::State,
}

/// Searches all states of a model, until one violates a property.
///
/// # Panics
///
/// Panics if the search takes 20 million steps, which a model with a bound does not.
#[track_caller]
pub fn explore<M>(model: M) -> Outcome<M>
where
    M: Model + Send + Sync + 'static,
    M::State: Clone + Debug + Hash + PartialEq + Send + Sync + 'static,
    M::Action: Clone + Debug + PartialEq,
{
    explore_within(model, STEPS_MAX)
}

#[track_caller]
fn explore_within<M>(model: M, steps_max: usize) -> Outcome<M>
where
    M: Model + Send + Sync + 'static,
    M::State: Clone + Debug + Hash + PartialEq + Send + Sync + 'static,
    M::Action: Clone + Debug + PartialEq,
{
    let checker = model
        .checker()
        .finish_when(HasDiscoveries::AnyFailures)
        .target_state_count(steps_max)
        .spawn_bfs()
        .join();
    let properties = checker.model().properties();
    let mut found = checker.discoveries();
    let violated = properties.iter().find(|property| {
        !matches!(property.expectation, Expectation::Sometimes) && found.contains_key(property.name)
    });
    let violation = violated.and_then(|property| {
        let path = found.remove(property.name)?;
        Some(Counterexample {
            property: property.name,
            state: path.last_state().clone(),
            actions: path.into_actions(),
        })
    });
    let steps = checker.state_count();
    assert!(
        violation.is_some() || steps < steps_max,
        "the search is not over after {steps} steps: the model has no bound"
    );
    let is_unmet = |property: &&Property<M>| {
        matches!(property.expectation, Expectation::Sometimes) && !found.contains_key(property.name)
    };
    Outcome {
        states: checker.unique_state_count(),
        unmet: properties
            .iter()
            .filter(is_unmet)
            .map(|property| property.name)
            .collect(),
        violation,
    }
}

/// Checks that every property holds, and prints the number of states. There must be at least `states_min`
/// states, so that a mistake in the model is not taken for a proof.
///
/// # Panics
///
/// Panics with the shortest counterexample, with the properties that hold in no state, or with the number of
/// states.
#[track_caller]
pub fn check<M>(model: M, states_min: usize)
where
    M: Model + Send + Sync + 'static,
    M::State: Clone + Debug + Hash + PartialEq + Send + Sync + 'static,
    M::Action: Clone + Debug + PartialEq,
{
    let Outcome {
        states,
        violation,
        unmet,
    } = explore(model);
    println!("{states} states");
    if let Some(Counterexample {
        property,
        actions,
        state,
    }) = violation
    {
        panic!("not always {property:?}:\n{actions:#?}\nlead to\n{state:#?}");
    }
    assert!(unmet.is_empty(), "never {unmet:?}");
    assert!(states >= states_min, "{states} states");
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A counter modulo `modulus`, which may also start again.
    #[derive(Clone)]
    struct Counter {
        modulus: u32,
        forbidden: Option<u32>,
        required: u32,
    }

    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Step {
        Increment,
        Reset,
    }

    impl Model for Counter {
        type State = u32;
        type Action = Step;

        fn init_states(&self) -> Vec<u32> {
            vec![0]
        }

        fn actions(&self, _: &u32, actions: &mut Vec<Step>) {
            actions.extend([Step::Increment, Step::Reset]);
        }

        fn next_state(&self, state: &u32, action: Step) -> Option<u32> {
            Some(match action {
                Step::Increment => (state + 1) % self.modulus,
                Step::Reset => 0,
            })
        }

        fn properties(&self) -> Vec<Property<Self>> {
            vec![
                Property::always("allowed", |model: &Counter, state| {
                    model.forbidden != Some(*state)
                }),
                Property::sometimes("required", |model: &Counter, state| model.required == *state),
            ]
        }
    }

    const TEN: Counter = Counter {
        modulus: 10,
        forbidden: None,
        required: 9,
    };

    #[test]
    fn every_state_is_counted_once() {
        check(TEN, 10);
        let outcome = explore(TEN);
        assert_eq!(outcome.states, 10);
        assert!(outcome.violation.is_none() && outcome.unmet.is_empty());
    }

    #[test]
    fn counterexample_is_the_shortest_run_to_the_violation() {
        let outcome = explore(Counter {
            forbidden: Some(3),
            ..TEN
        });
        let violation = outcome.violation.unwrap();
        assert_eq!((violation.property, violation.state), ("allowed", 3));
        assert_eq!(violation.actions, [Step::Increment; 3]);
    }

    #[test]
    fn property_that_holds_in_no_state_is_reported() {
        let outcome = explore(Counter { required: 10, ..TEN });
        assert_eq!(outcome.unmet, ["required"]);
    }

    #[test]
    #[should_panic(expected = "10 states")]
    fn model_with_too_few_states_is_no_proof() {
        check(TEN, 11);
    }

    #[test]
    #[should_panic(expected = "the model has no bound")]
    fn model_without_a_bound_fails() {
        let endless = Counter {
            modulus: u32::MAX,
            required: 0,
            ..TEN
        };
        explore_within(endless, 10_000);
    }
}
