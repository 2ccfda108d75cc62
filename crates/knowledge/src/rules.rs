//! Rules and questions in Datalog.
//!
//! ```text
//! near(Host, From, To) <- distance(Host, From, To, D), D <= 20.
//! ```
//!
//! reads: `From` and `To` are near on `Host` if their distance is a `D` of at most 20. Names that begin with
//! a capital letter are variables, with the same value in a whole rule; `_` matches anything. A question is a
//! rule, whose heads are the answers, or one fact with variables in it. Comparisons are `=`, `!=`, `<`, `<=`,
//! `>`, `>=`; `not` before a fact means that there is no such fact. A variable in either must occur in a fact
//! before it.
//!
//! Rules are applied until nothing new follows, those on which a `not` depends first. Nothing makes new
//! values, so that ends. (No library that is kept up takes rules at run time, but for one that brings the
//! cryptography of access tokens along.)

mod evaluate;
mod parse;
mod strata;
mod table;

use crate::fact::Term;

pub use evaluate::{RuleError, ask};
pub use parse::{ParseError, parse};

/// The rules that are part of Mirrorball.
pub const BUILT_IN: &str = include_str!("rules/built_in.rules");

/// A Datalog rule.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Rule {
    head: Atom,
    body: Vec<Literal>,
    /// How many variables there are, numbered from 0.
    variables: usize,
}

impl Rule {
    /// Returns the names of the facts that the rule reads.
    fn names(&self) -> impl Iterator<Item = &str> {
        self.body.iter().filter_map(|literal| match literal {
            Literal::Holds(atom) | Literal::Absent(atom) => Some(&atom.name[..]),
            Literal::Compare(..) => None,
        })
    }
}

/// A fact with variables.
#[derive(Clone, Debug, Eq, PartialEq)]
struct Atom {
    name: String,
    terms: Vec<Pattern>,
}

#[derive(Clone, Debug, Eq, PartialEq)]
enum Pattern {
    Is(Term),
    Variable(usize),
    Anything,
}

#[derive(Clone, Debug, Eq, PartialEq)]
enum Literal {
    Holds(Atom),
    Absent(Atom),
    Compare(Pattern, Comparison, Pattern),
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Comparison {
    Equal,
    Different,
    Less,
    AtMost,
    More,
    AtLeast,
}

impl Comparison {
    /// Texts are ordered as texts, and numbers precede them.
    fn holds(self, left: &Term, right: &Term) -> bool {
        match self {
            Self::Equal => left == right,
            Self::Different => left != right,
            Self::Less => left < right,
            Self::AtMost => left <= right,
            Self::More => left > right,
            Self::AtLeast => left >= right,
        }
    }
}
