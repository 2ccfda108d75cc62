//! Evaluation of rules over facts.

use std::collections::{BTreeSet, HashMap};

use super::strata::strata;
use super::table::Table;
use super::{Atom, Literal, Pattern, Rule};
use crate::Base;
use crate::fact::{Fact, Term};

/// Limits of derived facts and of tried bindings, beyond which a question is abandoned: some questions take
/// longer than any user waits.
const FACTS_MAX: usize = 200_000;
const TRIES_MAX: u64 = 20_000_000;

/// Why there is no answer.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum RuleError {
    /// Too much follows.
    #[error("more than {FACTS_MAX} facts follow; ask for less at a time")]
    TooMany,
    /// The query takes too long.
    #[error("it takes too long; put the fact with the fewest answers first")]
    TooLong,
    /// A rule negates a relation that depends on the rule.
    #[error("`{0}` depends on its own absence; take the `not` out of one of its rules")]
    Circle(String),
}

/// The answers to a question, sorted.
///
/// # Errors
/// If there are too many, or rules contradict themselves.
pub fn ask(base: &Base, rules: &[Rule], question: &Rule) -> Result<Vec<Fact>, RuleError> {
    let mut known = Known::of(base, rules, question)?;
    let answers = known.apply(question)?;
    let fact = |terms| Fact {
        name: question.head.name.clone(),
        terms,
    };
    Ok(answers.into_iter().map(fact).collect())
}

/// The facts that are derived so far, by name.
struct Known<'a> {
    facts: HashMap<&'a str, Table>,
    count: usize,
    tries: u64,
}

/// Bindings of a rule's variables, and the rows found so far.
struct Search<'a> {
    facts: &'a HashMap<&'a str, Table>,
    head: &'a Atom,
    bound: Vec<Option<Term>>,
    found: BTreeSet<Vec<Term>>,
    tries: u64,
}

impl<'a> Known<'a> {
    /// Returns all of `base` and the derived facts on which the question depends.
    fn of(base: &'a Base, rules: &'a [Rule], question: &Rule) -> Result<Self, RuleError> {
        let mut known = Self {
            facts: HashMap::new(),
            count: 0,
            tries: 0,
        };
        for fact in base.facts() {
            known.add(&fact.name, fact.terms.clone())?;
        }
        for stratum in strata(rules, question)? {
            loop {
                let before = known.count;
                for rule in &stratum {
                    for terms in known.apply(rule)? {
                        known.add(&rule.head.name, terms)?;
                    }
                }
                if known.count == before {
                    break;
                }
            }
        }
        Ok(known)
    }

    fn add(&mut self, name: &'a str, terms: Vec<Term>) -> Result<(), RuleError> {
        if self.facts.entry(name).or_default().add(terms) {
            self.count += 1;
        }
        if self.count > FACTS_MAX {
            return Err(RuleError::TooMany);
        }
        Ok(())
    }

    /// Returns the rows that one application of a rule derives.
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
                self.each(atom, |search| search.join(rest).map(|()| true))?;
            }
            Literal::Absent(atom) => {
                let mut is_there = false;
                self.each(atom, |_| {
                    is_there = true;
                    Ok(false)
                })?;
                if !is_there {
                    self.join(rest)?;
                }
            }
        }
        Ok(())
    }

    /// Calls `then` for every fact that matches `atom`, its variables bound, as long as it returns true.
    fn each(
        &mut self,
        atom: &Atom,
        mut then: impl FnMut(&mut Self) -> Result<bool, RuleError>,
    ) -> Result<(), RuleError> {
        let Some(table) = self.facts.get(&atom.name[..]) else {
            return Ok(());
        };
        let values: Vec<(usize, Term)> = (0..)
            .zip(&atom.terms)
            .filter_map(|(place, pattern)| Some((place, self.value(pattern)?)))
            .collect();
        for terms in table.candidates(values.iter().map(|(place, term)| (*place, term))) {
            self.tries += 1;
            if self.tries > TRIES_MAX {
                return Err(RuleError::TooLong);
            }
            if let Some(newly) = self.bind(atom, terms) {
                let result = then(self);
                newly.into_iter().for_each(|variable| self.bound[variable] = None);
                if !result? {
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    /// Binds the free variables in `atom` so that it is the fact, and returns the newly bound ones. `None` if
    /// that is impossible.
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
    use proptest::prelude::*;

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
    fn recursion_reaches_the_fixed_point() {
        let chain: String = (0..50).map(|n| format!("link({n}, {})\n", n + 1)).collect();
        let rules = "reaches(A, B) <- link(A, B). reaches(A, C) <- reaches(A, B), link(B, C).";
        assert_eq!(answers(&base(&chain), rules, "reaches(0, X)").len(), 50);
        assert_eq!(
            answers(&base(&chain), rules, "q(X) <- reaches(X, 3), X >= 1"),
            ["q(1)", "q(2)"]
        );
    }

    #[test]
    fn variable_is_bound_once_per_rule_and_underscore_never() {
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

    proptest! {
        /// A query by any terms finds each matching row, and reports an absent one as absent.
        #[test]
        fn fact_is_present_or_absent(pairs in prop::collection::btree_set((0..6_i64, 0..6_i64), 0..20)) {
            let facts: String = pairs.iter().map(|(a, b)| format!("pair({a}, {b})\n")).collect();
            let all: String = (0..6).map(|n| format!("n({n})\n")).collect();
            let base = base(&(facts + &all));
            let there: Vec<String> = pairs.iter().map(|(a, b)| format!("q({a}, {b})")).collect();
            prop_assert_eq!(answers(&base, "", "q(A, B) <- n(B), n(A), pair(A, B)"), there);
            let all = (0..6).flat_map(|a| (0..6).map(move |b| (a, b)));
            let absent = all.filter(|pair| !pairs.contains(pair));
            let absent: Vec<String> = absent.map(|(a, b)| format!("q({a}, {b})")).collect();
            prop_assert_eq!(answers(&base, "", "q(A, B) <- n(A), n(B), not pair(A, B)"), absent);
            let first: BTreeSet<i64> = pairs.iter().map(|(a, _)| *a).collect();
            let lonely = (0..6).filter(|n| !first.contains(n)).map(|n| format!("q({n})"));
            prop_assert_eq!(answers(&base, "", "q(A) <- n(A), not pair(A, _)"), lonely.collect::<Vec<_>>());
        }
    }

    #[test]
    fn negated_relations_are_complete_before_use() {
        let rules =
            "least(X) <- n(X), not more(X). more(X) <- n(X), n(Y), Y < X. odd(X) <- next(Y, X), not odd(Y).";
        let base = base("n(7)\nn(3)\nn(5)\nnext(1, 2)");
        assert_eq!(answers(&base, rules, "least(X)"), ["least(3)"]);
        // Unused by the query, so no error.
        let rules = parse(rules).expect("rules");
        let question = parse("odd(X)").expect("a question").remove(0);
        assert_eq!(
            ask(&base, &rules, &question),
            Err(RuleError::Circle("odd".to_owned()))
        );
    }

    #[test]
    fn query_beyond_the_work_limit_is_aborted() {
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
    fn built_in_rules_derive_near_nodes_and_cache_sharing() {
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

    #[test]
    fn built_in_rules_derive_near_cells_and_their_transports() {
        let cells = "host(\"a\")\nnode(\"a\", 0)\nnode(\"a\", 1)\ncell(0, \"a\")\ncell(1, \"a\")\ncell(2, \
            \"a\")\ncell(3, \"b\")\n\
            cell_node(0, 0)\ncell_node(1, 0)\ncell_node(2, 1)\ncell_node(3, 0)\n\
            distance(\"a\", 0, 1, 15)\ndistance(\"a\", 1, 0, 30)\n\
            host_latency_ns(\"a\", \"b\", \"tls\", 40000)\nhost_latency_ns(\"a\", \"b\", \"shared\", 2000)\n\
            shares_memory(\"a\", \"b\")";
        let mut cells = base(cells);
        cells.learn(crate::route_costs::RouteCosts::of(&cells).facts());
        let ask = |question: &str| answers(&cells, BUILT_IN, question);
        assert_eq!(ask("q(B) <- near_cell(0, B)"), ["q(1)", "q(2)"]);
        assert_eq!(ask("q(B) <- near_cell(2, B)"), [""; 0]);
        assert_eq!(ask("q(B) <- nearest_cell(0, B)"), ["q(1)"]);
        assert_eq!(ask("q(B) <- nearest_cell(3, B)"), ["q(0)", "q(1)", "q(2)"]);
        assert_eq!(ask("q(T) <- transport(0, 2, T)"), ["q(\"ring\")"]);
        assert_eq!(ask("q(T) <- transport(0, 3, T)"), ["q(\"shared\")"]);
    }

    /// Includes a thousand CPUs and the measurements between them.
    #[test]
    fn queries_over_large_machines_finish_in_time() {
        let mut machine = base(include_str!("../../machines/sixty-four-nodes.facts"));
        let name: &str = "sixty-four-nodes";
        for from in 0..64 {
            machine.learn([
                Fact::new("cell", [from.into(), name.into()]),
                Fact::new("cell_node", [from.into(), from.into()]),
            ]);
            machine.learn((0..64).map(|to| {
                Fact::new(
                    "latency_ns",
                    [
                        name.into(),
                        (from * 16).into(),
                        (to * 16).into(),
                        "ring".into(),
                        (100 + from + to).into(),
                    ],
                )
            }));
        }
        for cpu in 0..1024_i64 {
            machine.learn([Fact::new(
                "core",
                [name.into(), cpu.into(), (cpu / 16).into(), (cpu / 2).into()],
            )]);
            for (level, shared) in [(1, 2), (2, 2), (3, 16)] {
                let cache = format!("L{level}-{}", cpu / shared);
                let terms = [
                    name.into(),
                    cache.as_str().into(),
                    level.into(),
                    "Unified".into(),
                    1.into(),
                ];
                machine.learn([
                    Fact::new("cache", terms),
                    Fact::new("cached", [name.into(), cpu.into(), cache.as_str().into()]),
                ]);
            }
        }
        machine.learn(crate::route_costs::RouteCosts::of(&machine).facts());
        for (question, count) in [
            ("nearest_cell(0, B)", 1),
            ("transport(0, 1, T)", 1),
            ("share_cache(H, 0, B, L)", 1 + 1 + 15),
            ("threads(H, 0, B)", 1),
        ] {
            assert_eq!(answers(&machine, BUILT_IN, question).len(), count, "{question}");
        }
    }
}
