//! Rules from text.

use std::collections::BTreeMap;

use super::{Atom, Comparison, Literal, Pattern, Rule};
use crate::fact::Term;

/// Syntax error in rules.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("line {line}, column {column}: {what}")]
pub struct ParseError {
    /// Line number, from 1.
    pub line: usize,
    /// Column in characters, from 1.
    pub column: usize,
    what: String,
}

/// Reads rules, each ended by `.`; after the last one it may be missing.
///
/// # Errors
/// The first syntax error.
pub fn parse(text: &str) -> Result<Vec<Rule>, ParseError> {
    let mut reader = Reader { text, at: 0 };
    let mut rules = Vec::new();
    reader.skip();
    while !reader.rest().is_empty() {
        rules.push(reader.rule()?);
        if !reader.eat(".") && !reader.rest().is_empty() {
            return Err(reader.error("a rule ends with `.`, and its conditions are separated by `,`"));
        }
    }
    Ok(rules)
}

struct Reader<'a> {
    text: &'a str,
    at: usize,
}

/// The variables of one rule, by name.
type Names<'a> = BTreeMap<&'a str, usize>;

impl<'a> Reader<'a> {
    fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    fn error(&self, what: impl Into<String>) -> ParseError {
        let before = &self.text[..self.at];
        let line_start = before.rfind('\n').map_or(0, |end| end + 1);
        ParseError {
            line: before.matches('\n').count() + 1,
            column: before[line_start..].chars().count() + 1,
            what: what.into(),
        }
    }

    /// Skips spaces and comments.
    fn skip(&mut self) {
        loop {
            let rest = self.rest();
            let trimmed = rest.trim_start();
            self.at += rest.len() - trimmed.len();
            if !trimmed.starts_with('#') {
                return;
            }
            self.at += trimmed.find('\n').unwrap_or(trimmed.len());
        }
    }

    fn eat(&mut self, sign: &str) -> bool {
        let found = self.rest().starts_with(sign);
        if found {
            self.at += sign.len();
            self.skip();
        }
        found
    }

    fn word(&mut self) -> &'a str {
        let rest = self.rest();
        let end = rest.find(|sign: char| !sign.is_ascii_alphanumeric() && sign != '_');
        let word = &rest[..end.unwrap_or(rest.len())];
        self.at += word.len();
        self.skip();
        word
    }

    fn rule(&mut self) -> Result<Rule, ParseError> {
        let mut names = Names::new();
        let start = self.at;
        let head = self.atom(&mut names)?;
        let in_head = names.len();
        let mut body = Vec::new();
        if self.eat("<-") || self.eat(":-") {
            let mut known: Vec<bool> = Vec::new();
            loop {
                let before = self.at;
                let literal = self.literal(&mut names)?;
                known.resize(names.len(), false);
                let unknown = match &literal {
                    Literal::Holds(atom) => {
                        variables(&atom.terms).for_each(|variable| known[variable] = true);
                        None
                    }
                    Literal::Absent(atom) => variables(&atom.terms).find(|variable| !known[*variable]),
                    Literal::Compare(left, _, right) => {
                        variables([left, right]).find(|variable| !known[*variable])
                    }
                };
                if let Some(unknown) = unknown {
                    self.at = before;
                    return Err(self.error(format!("{} is in no fact before this", name_of(&names, unknown))));
                }
                body.push(literal);
                if !self.eat(",") {
                    break;
                }
            }
            if let Some(unknown) = (0..in_head).find(|variable| !known[*variable]) {
                self.at = start;
                return Err(self.error(format!(
                    "{} is in no fact of the rule's right side",
                    name_of(&names, unknown)
                )));
            }
            if head.terms.contains(&Pattern::Anything) {
                self.at = start;
                return Err(self.error("`_` says nothing on a rule's left side"));
            }
        } else {
            // A query without a rule matches the relation itself. Unnamed terms are part of the answer.
            let mut question = head;
            let mut variables = names.len();
            for term in question
                .terms
                .iter_mut()
                .filter(|term| **term == Pattern::Anything)
            {
                *term = Pattern::Variable(variables);
                variables += 1;
            }
            return Ok(Rule {
                head: question.clone(),
                body: vec![Literal::Holds(question)],
                variables,
            });
        }
        Ok(Rule {
            head,
            body,
            variables: names.len(),
        })
    }

    fn literal(&mut self, names: &mut Names<'a>) -> Result<Literal, ParseError> {
        if self.rest().starts_with(|first: char| first.is_ascii_lowercase()) {
            let before = self.at;
            if self.word() == "not" && !self.rest().starts_with('(') {
                return Ok(Literal::Absent(self.atom(names)?));
            }
            self.at = before;
            return Ok(Literal::Holds(self.atom(names)?));
        }
        let left = self.pattern(names)?;
        let signs = [
            ("!=", Comparison::Different),
            ("<=", Comparison::AtMost),
            (">=", Comparison::AtLeast),
            ("=", Comparison::Equal),
            ("<", Comparison::Less),
            (">", Comparison::More),
        ];
        let Some((_, comparison)) = signs.into_iter().find(|(sign, _)| self.eat(sign)) else {
            return Err(self.error("here must be one of = != < <= > >="));
        };
        let right = self.pattern(names)?;
        if left == Pattern::Anything || right == Pattern::Anything {
            return Err(self.error("`_` can't be compared"));
        }
        Ok(Literal::Compare(left, comparison, right))
    }

    fn atom(&mut self, names: &mut Names<'a>) -> Result<Atom, ParseError> {
        if !self.rest().starts_with(|first: char| first.is_ascii_lowercase()) {
            return Err(self.error(
                "here must be the name of a fact, like `node(Host, N)`, which begins with a small letter",
            ));
        }
        let name = self.word().to_owned();
        if !self.eat("(") {
            return Err(self.error(format!("after {name} must be `(`")));
        }
        let mut terms = Vec::new();
        loop {
            terms.push(self.pattern(names)?);
            if self.eat(")") {
                return Ok(Atom { name, terms });
            }
            if !self.eat(",") {
                return Err(self.error("here must be `,` or `)`"));
            }
        }
    }

    fn pattern(&mut self, names: &mut Names<'a>) -> Result<Pattern, ParseError> {
        let rest = self.rest();
        if rest.starts_with(|first: char| first.is_ascii_uppercase()) {
            let name = self.word();
            let next = names.len();
            return Ok(Pattern::Variable(*names.entry(name).or_insert(next)));
        }
        if rest.starts_with('_') {
            self.word();
            return Ok(Pattern::Anything);
        }
        match crate::fact::term(rest) {
            Ok((term, after)) => {
                self.at += rest.len() - after.len();
                self.skip();
                Ok(Pattern::Is(term))
            }
            Err(_) => {
                Err(self
                    .error("here must be a number, a text in quotes, a name with a capital letter, or `_`"))
            }
        }
    }
}

fn variables<'b>(terms: impl IntoIterator<Item = &'b Pattern>) -> impl Iterator<Item = usize> {
    terms.into_iter().filter_map(|term| match term {
        Pattern::Variable(variable) => Some(*variable),
        Pattern::Is(Term::Number(_) | Term::Text(_)) | Pattern::Anything => None,
    })
}

fn name_of(names: &Names<'_>, variable: usize) -> String {
    let name = names.iter().find(|(_, number)| **number == variable);
    name.map_or_else(String::new, |(name, _)| format!("`{name}`"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn any_text_is_parsed_or_rejected_without_panic(text in "([a-cX-Z_0-9(),.<>=!\"# \n-]|not ){0,60}") {
            let _ = parse(&text);
        }
    }

    #[test]
    fn parse_error_names_line_and_column() {
        for (text, column, what) in [
            ("q(X) <- ", 9, "a number, a text"),
            ("q(X) <- n(Y)", 1, "`X` is in no fact"),
            ("q(X) <- n(X), Y < 3", 15, "`Y` is in no fact before"),
            ("q(X) <- n(X) m(X)", 14, "separated by `,`"),
            ("Q(X)", 1, "the name of a fact"),
            ("q[X]", 2, "must be `(`"),
            ("q(_) <- n(X)", 1, "`_` says nothing"),
            ("q(X) <- n(X), X ~ 3", 17, "one of ="),
            ("q(X) <- not n(X), n(X)", 9, "`X` is in no fact before"),
            ("q(X) <- n(X), not 3", 19, "the name of a fact"),
        ] {
            let error = parse(text).expect_err(text);
            assert_eq!((error.line, error.column), (1, column), "{text}: {error}");
            assert!(error.to_string().contains(what), "{text}: {error}");
        }
        assert_eq!(parse("a(1).\n# so\n  b(\n)").expect_err("no term").line, 4);
    }

    #[test]
    fn built_in_rules_parse() {
        assert!(parse(super::super::BUILT_IN).expect("rules").len() > 5);
    }
}
