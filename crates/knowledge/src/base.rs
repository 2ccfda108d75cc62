//! The facts that are known.

use std::collections::BTreeSet;

use crate::fact::Fact;

/// Facts whose last term is a value of which there is only one: a new value replaces the old one.
const VALUES: &[&str] = &[
    "bandwidth_mb_s",
    "cpus",
    "distance",
    "latency_ns",
    "memory_bytes",
    "speed_mbit_s",
];

/// All facts.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Base {
    facts: BTreeSet<Fact>,
}

impl Base {
    /// Adds facts. One that gives a value replaces what is known of it, so what is asserted comes last.
    pub fn learn(&mut self, facts: impl IntoIterator<Item = Fact>) {
        for fact in facts {
            if VALUES.contains(&fact.name.as_str()) {
                let key = |of: &Fact| of.terms.split_last().map(|(_, key)| key.to_vec());
                let same = key(&fact);
                self.facts
                    .retain(|known| known.name != fact.name || key(known) != same);
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
        self.facts.iter().filter(move |fact| fact.name == name)
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
    use super::*;
    use crate::fact::parse;

    #[test]
    fn an_asserted_value_replaces_a_discovered_one() {
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
}
