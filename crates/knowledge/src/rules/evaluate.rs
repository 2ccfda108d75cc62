//! What follows from facts.

use std::collections::{BTreeMap, BTreeSet};

use super::{Atom, Literal, Pattern, Rule};
use crate::Base;
use crate::fact::{Fact, Term};

/// Facts that may follow, and bindings that may be tried, until a question is given up: a question can be made that takes
/// longer than anybody waits.
const FACTS_MAX: usize = 200_000;
const TRIES_MAX: u64 = 20_000_000;

/// Why there is no answer.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub enum RuleError {
    /// Too much follows.
    #[error("more than {FACTS_MAX} facts follow; ask for less at a time")]
    TooMany,
    /// It takes too long.
    #[error("it takes too long; put the fact with the fewest answers first")]
    TooLong,
}

/// The answers to a question, sorted.
///
/// # Errors
/// If there are too many.
pub fn ask(base: &Base, rules: &[Rule], question: &Rule) -> Result<Vec<Fact>, RuleError> {
    let mut known = Known::of(base, rules)?;
    let answers = known.apply(question)?;
    let fact = |terms| Fact {
        name: question.head.name.clone(),
        terms,
    };
    Ok(answers.into_iter().map(fact).collect())
}

/// What is known, by name.
struct Known<'a> {
    facts: BTreeMap<&'a str, BTreeSet<Vec<Term>>>,
    count: usize,
    tries: u64,
}

/// What a rule's variables stand for, and what is found so far.
struct Search<'a> {
    facts: &'a BTreeMap<&'a str, BTreeSet<Vec<Term>>>,
    head: &'a Atom,
    bound: Vec<Option<Term>>,
    found: BTreeSet<Vec<Term>>,
    tries: u64,
}

impl<'a> Known<'a> {
    /// All of `base` and what follows.
    fn of(base: &'a Base, rules: &'a [Rule]) -> Result<Self, RuleError> {
        let mut known = Self {
            facts: BTreeMap::new(),
            count: 0,
            tries: 0,
        };
        for fact in base.facts() {
            known.add(&fact.name, fact.terms.clone())?;
        }
        loop {
            let before = known.count;
            for rule in rules {
                for terms in known.apply(rule)? {
                    known.add(&rule.head.name, terms)?;
                }
            }
            if known.count == before {
                return Ok(known);
            }
        }
    }

    fn add(&mut self, name: &'a str, terms: Vec<Term>) -> Result<(), RuleError> {
        if self.facts.entry(name).or_default().insert(terms) {
            self.count += 1;
        }
        if self.count > FACTS_MAX {
            return Err(RuleError::TooMany);
        }
        Ok(())
    }

    /// What follows by one rule at once.
    fn apply(&mut self, rule: &Rule) -> Result<BTreeSet<Vec<Term>>, RuleError> {
        let mut search = Search {
            facts: &self.facts,
            head: &rule.head,
            bound: vec![None; rule.variables],
            found: BTreeSet::new(),
            tries: self.tries,
        };
        search.join(&rule.body)?;
        self.tries = search.tries;
        Ok(search.found)
    }
}

impl Search<'_> {
    /// Goes through every way in which all of `body` holds.
    fn join(&mut self, body: &[Literal]) -> Result<(), RuleError> {
        let Some((first, rest)) = body.split_first() else {
            let terms: Option<Vec<Term>> = self.head.terms.iter().map(|term| self.value(term)).collect();
            self.found.extend(terms);
            return if self.found.len() > FACTS_MAX {
                Err(RuleError::TooMany)
            } else {
                Ok(())
            };
        };
        match first {
            Literal::Compare(left, comparison, right) => {
                if let (Some(left), Some(right)) = (self.value(left), self.value(right))
                    && comparison.holds(&left, &right)
                {
                    self.join(rest)?;
                }
            }
            Literal::Holds(atom) => {
                let facts = self.facts;
                for terms in facts.get(atom.name.as_str()).into_iter().flatten() {
                    self.tries += 1;
                    if self.tries > TRIES_MAX {
                        return Err(RuleError::TooLong);
                    }
                    if let Some(newly) = self.bind(atom, terms) {
                        let result = self.join(rest);
                        newly.into_iter().for_each(|variable| self.bound[variable] = None);
                        result?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Binds what is free in `atom` so that it is the fact: the variables bound by that. `None` if it can't be.
    fn bind(&mut self, atom: &Atom, terms: &[Term]) -> Option<Vec<usize>> {
        if atom.terms.len() != terms.len() {
            return None;
        }
        let mut newly = Vec::new();
        for (pattern, term) in atom.terms.iter().zip(terms) {
            let fits = match pattern {
                Pattern::Is(wanted) => wanted == term,
                Pattern::Anything => true,
                Pattern::Variable(variable) => match &self.bound[*variable] {
                    Some(bound) => bound == term,
                    None => {
                        self.bound[*variable] = Some(term.clone());
                        newly.push(*variable);
                        true
                    }
                },
            };
            if !fits {
                newly.into_iter().for_each(|variable| self.bound[variable] = None);
                return None;
            }
        }
        Some(newly)
    }

    fn value(&self, pattern: &Pattern) -> Option<Term> {
        match pattern {
            Pattern::Is(term) => Some(term.clone()),
            Pattern::Variable(variable) => self.bound[*variable].clone(),
            Pattern::Anything => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{BUILT_IN, parse};
    use super::*;
    use crate::fact;

    fn base(text: &str) -> Base {
        fact::parse(text).expect("facts").into_iter().collect()
    }

    fn answers(base: &Base, rules: &str, question: &str) -> Vec<String> {
        let rules = parse(rules).expect("rules");
        let question = parse(question).expect("a question").remove(0);
        let answers = ask(base, &rules, &question).expect("an answer");
        answers.iter().map(Fact::to_string).collect()
    }

    #[test]
    fn what_follows_follows_through_any_number_of_steps() {
        let chain: String = (0..50).map(|n| format!("link({n}, {})\n", n + 1)).collect();
        let rules = "reaches(A, B) <- link(A, B). reaches(A, C) <- reaches(A, B), link(B, C).";
        assert_eq!(answers(&base(&chain), rules, "reaches(0, X)").len(), 50);
        assert_eq!(
            answers(&base(&chain), rules, "q(X) <- reaches(X, 3), X >= 1"),
            ["q(1)", "q(2)"]
        );
    }

    #[test]
    fn a_name_is_the_same_in_a_whole_rule_and_an_underscore_never() {
        let base = base("pair(1, 1)\npair(1, 2)\npair(\"a\", \"a\")");
        assert_eq!(
            answers(&base, "", "pair(X, X)"),
            ["pair(1, 1)", "pair(\"a\", \"a\")"]
        );
        assert_eq!(
            answers(&base, "", "left(X) <- pair(X, _)"),
            ["left(1)", "left(\"a\")"]
        );
        assert_eq!(answers(&base, "", "q(X, Y) <- pair(X, Y), X != Y"), ["q(1, 2)"]);
        assert_eq!(answers(&base, "", "nothing(X)"), [""; 0]);
    }

    #[test]
    fn a_question_without_end_is_given_up() {
        let many: String = (0..2000).map(|n| format!("n({n})\n")).collect();
        let question = parse("q(A, B, C) <- n(A), n(B), n(C)")
            .expect("a question")
            .remove(0);
        assert_eq!(ask(&base(&many), &[], &question), Err(RuleError::TooMany));
        let question = parse("q(A) <- n(A), n(B), n(C), B > 5000")
            .expect("a question")
            .remove(0);
        assert_eq!(ask(&base(&many), &[], &question), Err(RuleError::TooLong));
    }

    #[test]
    fn the_built_in_rules_know_which_nodes_are_near_and_which_cpus_share() {
        let machine = base(include_str!("../../machines/two-sockets.facts"));
        assert_eq!(
            answers(&machine, BUILT_IN, "near(_, 0, N)"),
            [""; 0],
            "the other socket is far"
        );
        assert_eq!(
            answers(&machine, BUILT_IN, "far(_, 0, N)"),
            ["far(\"two-sockets\", 0, 1)"]
        );
        assert_eq!(answers(&machine, BUILT_IN, "q(C) <- threads(_, 0, C)"), ["q(8)"]);
        assert_eq!(
            answers(&machine, BUILT_IN, "q(D) <- near_device(_, 1, D)"),
            ["q(\"0000:81:00.0\")"]
        );
    }
}
