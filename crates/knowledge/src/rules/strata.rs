//! Stratification: a negated relation is complete before a rule uses its absence.

use std::collections::{BTreeMap, BTreeSet};

use super::{Literal, Rule, RuleError};

/// Returns the rules that a query depends on, in strata, each of which needs the complete results of those
/// before it.
///
/// # Errors
/// Fails with [`RuleError::Circle`] if a rule requires the absence of facts that follow from it.
pub(super) fn strata<'a>(rules: &'a [Rule], question: &Rule) -> Result<Vec<Vec<&'a Rule>>, RuleError> {
    let needed = needed(rules, question);
    let mut levels: BTreeMap<&str, usize> = needed.iter().map(|rule| (&rule.head.name[..], 0)).collect();
    let highest = levels.len();
    loop {
        let mut has_changed = false;
        for rule in &needed {
            let least = rule.body.iter().filter_map(|literal| match literal {
                Literal::Holds(atom) => levels.get(&atom.name[..]).copied(),
                Literal::Absent(atom) => levels.get(&atom.name[..]).map(|level| level + 1),
                Literal::Compare(..) => None,
            });
            let least = least.max().unwrap_or(0);
            if least > highest {
                return Err(RuleError::Circle(rule.head.name.clone()));
            }
            let level = levels.entry(&rule.head.name).or_default();
            has_changed |= least > *level;
            *level = least.max(*level);
        }
        if !has_changed {
            break;
        }
    }
    let mut strata = vec![Vec::new(); highest + 1];
    for rule in needed {
        strata[levels[&rule.head.name[..]]].push(rule);
    }
    Ok(strata)
}

/// Returns the rules on which the query's relations depend.
fn needed<'a>(rules: &'a [Rule], question: &Rule) -> Vec<&'a Rule> {
    let mut names: BTreeSet<&str> = question.names().collect();
    let mut needed: Vec<&Rule> = Vec::new();
    let mut others: Vec<&Rule> = rules.iter().collect();
    loop {
        let (more, rest): (Vec<&Rule>, _) = others
            .into_iter()
            .partition(|rule| names.contains(&rule.head.name[..]));
        if more.is_empty() {
            return needed;
        }
        names.extend(more.iter().flat_map(|rule| rule.names()));
        needed.extend(more);
        others = rest;
    }
}
