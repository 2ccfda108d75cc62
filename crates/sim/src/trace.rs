//! The last steps of a run, which show how an error came about.

use std::collections::VecDeque;

use crate::{SECOND, Time};

/// Number of recorded steps.
const STEPS: usize = 80;

/// The steps, if they are recorded.
#[derive(Debug, Default)]
pub struct Trace(Option<VecDeque<String>>);

impl Trace {
    /// Records from now on.
    pub fn begin(&mut self) {
        self.0 = Some(VecDeque::new());
    }

    /// Records a step.
    pub fn say(&mut self, now: Time, what: impl FnOnce() -> String) {
        let Some(steps) = &mut self.0 else { return };
        if steps.len() == STEPS {
            steps.pop_front();
        }
        steps.push_back(format!("{:>12.6} s: {}", now as f64 / SECOND as f64, what()));
    }

    /// Returns the violation of a rule after these steps.
    pub fn before(&self, rule: impl Into<String>) -> Violation {
        let steps = self.0.iter().flatten();
        Violation {
            steps: steps.map(|step| format!("{step}\n")).collect(),
            rule: rule.into(),
        }
    }
}

/// A rule that does not hold, and the last steps before, if they were remembered.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("{steps}{rule}")]
pub struct Violation {
    /// One line for each step.
    pub steps: String,
    /// The rule, in one line.
    pub rule: String,
}
