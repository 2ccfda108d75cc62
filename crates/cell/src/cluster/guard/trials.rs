//! The program that a cell's processes execute. Without I/O, clock or threads.

/// The program of a cell's processes, and the one before while it is on trial.
#[derive(Debug, Default)]
pub struct Trials<P> {
    program: P,
    /// The program before the one that is on trial.
    former: Option<P>,
}

impl<P> Trials<P> {
    /// A cell whose processes execute `program`.
    pub fn new(program: P) -> Self {
        Self {
            program,
            former: None,
        }
    }

    /// The program of the next process.
    pub fn program(&self) -> &P {
        &self.program
    }

    /// Puts a new program in the place of the former one, on trial. [`Self::end`] follows.
    pub fn begin(&mut self, new: P) {
        let former = std::mem::replace(&mut self.program, new);
        // A program on trial is none to go back to.
        self.former.get_or_insert(former);
    }

    /// Ends the trial: a program that has not adopted the cell's VMs gives way to the former one.
    pub fn end(&mut self, has_adopted: bool) {
        if let Some(former) = self.former.take()
            && !has_adopted
        {
            self.program = former;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn program_that_fails_its_trial_gives_way_to_the_former_one() {
        let mut trials = Trials::new(1);
        trials.begin(2);
        assert_eq!(*trials.program(), 2);
        trials.end(false);
        assert_eq!(*trials.program(), 1);
        trials.begin(3);
        trials.end(true);
        assert_eq!(*trials.program(), 3);
        trials.end(false);
        assert_eq!(*trials.program(), 3, "there was no trial");
    }

    #[test]
    fn program_on_trial_is_never_gone_back_to() {
        let mut trials = Trials::new(1);
        trials.begin(2);
        trials.begin(3);
        trials.end(false);
        assert_eq!(*trials.program(), 1);
    }
}
