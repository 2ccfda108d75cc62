//! The last steps of a run, for who wants to know how it came to an error.

use std::collections::VecDeque;

use crate::{SECOND, Time};

/// Steps that are remembered.
const STEPS: usize = 80;

/// The steps, if they are wanted.
#[derive(Debug, Default)]
pub struct Trace(Option<VecDeque<String>>);

impl Trace {
    /// Remembers from now on.
    pub fn begin(&mut self) {
        self.0 = Some(VecDeque::new());
    }

    /// A step.
    pub fn say(&mut self, now: Time, what: impl FnOnce() -> String) {
        let Some(steps) = &mut self.0 else { return };
        if steps.len() == STEPS {
            steps.pop_front();
        }
        steps.push_back(format!("{:>12.6} s: {}", now as f64 / SECOND as f64, what()));
    }

    /// The steps, and what came of them.
    pub fn before(&self, what: &str) -> String {
        let steps = self.0.iter().flatten();
        steps.map(|step| format!("{step}\n")).collect::<String>() + what
    }
}
