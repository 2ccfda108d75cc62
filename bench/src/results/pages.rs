//! Pages of results as text.

use super::index::{Entry, Origin};
use super::tables::{Section, sections};
use super::value::Object;

/// Columns of a line that is no row of a table and has no link.
const COLUMNS_MAX: usize = 110;
/// Marks around the generated part of the index page.
const BEGIN: &str = "<!-- `make results` writes the table below. -->";
const END: &str = "<!-- The generated table ends here. -->";

/// The page of a file.
pub fn page(entry: &Entry, origin: &Origin, file: &Object) -> String {
    let mut text = format!("# {}\n\n", entry.title);
    text += &wrapped(&format!("This page shows {}", entry.measured), "");
    text.push('\n');
    text += &wrapped(
        "`make results` writes this page from the file. A cell such as `2 (1 to 3)` has the median of \
         several samples, then the least and the greatest.",
        "",
    );
    text.push('\n');
    text += &fact("date", &origin.date);
    text += &fact("commit", &origin.commit);
    text += &fact("machine", &origin.machine);
    text += &fact("command", &format!("`{}`", entry.command));
    let json = format!("[{}](../../../bench/results/{0})", entry.file);
    text += &fact("file", &json);
    text += &fact("discussed in", &link(&entry.discussed, "../../", "../../../"));
    if !entry.hidden.is_empty() {
        let names: Vec<String> = entry.hidden.iter().map(|name| format!("`{name}`")).collect();
        text += &fact("in the file alone", &names.join(", "));
    }
    let sections = sections(file, &entry.hidden);
    for section in &sections {
        text += &section_text(section);
    }
    if let Some(picture) = entry.picture() {
        text += &format!(
            "\n![{}](../../../bench/results/{picture})\n",
            entry.title.replace(['[', ']'], "")
        );
    }
    text
}

fn section_text(section: &Section) -> String {
    let mut text = match section.heading.as_str() {
        "" => String::new(),
        heading => format!("\n## {heading}\n\n"),
    };
    for (name, value) in &section.facts {
        text += &fact(name, value);
    }
    if !section.columns.is_empty() {
        text += &row(&section.columns);
        text += &row(&vec!["---".to_owned(); section.columns.len()]);
        for cells in &section.rows {
            text += &row(cells);
        }
    }
    text
}

/// The index page, its table made again.
///
/// # Errors
/// If `page` does not have the marks around the table.
pub fn index(page: &str, results: &[(&Entry, Origin)]) -> Result<String, String> {
    let split = page
        .split_once(BEGIN)
        .and_then(|(before, rest)| rest.split_once(END).map(|(_, after)| (before, after)));
    let (before, after) =
        split.ok_or_else(|| format!("docs/results/README.md: no lines {BEGIN:?} and {END:?}"))?;
    let heads = ["tables", "file", "made by", "last run", "machine", "discussed in"];
    let mut text = format!("{before}{BEGIN}\n\n");
    text += &row(&heads.map(str::to_owned));
    text += &row(&heads.map(|_| "---".to_owned()));
    for (entry, origin) in results {
        text += &row(&[
            format!("[{}](tables/{}.md)", entry.title, entry.name()),
            format!("[{}](../../bench/results/{0})", entry.file),
            format!("`{}`", entry.command),
            format!("{}, {}", origin.date, origin.commit),
            origin.machine.clone(),
            link(&entry.discussed, "../", "../../"),
        ]);
    }
    Ok(format!("{text}\n{END}{after}"))
}

fn row(cells: &[String]) -> String {
    format!("| {} |\n", cells.join(" | "))
}

/// A link to a page of the project, shown as its file name; `to_docs` and `to_root` lead to those folders.
fn link(page: &str, to_docs: &str, to_root: &str) -> String {
    let file = page.rsplit('/').next().unwrap_or(page);
    let target = match page.strip_prefix("docs/") {
        Some(below) => format!("{to_docs}{below}"),
        None => format!("{to_root}{page}"),
    };
    format!("[{file}]({target})")
}

/// An item of a list.
fn fact(name: &str, value: &str) -> String {
    wrapped(&format!("- {name}: {value}"), "  ")
}

/// A text on lines of at most `COLUMNS_MAX` columns, all but the first after `indent`.
fn wrapped(text: &str, indent: &str) -> String {
    let mut lines = String::new();
    let mut columns = 0;
    for word in text.split_whitespace() {
        let length = word.chars().count();
        if columns > 0 && columns + 1 + length > COLUMNS_MAX {
            lines += "\n";
            lines += indent;
            columns = indent.len();
        } else if columns > 0 {
            lines.push(' ');
            columns += 1;
        }
        lines += word;
        columns += length;
    }
    lines.push('\n');
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_wrapped_before_the_limit_and_items_indented() {
        let text = fact("name", &"four ".repeat(40));
        let lines: Vec<&str> = text.lines().collect();
        assert!(
            lines.iter().all(|line| line.chars().count() <= COLUMNS_MAX),
            "{text}"
        );
        assert!(lines[0].starts_with("- name: four"), "{text}");
        assert!(lines[1..].iter().all(|line| line.starts_with("  four")), "{text}");
    }

    #[test]
    fn index_keeps_the_text_around_its_table() {
        let page = format!("before\n{BEGIN}\nold\n{END}\nafter\n");
        let made = index(&page, &[]).unwrap();
        assert!(
            made.starts_with(&format!("before\n{BEGIN}\n\n| tables |")),
            "{made}"
        );
        assert!(made.ends_with(&format!("\n{END}\nafter\n")), "{made}");
        assert!(!made.contains("old"), "{made}");
        assert_eq!(index(&made, &[]).unwrap(), made);
        assert!(index("no marks", &[]).is_err());
    }
}
