//! Schemas of the facts that Mirrorball itself uses: names and meanings of their terms.
//! `docs/guide/knowledge.md` describes them.
//!
//! A fact with one of these names and other terms would be ignored silently, so parsing refuses it. Users may
//! define facts with other names.

use crate::fact::{Fact, Term};

/// Kind of a term.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Kind {
    Text,
    Number,
    /// A value, from 0 on: one per combination of the terms before it, so a new one replaces it.
    Value,
}

use Kind::{Number, Text, Value};

type Terms = &'static [(&'static str, Kind)];

const PAIR_OF_CPUS: Terms = &[
    ("Host", Text),
    ("From", Number),
    ("To", Number),
    ("Transport", Text),
    ("Value", Value),
];

const SHAPES: &[(&str, Terms)] = &[
    // Discovered.
    ("host", &[("Host", Text)]),
    ("node", &[("Host", Text), ("Node", Number)]),
    ("cpus", &[("Host", Text), ("Node", Number), ("Count", Value)]),
    (
        "memory_bytes",
        &[("Host", Text), ("Node", Number), ("Bytes", Value)],
    ),
    ("cpu", &[("Host", Text), ("Cpu", Number), ("Node", Number)]),
    (
        "core",
        &[
            ("Host", Text),
            ("Cpu", Number),
            ("Package", Number),
            ("Core", Number),
        ],
    ),
    (
        "cache",
        &[
            ("Host", Text),
            ("Cache", Text),
            ("Level", Number),
            ("Kind", Text),
            ("Bytes", Number),
        ],
    ),
    ("cached", &[("Host", Text), ("Cpu", Number), ("Cache", Text)]),
    (
        "distance",
        &[
            ("Host", Text),
            ("From", Number),
            ("To", Number),
            ("Distance", Value),
        ],
    ),
    (
        "device",
        &[
            ("Host", Text),
            ("Address", Text),
            ("Class", Text),
            ("Node", Number),
        ],
    ),
    ("nic", &[("Host", Text), ("Name", Text), ("Node", Number)]),
    (
        "speed_mbit_s",
        &[("Host", Text), ("Name", Text), ("Speed", Value)],
    ),
    // Measured.
    ("latency_ns", PAIR_OF_CPUS),
    ("send_ns", PAIR_OF_CPUS),
    ("bandwidth_mb_s", PAIR_OF_CPUS),
    (
        "host_latency_ns",
        &[("From", Text), ("To", Text), ("Transport", Text), ("Ns", Value)],
    ),
    // Cluster.
    ("cell", &[("Cell", Number), ("Host", Text)]),
    ("cell_cpu", &[("Cell", Number), ("Cpu", Number)]),
    ("cell_node", &[("Cell", Number), ("Node", Number)]),
    ("cell_runs", &[("Cell", Number)]),
    ("cell_cordoned", &[("Cell", Number)]),
    ("cell_free_bytes", &[("Cell", Number), ("Bytes", Value)]),
    ("cell_cpus", &[("Cell", Number), ("Count", Value)]),
    ("cell_vcpus", &[("Cell", Number), ("Count", Value)]),
    ("shares_memory", &[("Host", Text), ("Other", Text)]),
    // Derived or asserted.
    (
        "message_ns",
        &[
            ("From", Number),
            ("To", Number),
            ("Transport", Text),
            ("Ns", Value),
        ],
    ),
    // Queries.
    ("wants", &[("Cpus", Number), ("Bytes", Number)]),
];

fn shape(name: &str) -> Option<Terms> {
    let known = SHAPES.iter().find(|(known, _)| *known == name);
    known.map(|(_, terms)| *terms)
}

/// Whether facts of this name end with a value.
pub(crate) fn has_value(name: &str) -> bool {
    shape(name).is_some_and(|terms| terms.iter().any(|(_, kind)| *kind == Value))
}

/// A fact that does not match the schema of its name, with the help.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub(crate) enum ShapeError {
    #[error("{name} has {has} terms instead of {wants}; {written}")]
    Count {
        name: String,
        has: usize,
        wants: usize,
        /// How to write the fact.
        written: String,
    },
    #[error("{term} must be {wanted}; {written}")]
    Term {
        /// Name of the term.
        term: &'static str,
        wanted: &'static str,
        /// How to write the fact.
        written: String,
    },
}

/// Checks a fact against the schema of its name.
///
/// # Errors
/// If its name has a schema that the terms do not match; the text includes the help.
pub(crate) fn check(fact: &Fact) -> Result<(), ShapeError> {
    let Some(terms) = shape(&fact.name) else {
        return Ok(());
    };
    let names: Vec<&str> = terms.iter().map(|(name, _)| *name).collect();
    let written = format!("write `{}({})`", fact.name, names.join(", "));
    if fact.terms.len() != terms.len() {
        return Err(ShapeError::Count {
            name: fact.name.clone(),
            has: fact.terms.len(),
            wants: terms.len(),
            written,
        });
    }
    for (term, (name, kind)) in fact.terms.iter().zip(terms) {
        let wanted = match (kind, term) {
            (Text, Term::Text(_)) | (Number, Term::Number(_)) | (Value, Term::Number(0..)) => continue,
            (Text, Term::Number(_)) => "a text in quotes",
            (Number, Term::Text(_)) => "a number",
            (Value, _) => "a number from 0 on",
        };
        return Err(ShapeError::Term {
            term: name,
            wanted,
            written,
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_last_term_of_a_schema_is_a_value() {
        for (name, terms) in SHAPES {
            let before = terms.iter().rev().skip(1);
            assert!(before.clone().all(|(_, kind)| *kind != Value), "{name}");
        }
        assert!(has_value("latency_ns") && !has_value("node") && !has_value("somebody_elses"));
    }
}
