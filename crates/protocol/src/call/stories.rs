//! Stories of calls by chance: packets are lost, doubled and reordered, the ways between the two are cut for a while, one or
//! both, and the callee may die. A failing one says how it came to that.

use std::collections::{BTreeMap, VecDeque};

use super::{Act, Callee, Caller, Reply, Request};
use crate::chance::Chance;

/// Things that happen before the network is good.
const STEPS: usize = 300;
/// Steps that are remembered.
const TRACE: usize = 60;
/// Packets that are under way, at most.
const PACKETS_MAX: usize = 400;

/// Rounds in which all that has no answer is sent again.
const ROUNDS_MAX: usize = 100;

/// What came of one.
#[derive(Clone, Copy, Debug, Default)]
pub struct Outcome {
    /// Calls that were answered.
    pub answered: u64,
    /// Calls that ended with their callee.
    pub failed: u64,
    /// Times that a way was cut.
    pub cuts: u64,
}

struct Story {
    chance: Chance,
    caller: Caller<u64>,
    /// None: dead.
    callee: Option<Callee<u64>>,
    calls: u64,
    requests: Vec<Request<u64>>,
    replies: Vec<Reply<u64>>,
    executing: Vec<u64>,
    executed: Vec<u64>,
    answers: BTreeMap<u64, u64>,
    /// Nothing gets to the callee, or back.
    cut: (bool, bool),
    outcome: Outcome,
    trace: VecDeque<String>,
}

/// Tells one.
///
/// # Errors
/// With what does not hold, and the last steps.
pub fn tell(seed: u64) -> Result<Outcome, String> {
    let mut story = Story {
        chance: Chance::new(seed),
        caller: Caller::default(),
        callee: Some(Callee::default()),
        calls: 0,
        requests: Vec::new(),
        replies: Vec::new(),
        executing: Vec::new(),
        executed: Vec::new(),
        answers: BTreeMap::new(),
        cut: (false, false),
        outcome: Outcome::default(),
        trace: VecDeque::new(),
    };
    let dies = story.chance.below(3) == 0;
    let end = |what: String, story: &Story| {
        let steps: String = story.trace.iter().map(|step| format!("{step}\n")).collect();
        format!("{steps}seed {seed}: {what}")
    };
    for _ in 0..STEPS {
        if let Err(what) = story.step(dies) {
            return Err(end(what, &story));
        }
    }
    match story.end() {
        Ok(()) => Ok(story.outcome),
        Err(what) => Err(end(what, &story)),
    }
}

impl Story {
    fn say(&mut self, what: String) {
        if self.trace.len() == TRACE {
            self.trace.pop_front();
        }
        self.trace.push_back(what);
    }

    fn step(&mut self, dies: bool) -> Result<(), String> {
        match self.chance.below(40) {
            0..6 => self.call(),
            6..9 => self.again(),
            9..12 => self.finish(),
            12 if self.chance.below(4) == 0 => {
                self.cut = (self.chance.below(3) > 0, self.chance.below(3) > 0);
                self.outcome.cuts += 1;
                self.say(format!("cut there and back: {:?}", self.cut));
            }
            12 => self.cut = (false, false),
            13 if dies && self.chance.below(20) == 0 => {
                self.say("the callee dies".to_owned());
                self.callee = None;
            }
            14..27 => return self.request(),
            _ => return self.reply(),
        }
        Ok(())
    }

    fn call(&mut self) {
        if let Ok(request) = self.caller.call(self.calls) {
            self.say(format!("calls {}", self.calls));
            self.calls += 1;
            self.post(request);
        }
    }

    fn post(&mut self, request: Request<u64>) {
        if !self.cut.0 && self.requests.len() < PACKETS_MAX {
            self.requests.push(request);
        }
    }

    fn again(&mut self) {
        for request in self.caller.unanswered().collect::<Vec<_>>() {
            self.post(request);
        }
    }

    fn post_back(&mut self, reply: Reply<u64>) {
        if !self.cut.1 && self.replies.len() < PACKETS_MAX {
            self.replies.push(reply);
        }
    }

    /// Any of the requests comes; now and then it is lost, or comes again.
    fn request(&mut self) -> Result<(), String> {
        if self.requests.is_empty() {
            return Ok(());
        }
        let index = self.chance.below(self.requests.len());
        let fate = self.chance.below(10);
        let request = if fate == 1 {
            self.requests[index].clone()
        } else {
            self.requests.swap_remove(index)
        };
        if fate != 0 {
            self.take(request)?;
        }
        Ok(())
    }

    fn take(&mut self, request: Request<u64>) -> Result<(), String> {
        let number = request.number;
        let Some(callee) = &mut self.callee else {
            return Ok(());
        };
        let act = callee.take(request);
        self.say(format!("request {number}: {act:?}"));
        match act {
            Act::Execute(body) => {
                if body != self.executed.len() as u64 {
                    return Err(format!("{body} is executed after {:?}", self.executed.last()));
                }
                self.executed.push(body);
                self.executing.push(number);
            }
            Act::Again(reply) => self.post_back(reply),
            Act::Nothing => {}
        }
        Ok(())
    }

    fn finish(&mut self) {
        if self.executing.is_empty() {
            return;
        }
        let index = self.chance.below(self.executing.len());
        let number = self.executing.swap_remove(index);
        let reply = self
            .callee
            .as_mut()
            .and_then(|callee| callee.finish(number, number + 1));
        if let Some(reply) = reply {
            self.say(format!("finishes {number}"));
            self.post_back(reply);
        }
    }

    fn reply(&mut self) -> Result<(), String> {
        if self.replies.is_empty() {
            return Ok(());
        }
        let index = self.chance.below(self.replies.len());
        let fate = self.chance.below(10);
        let reply = if fate == 1 {
            self.replies[index].clone()
        } else {
            self.replies.swap_remove(index)
        };
        if fate != 0 && self.caller.take(&reply) {
            self.say(format!("answer to {}", reply.number));
            if reply.body != reply.number + 1 || self.answers.insert(reply.number, reply.body).is_some() {
                return Err(format!("a wrong or second answer to {}", reply.number));
            }
        }
        Ok(())
    }

    /// The network is good, or the callee known to be dead: every call has its end.
    fn end(&mut self) -> Result<(), String> {
        self.cut = (false, false);
        if self.callee.is_none() {
            let failed: Vec<u64> = self.caller.clone().dead().collect();
            self.outcome.failed = failed.len() as u64;
            if failed.iter().any(|number| self.answers.contains_key(number))
                || failed.len() + self.answers.len() != self.calls as usize
            {
                return Err(format!(
                    "{failed:?} fail, {:?} were answered",
                    self.answers.keys()
                ));
            }
        } else {
            // Now and then a packet is lost in the good network, too.
            for _ in 0..ROUNDS_MAX {
                if self.answers.len() == self.calls as usize {
                    break;
                }
                self.again();
                while let Some(request) = self.requests.pop() {
                    self.take(request)?;
                }
                while !self.executing.is_empty() {
                    self.finish();
                }
                while !self.replies.is_empty() {
                    self.reply()?;
                }
            }
            if self.answers.len() < self.calls as usize {
                return Err("the network is good, and a call has no answer".to_owned());
            }
        }
        self.outcome.answered = self.answers.len() as u64;
        Ok(())
    }
}
