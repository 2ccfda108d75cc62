//! The fact base.

use std::collections::BTreeSet;

use crate::fact::{Fact, Term};
use crate::shape;

/// A set of facts.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Base {
    facts: BTreeSet<Fact>,
}

impl Base {
    /// Adds facts. A fact with a value replaces the former value of the same terms, so assertions are added
    /// last.
    pub fn learn(&mut self, facts: impl IntoIterator<Item = Fact>) {
        for fact in facts {
            if shape::has_value(&fact.name)
                && let Some((_, key)) = fact.terms.split_last()
                && let Some(old) = self.value_of(&fact.name, key).cloned()
            {
                self.facts.remove(&old);
            }
            self.facts.insert(fact);
        }
    }

    /// All facts, sorted.
    pub fn facts(&self) -> impl Iterator<Item = &Fact> {
        self.facts.iter()
    }

    /// The facts of this name, sorted.
    pub fn named<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a Fact> {
        self.beginning(name, &[])
    }

    /// Returns the fact of this name that has a value for these terms.
    pub(crate) fn value_of<'a>(&'a self, name: &'a str, key: &'a [Term]) -> Option<&'a Fact> {
        let mut of_key = self.beginning(name, key);
        of_key.find(|fact| fact.terms.len() == key.len() + 1)
    }

    /// The facts of this name whose first terms are these: neighbours in the order of facts.
    fn beginning<'a>(&'a self, name: &'a str, terms: &'a [Term]) -> impl Iterator<Item = &'a Fact> {
        let first = Fact {
            name: name.to_owned(),
            terms: terms.to_vec(),
        };
        let from = self.facts.range(first..);
        from.take_while(move |fact| fact.name == name && fact.terms.starts_with(terms))
    }
}

impl FromIterator<Fact> for Base {
    fn from_iter<I: IntoIterator<Item = Fact>>(facts: I) -> Self {
        let mut base = Self::default();
        base.learn(facts);
        base
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;
    use crate::fact::parse;

    #[test]
    fn asserted_value_replaces_a_discovered_one() {
        let discovered = "distance(\"a\", 0, 1, 20)\ndistance(\"a\", 1, 0, 20)\nnode(\"a\", 0)";
        let mut base: Base = parse(discovered).expect("facts").into_iter().collect();
        base.learn(parse("distance(\"a\", 0, 1, 40)\nnode(\"a\", 2)").expect("facts"));
        let all: Vec<String> = base.facts().map(Fact::to_string).collect();
        assert_eq!(
            all,
            [
                "distance(\"a\", 0, 1, 40)",
                "distance(\"a\", 1, 0, 20)",
                "node(\"a\", 0)",
                "node(\"a\", 2)",
            ]
        );
    }

    #[test]
    fn asserted_value_replaces_only_the_measured_one_of_its_transport() {
        let measured = "latency_ns(\"a\", 0, 1, \"ring\", 140)\nlatency_ns(\"a\", 0, 1, \"slow\", 900)";
        let mut base: Base = parse(measured).expect("facts").into_iter().collect();
        base.learn(parse("latency_ns(\"a\", 0, 1, \"ring\", 200)").expect("facts"));
        let all: Vec<Option<i64>> = base.named("latency_ns").map(|fact| fact.number(4)).collect();
        assert_eq!(all, [Some(200), Some(900)]);
    }

    proptest! {
        /// A prefix search finds the same facts as a linear scan.
        #[test]
        fn last_value_wins(values in prop::collection::vec((0..3_i64, 0..3_i64, 0..100_i64), 0..40)) {
            let fact = |(from, to, value): &(i64, i64, i64)| {
                Fact::new("distance", ["a".into(), (*from).into(), (*to).into(), (*value).into()])
            };
            let terms = || ["a".into(), 0.into(), 0.into(), 0.into()];
            let others = ["distanc", "distance_"].map(|name| Fact::new(name, terms()));
            let mut base: Base = others.into_iter().collect();
            base.learn(values.iter().map(fact));
            let entry = |(from, to, value): &(i64, i64, i64)| ((*from, *to), *value);
            let last: BTreeMap<_, _> = values.iter().map(entry).collect();
            let known: BTreeMap<_, _> = base
                .named("distance")
                .map(|fact| ((fact.number(1).unwrap(), fact.number(2).unwrap()), fact.number(3).unwrap()))
                .collect();
            prop_assert_eq!(base.facts().count(), known.len() + 2);
            prop_assert_eq!(known, last);
        }
    }
}
