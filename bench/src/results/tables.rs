//! Tables of a result file: each array of objects is one, whatever the objects are.
//!
//! Arrays within the objects of an array are joined to one table, whose first columns name the row that each
//! belongs to. Small objects become columns of the row that has them.

use super::value::{Object, Value, field};
use super::words::{cell, heading};

/// Fields of a file that the head of its page has.
const ORIGIN: [&str; 3] = ["machine", "date", "commit"];
/// Fields that name the columns of lists below them.
const COLUMN_NAMES: [&str; 2] = ["columns", "kinds"];
/// Fields of an object that is shown in the row of the object around it.
const SMALL: usize = 5;

/// A heading of a page, and the figures below it.
#[derive(Debug, Default, PartialEq)]
pub struct Section {
    /// The heading; empty for the figures of the file itself.
    pub heading: String,
    /// Single figures, each with its name.
    pub facts: Vec<Named>,
    /// Headings of the columns; none if there is no table.
    pub columns: Vec<String>,
    /// The table's cells, by rows.
    pub rows: Vec<Vec<String>>,
}

/// Objects of one array, and the cells that name the row that has the array.
struct Group<'a> {
    keys: Vec<Named>,
    objects: Vec<&'a Object>,
}

/// An object of an array, with the cells that come before its own.
struct Row<'a> {
    keys: Vec<Named>,
    object: &'a Object,
}

/// The text of a cell or a fact, after the name of its column or its own.
pub type Named = (String, String);

/// The sections of a file, without the named fields.
pub fn sections(file: &Object, hidden: &[String]) -> Vec<Section> {
    let mut walk = Walk {
        hidden,
        found: Vec::new(),
    };
    walk.object("", file, &[]);
    walk.found
}

struct Walk<'h> {
    hidden: &'h [String],
    found: Vec<Section>,
}

impl Walk<'_> {
    fn is_hidden(&self, name: &str) -> bool {
        self.hidden.iter().any(|hidden| hidden == name)
    }

    /// The section of an object that is in no array, and those of its arrays and objects.
    fn object(&mut self, title: &str, object: &Object, names: &[&str]) {
        let names = column_names(object).unwrap_or_else(|| names.to_vec());
        let visible: Vec<_> = object.iter().filter(|(name, _)| !self.is_hidden(name)).collect();
        let is_titled = field(object, "title").is_some();
        let facts: Vec<_> = visible
            .iter()
            .filter(|(name, value)| is_flat(value) && !(title.is_empty() && ORIGIN.contains(&name.as_str())))
            .filter(|(name, _)| !is_titled || (name != "title" && !COLUMN_NAMES.contains(&name.as_str())))
            .map(|(name, value)| (heading(name), cell(name, value)))
            .filter(|(_, text)| !text.is_empty())
            .collect();
        if !facts.is_empty() {
            self.found.push(Section {
                heading: capital(title),
                facts,
                ..Section::default()
            });
        }
        for (name, value) in visible {
            // The rows of an array with a title of its own are the only ones below it.
            let path = match is_titled {
                true => title.to_owned(),
                false => below(title, name),
            };
            if let Some(object) = value.object() {
                self.object(&path, object, &names);
            } else if let Some(objects) = value.objects() {
                let group = Group {
                    keys: Vec::new(),
                    objects,
                };
                self.array(&path, name, &[group], &names);
            }
        }
    }

    /// The table of arrays that have the same name and place in the file, and those of the arrays in them.
    fn array(&mut self, title: &str, name: &str, groups: &[Group<'_>], names: &[&str]) {
        let titled = groups.iter().flat_map(|group| &group.objects);
        let titled: Vec<_> = titled
            .map(|object| (field(object, "title").and_then(Value::text), *object))
            .collect();
        if titled.iter().all(|(title, _)| title.is_some()) {
            for (title, object) in titled {
                self.object(title.unwrap_or_default(), object, names);
            }
            return;
        }
        let is_numbered = groups.iter().any(|group| !are_told_apart(&group.objects));
        let mut rows: Vec<Row<'_>> = Vec::new();
        for group in groups {
            for (number, object) in (1..).zip(&group.objects) {
                let mut keys = group.keys.clone();
                if is_numbered {
                    keys.push((singular(&heading(name)), format!("{number}")));
                }
                rows.push(Row { keys, object });
            }
        }
        let nested = self.nested_fields(&rows);
        self.table(title, &rows, names, !nested.is_empty());
        for name in nested {
            self.array(&below(title, name), name, &nested_groups(&rows, name), names);
        }
    }

    /// The table of rows. One that has only the names of rows is left out if nested tables repeat them.
    fn table(&mut self, title: &str, rows: &[Row<'_>], names: &[&str], is_repeated: bool) {
        let keys = columns(rows.iter().map(|row| &row.keys));
        let cells: Vec<Vec<Named>> = rows.iter().map(|row| self.cells(row.object, names)).collect();
        let figures = columns(cells.iter());
        let is_name = |column: &&str| {
            let mut own = rows.iter().flat_map(|row| own_keys(row.object));
            own.any(|(name, _)| heading(name) == **column)
        };
        if figures.is_empty() || (is_repeated && figures.iter().all(is_name)) {
            return;
        }
        let row = |(row, cells): (&Row<'_>, &Vec<Named>)| {
            let keys = keys.iter().map(|column| of_column(&row.keys, column));
            keys.chain(figures.iter().map(|column| of_column(cells, column)))
                .collect()
        };
        let rows = rows.iter().zip(&cells).map(row).collect();
        let headings = keys.iter().chain(&figures);
        self.found.push(Section {
            heading: capital(title),
            columns: headings.map(|column| (*column).to_owned()).collect(),
            rows,
            ..Section::default()
        });
    }

    /// The cells of an object's row, by their columns.
    fn cells(&self, object: &Object, names: &[&str]) -> Vec<Named> {
        let mut cells = Vec::new();
        for (field, value) in object.iter().filter(|(name, _)| !self.is_hidden(name)) {
            match value {
                Value::Object(inner) if is_small(inner) => {
                    let inner = inner.iter();
                    cells.extend(inner.map(|(below, value)| {
                        (
                            format!("{}: {}", heading(field), heading(below)),
                            cell(below, value),
                        )
                    }));
                }
                Value::List(list) if !names.is_empty() && list.len() == names.len() => {
                    let is_figure = matches!(field.as_str(), "runs" | "samples");
                    cells.extend(names.iter().zip(list).map(|(name, item)| {
                        let column = match is_figure {
                            true => (*name).to_owned(),
                            false => format!("{}: {name}", heading(field)),
                        };
                        let item = match name.contains("million") {
                            true => &millions(item),
                            false => item,
                        };
                        (column, cell("samples", item))
                    }));
                }
                value if is_flat(value) => cells.push((heading(field), cell(field, value))),
                _ => {}
            }
        }
        cells
    }

    /// Fields of rows that are arrays of objects or large objects.
    fn nested_fields<'a>(&self, rows: &[Row<'a>]) -> Vec<&'a str> {
        let mut fields: Vec<&str> = Vec::new();
        for (name, value) in rows.iter().flat_map(|row| row.object) {
            let has_table = match value {
                Value::Object(inner) => !is_small(inner),
                value => value.objects().is_some(),
            };
            if has_table && !self.is_hidden(name) && !fields.contains(&name.as_str()) {
                fields.push(name);
            }
        }
        fields
    }
}

/// The objects of that field of all rows.
fn nested_groups<'a>(rows: &[Row<'a>], name: &str) -> Vec<Group<'a>> {
    let group = |row: &Row<'a>| {
        let value = field(row.object, name)?;
        let objects = value.object().map(|one| vec![one]).or_else(|| value.objects())?;
        let own = own_keys(row.object).into_iter();
        let own = own.map(|(name, value)| (heading(name), cell(name, value)));
        Some(Group {
            keys: row.keys.iter().cloned().chain(own).collect(),
            objects,
        })
    };
    rows.iter().filter_map(group).collect()
}

/// The columns of cells in their order, without those that are empty in each row.
fn columns<'a>(rows: impl Iterator<Item = &'a Vec<Named>> + Clone) -> Vec<&'a str> {
    let mut columns: Vec<&str> = Vec::new();
    for (name, _) in rows.clone().flatten() {
        if !columns.contains(&name.as_str()) {
            columns.push(name);
        }
    }
    columns.retain(|column| {
        let mut cells = rows.clone().flatten();
        cells.any(|(name, text)| name == column && !text.is_empty())
    });
    columns
}

/// The text of that column; empty if the row has none.
fn of_column(cells: &[Named], column: &str) -> String {
    let found = cells.iter().find(|(name, _)| name == column);
    found.map(|(_, text)| text.clone()).unwrap_or_default()
}

/// Numbers of a column that is in millions: files have them as they were measured.
fn millions(value: &Value) -> Value {
    match value {
        Value::List(list) => Value::List(list.iter().map(millions).collect()),
        value => value
            .number()
            .map_or(Value::Null, |number| Value::Float(number / 1e6)),
    }
}

/// Whether a value fits in a cell.
fn is_flat(value: &Value) -> bool {
    !matches!(value, Value::Object(_)) && value.objects().is_none()
}

fn is_small(object: &Object) -> bool {
    object.len() <= SMALL && object.iter().all(|(_, value)| is_flat(value))
}

/// The names that an object has for the columns of lists below it.
fn column_names(object: &Object) -> Option<Vec<&str>> {
    let list = COLUMN_NAMES.iter().find_map(|name| field(object, name))?;
    match list {
        Value::List(list) => list.iter().map(Value::text).collect(),
        _ => None,
    }
}

/// The fields that name a row: texts, integers and answers before the first figure of another kind, or else
/// the texts.
fn own_keys(object: &Object) -> Vec<(&str, &Value)> {
    let fields = || object.iter().map(|(name, value)| (name.as_str(), value));
    let keys = fields().filter(|(_, value)| **value != Value::Null);
    let is_key = |value: &Value| matches!(value, Value::Text(_) | Value::Integer(_) | Value::Bool(_));
    let keys: Vec<_> = keys.take_while(|(_, value)| is_key(value)).collect();
    match keys.is_empty() {
        true => fields().filter(|(_, value)| value.text().is_some()).collect(),
        false => keys,
    }
}

/// Whether no two rows have the same name.
fn are_told_apart(objects: &[&Object]) -> bool {
    let keys: Vec<_> = objects.iter().map(|object| own_keys(object)).collect();
    let is_new = |(at, own): (usize, &Vec<_>)| !own.is_empty() && !keys[..at].contains(own);
    keys.len() == 1 || keys.iter().enumerate().all(is_new)
}

fn below(title: &str, name: &str) -> String {
    match title {
        "" => heading(name),
        title => format!("{title}, {}", heading(name)),
    }
}

fn singular(name: &str) -> String {
    name.strip_suffix('s').unwrap_or(name).to_owned()
}

fn capital(text: &str) -> String {
    let mut rest = text.chars();
    let first = rest.next().map(|first| first.to_uppercase().to_string());
    first.unwrap_or_default() + rest.as_str()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str) -> Vec<Section> {
        let value: Value = serde_json::from_str(text).unwrap();
        sections(value.object().unwrap(), &["secret".to_owned()])
    }

    #[test]
    fn array_of_objects_is_a_table_of_all_their_fields() {
        let found = of(
            r#"{"machine": "m", "load": 1.5, "rows": [{"what": "a", "samples": [1, 3, 2], "secret": 7},
                {"what": "b", "one_us": 5, "gone": null}]}"#,
        );
        assert_eq!(found.len(), 2);
        assert_eq!(found[0].facts, [("load of the host".into(), "1.5".into())]);
        assert_eq!(found[1].heading, "Figures");
        assert_eq!(found[1].columns, ["measured", "samples", "one, us"]);
        assert_eq!(found[1].rows, [["a", "2 (1 to 3)", ""], ["b", "", "5"]]);
    }

    #[test]
    fn rows_of_nested_arrays_name_the_rows_that_have_them() {
        let found = of(
            r#"{"runs": [{"nodes": 2, "rate": 0.5, "faults": [{"kind": "read", "mean_us": 15.5}]},
                {"nodes": 2, "rate": 0.25, "faults": [{"kind": "write", "mean_us": 16}]}]}"#,
        );
        assert_eq!(found[0].columns, ["run", "nodes", "rate"]);
        assert_eq!(found[1].heading, "Runs, faults");
        assert_eq!(found[1].columns, ["run", "nodes", "kind", "mean, us"]);
        assert_eq!(
            found[1].rows,
            [["1", "2", "read", "15.5"], ["2", "2", "write", "16"]]
        );
    }

    #[test]
    fn small_objects_are_columns_and_large_ones_tables() {
        let found = of(r#"{"cells": [{"kind": "k", "total": {"low": 1, "high": 2},
                "pages": {"a": 1, "b": 2, "c": 3, "d": 4, "e": 5, "f": 6}}]}"#);
        assert_eq!(found[0].columns, ["kind", "total: low", "total: high"]);
        assert_eq!(found[1].columns, ["kind", "a", "b", "c", "d", "e", "f"]);
        assert_eq!(found[1].rows, [["k", "1", "2", "3", "4", "5", "6"]]);
    }

    #[test]
    fn lists_of_runs_have_the_columns_that_the_file_names() {
        let found = of(
            r#"{"tables": [{"title": "messages", "columns": ["time, ns", "million"],
                "rows": [{"what": "ring", "runs": [[2, 1, 3], []]},
                {"what": "pipe", "runs": [[5], [7500000]]}]}]}"#,
        );
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].heading, "Messages");
        assert_eq!(found[0].columns, ["measured", "time, ns", "million"]);
        assert_eq!(found[0].rows, [["ring", "2 (1 to 3)", ""], ["pipe", "5", "7.5"]]);
    }
}
