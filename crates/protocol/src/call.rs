//! Remote procedure calls that are executed once, between one caller and one callee.
//!
//! The caller numbers its requests and sends each again until it has the answer. The callee executes them in order, one
//! after another or several at a time, and keeps every answer until the caller says that it has it, so a request that comes
//! again gets the same answer and is not executed again. At most [`WINDOW`] calls are under way, which bounds both sides.
//!
//! If the callee dies, each call under way ends with an error; whether it was executed is then not known, nor does it
//! matter to the callee.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

#[cfg(any(test, feature = "stories"))]
pub mod stories;
#[cfg(test)]
mod tests;

/// Calls under way between two cells, at most.
pub const WINDOW: usize = 64;

/// From the caller.
#[derive(Clone, Debug, Eq, Hash, PartialEq, Serialize, Deserialize)]
pub struct Request<B> {
    /// Counts from 0.
    pub number: u64,
    /// The caller has the answers of all calls below this.
    pub done: u64,
    /// What to do.
    pub body: B,
}

/// From the callee.
#[derive(Clone, Debug, Eq, Hash, PartialEq, Serialize, Deserialize)]
pub struct Reply<A> {
    /// The request's.
    pub number: u64,
    /// The answer.
    pub body: A,
}

/// The calling side. `B` is a request's body.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct Caller<B> {
    /// Number of the first call in `calls`.
    done: u64,
    /// Calls from the oldest without an answer on. `None` has its answer.
    calls: VecDeque<Option<B>>,
}

impl<B: Clone> Default for Caller<B> {
    fn default() -> Self {
        Self {
            done: 0,
            calls: VecDeque::new(),
        }
    }
}

impl<B: Clone> Caller<B> {
    /// Begins a call: its request, to be sent. Gives the body back if too many are under way.
    ///
    /// # Errors
    /// With the body, if [`WINDOW`] calls are under way.
    pub fn call(&mut self, body: B) -> Result<Request<B>, B> {
        if self.calls.len() == WINDOW {
            return Err(body);
        }
        self.calls.push_back(Some(body.clone()));
        Ok(Request {
            number: self.done + self.calls.len() as u64 - 1,
            done: self.done,
            body,
        })
    }

    /// Takes a reply. True if it is the first one of its call, which is over now; false for one that came again.
    pub fn take<A>(&mut self, reply: &Reply<A>) -> bool {
        let index = reply.number.checked_sub(self.done);
        let call = index.and_then(|index| self.calls.get_mut(usize::try_from(index).ok()?));
        let Some(Some(_)) = call.as_deref() else {
            return false;
        };
        *call.expect("just seen") = None;
        while let Some(None) = self.calls.front() {
            self.calls.pop_front();
            self.done += 1;
        }
        true
    }

    /// The requests without an answer, to be sent again, oldest first.
    pub fn unanswered(&self) -> impl Iterator<Item = Request<B>> + '_ {
        let numbered = (self.done..).zip(&self.calls);
        numbered.filter_map(|(number, body)| {
            Some(Request {
                number,
                done: self.done,
                body: body.clone()?,
            })
        })
    }

    /// The callee is dead: the numbers of the calls that end with an error.
    pub fn dead(self) -> impl Iterator<Item = u64> {
        let numbered = (self.done..).zip(self.calls);
        numbered.filter_map(|(number, body)| body.map(|_| number))
    }
}

/// What to do about a request.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Act<B, A> {
    /// Execute it, and tell [`Callee::finish`] the answer.
    Execute(B),
    /// Send this reply again.
    Again(Reply<A>),
    /// Nothing: it is being executed, or is over and forgotten, or comes too early and will come again.
    Nothing,
}

/// The called side, for one caller. `A` is an answer.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct Callee<A> {
    /// Number of the first call in `calls`.
    done: u64,
    /// Calls begun, whose answers the caller may lack. `None` is being executed.
    calls: VecDeque<Option<A>>,
}

impl<A: Clone> Default for Callee<A> {
    fn default() -> Self {
        Self {
            done: 0,
            calls: VecDeque::new(),
        }
    }
}

impl<A: Clone> Callee<A> {
    /// Takes a request.
    pub fn take<B>(&mut self, request: Request<B>) -> Act<B, A> {
        // Only what was answered can be done; a caller that claims more harms itself alone.
        while self.done < request.done && matches!(self.calls.front(), Some(Some(_))) {
            self.calls.pop_front();
            self.done += 1;
        }
        let Some(index) = request.number.checked_sub(self.done) else {
            return Act::Nothing;
        };
        let known = self.calls.len();
        match usize::try_from(index) {
            Ok(index) if index < known => match &self.calls[index] {
                Some(answer) => Act::Again(Reply {
                    number: request.number,
                    body: answer.clone(),
                }),
                None => Act::Nothing,
            },
            Ok(index) if index == known && known < WINDOW => {
                self.calls.push_back(None);
                Act::Execute(request.body)
            }
            _ => Act::Nothing,
        }
    }

    /// A request was executed: the reply to send. `None` if there is no such request, or it was finished before.
    pub fn finish(&mut self, number: u64, answer: A) -> Option<Reply<A>> {
        let index = usize::try_from(number.checked_sub(self.done)?).ok()?;
        let call = self.calls.get_mut(index)?;
        if call.is_some() {
            return None;
        }
        *call = Some(answer.clone());
        Some(Reply { number, body: answer })
    }
}
