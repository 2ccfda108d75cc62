//! Pictures of result files: bars for the rows of one list.

use bench::bars::{Group, Scale, bars};
use bench::tables::median;
use serde::Deserialize;

use super::value::{Object, Value, field};
use super::words::heading;

/// A picture, as the index describes it.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plot {
    /// The field that has the list of rows.
    pub rows: String,
    /// Fields of a row whose texts name a group of bars. Rows of one group follow one another.
    #[serde(default)]
    pub groups: Vec<String>,
    /// Fields of a row whose texts name its bars.
    pub labels: Vec<String>,
    /// Fields with the length of a bar each: a number, or samples whose median counts. Others have no bar.
    pub values: Vec<String>,
    /// Scale of all bars.
    #[serde(default)]
    pub scale: Scale,
}

impl Plot {
    /// The picture of a file with that title.
    ///
    /// # Errors
    /// A field that the file's rows don't have.
    pub fn picture(&self, title: &str, file: &Object) -> Result<String, String> {
        let rows = field(file, &self.rows).and_then(Value::objects);
        let rows = rows.ok_or_else(|| format!("no list of objects `{}`", self.rows))?;
        let mut groups: Vec<(String, Vec<(String, f64)>)> = Vec::new();
        for row in rows {
            let group = texts(row, &self.groups)?;
            if groups.last().is_none_or(|(name, _)| *name != group) {
                groups.push((group, Vec::new()));
            }
            let label = texts(row, &self.labels)?;
            let found = self
                .values
                .iter()
                .filter_map(|name| Some((name, length(field(row, name)?)?)));
            let bars = found.map(|(name, length)| match self.values.len() {
                1 => (label.clone(), length),
                _ => (format!("{label}: {}", heading(name)), length),
            });
            if let Some((_, all)) = groups.last_mut() {
                all.extend(bars);
            }
        }
        if groups.iter().all(|(_, bars)| bars.is_empty()) {
            return Err(format!("no row of `{}` has one of {:?}", self.rows, self.values));
        }
        let groups: Vec<Group> = groups
            .iter()
            .map(|(name, bars)| Group {
                name,
                bars: bars
                    .iter()
                    .map(|(label, length)| (label.as_str(), *length))
                    .collect(),
            })
            .collect();
        let title = match self.values.as_slice() {
            [one] => format!("{title}: {}", heading(one)),
            _ => title.to_owned(),
        };
        Ok(bars(&title, self.scale, &groups))
    }
}

/// The texts and numbers of those fields, one after another.
fn texts(row: &Object, names: &[String]) -> Result<String, String> {
    let text = |name: &String| match field(row, name) {
        Some(Value::Text(text)) => Ok(text.replace('`', "")),
        Some(Value::Integer(number)) => Ok(format!("{number} {}", heading(name))),
        _ => Err(format!("a row without a text or whole number `{name}`")),
    };
    let all: Result<Vec<_>, _> = names.iter().map(text).collect();
    Ok(all?.join(", "))
}

/// The length of a bar: the number, or the median of several.
fn length(value: &Value) -> Option<f64> {
    match value {
        Value::List(list) => {
            let numbers: Option<Vec<f64>> = list.iter().map(Value::number).collect();
            median(&numbers?)
        }
        one => one.number(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = r#"{"rows": [
        {"program": "a", "way": "`x`", "run_s": [3.0, 1.0, 2.0]},
        {"program": "a", "way": "y", "run_s": 4.0},
        {"program": "b", "way": "x", "run_s": []}
    ]}"#;

    fn plot(rows: &str, label: &str) -> Plot {
        Plot {
            rows: rows.to_owned(),
            groups: vec!["program".to_owned()],
            labels: vec![label.to_owned()],
            values: vec!["run_s".to_owned()],
            scale: Scale::Linear,
        }
    }

    fn picture(plot: &Plot) -> Result<String, String> {
        let file: Value = serde_json::from_str(FILE).unwrap();
        plot.picture("Runs", file.object().unwrap())
    }

    #[test]
    fn bars_have_the_medians_and_the_names_of_their_rows() {
        let text = picture(&plot("rows", "way")).unwrap();
        for part in ["Runs: run, s", ">a<", ">x<", ">2.00<", ">y<", ">4.00<"] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert_eq!(text.matches("height=\"12\"").count(), 2, "{text}");
    }

    #[test]
    fn fields_that_no_row_has_are_errors() {
        assert_eq!(
            picture(&plot("figures", "way")).unwrap_err(),
            "no list of objects `figures`"
        );
        let error = picture(&plot("rows", "kind")).unwrap_err();
        assert_eq!(error, "a row without a text or whole number `kind`");
        let mut other = plot("rows", "way");
        other.values = vec!["walk_s".to_owned()];
        assert_eq!(
            picture(&other).unwrap_err(),
            "no row of `rows` has one of [\"walk_s\"]"
        );
    }
}
