//! Pages of measurements, from the files in `bench/results`: `bench-results [FOLDER]`, the project's folder,
//! by default the current one.
//!
//! Each file has an entry in `bench/results/index.toml`, a page in `docs/results/tables`, and a picture if
//! its entry has a plot. The table in `docs/results/README.md` lists all. A test compares the pages with the
//! files, so that no figure changes by hand.

mod index;
mod pages;
mod plot;
mod tables;
mod value;
mod words;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use bench::Outcome;
use index::Index;
use value::Value;

/// Folder of the files and their list.
const FILES: &str = "bench/results";
/// Folder of the pages that are generated whole.
const PAGES: &str = "docs/results/tables";
/// Page whose table is generated.
const INDEX_PAGE: &str = "docs/results/README.md";

/// All generated pages: their paths from the project's folder, and their texts.
///
/// # Errors
/// A file that can't be read or has no entry, an entry without a file, or a figure without origin.
fn generate(root: &Path) -> Outcome<BTreeMap<PathBuf, String>> {
    let read = |path: &Path| {
        fs::read_to_string(root.join(path)).map_err(|error| format!("{}: {error}", path.display()))
    };
    let list = Path::new(FILES).join("index.toml");
    let index: Index =
        toml::from_str(&read(&list)?).map_err(|error| format!("{}: {error}", list.display()))?;
    let mut without_entry = names(&root.join(FILES), "json")?;
    let mut made = BTreeMap::new();
    let mut results = Vec::new();
    for entry in &index.results {
        without_entry.remove(&entry.file);
        let path = Path::new(FILES).join(&entry.file);
        let file: Value =
            serde_json::from_str(&read(&path)?).map_err(|error| format!("{}: {error}", path.display()))?;
        let file = file
            .object()
            .ok_or_else(|| format!("{}: no object", path.display()))?;
        let origin = entry.origin(file)?;
        if let Some(plot) = &entry.plot {
            let picture = plot.picture(&entry.title, file);
            let picture = picture.map_err(|error| {
                format!(
                    "{}: the plot of {}: {error}; help: change one of them",
                    list.display(),
                    entry.file
                )
            })?;
            made.insert(path.with_extension("svg"), picture);
        }
        let page = Path::new(PAGES).join(format!("{}.md", entry.name()));
        made.insert(page, pages::page(entry, &origin, file));
        results.push((entry, origin));
    }
    if let Some(file) = without_entry.first() {
        return Err(format!("{FILES}/{file}: no entry in index.toml; help: add one").into());
    }
    let page = Path::new(INDEX_PAGE);
    made.insert(page.to_owned(), pages::index(&read(page)?, &results)?);
    Ok(made)
}

/// Generated pages of files that are gone, from the project's folder.
fn obsolete(root: &Path, made: &BTreeMap<PathBuf, String>) -> Outcome<Vec<PathBuf>> {
    let present = names(&root.join(PAGES), "md")?;
    let present = present.iter().map(|name| Path::new(PAGES).join(name));
    Ok(present.filter(|path| !made.contains_key(path)).collect())
}

/// The names of a folder's files with that ending.
fn names(folder: &Path, ending: &str) -> Outcome<BTreeSet<String>> {
    let mut names = BTreeSet::new();
    let entries = fs::read_dir(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    for entry in entries {
        let path = entry?.path();
        if path.extension().is_some_and(|own| own == ending)
            && let Some(name) = path.file_name()
        {
            names.insert(name.to_string_lossy().into_owned());
        }
    }
    Ok(names)
}

fn run() -> Outcome<()> {
    let root = PathBuf::from(std::env::args().nth(1).unwrap_or_else(|| ".".to_owned()));
    fs::create_dir_all(root.join(PAGES))?;
    let made = generate(&root)?;
    for path in obsolete(&root, &made)? {
        fs::remove_file(root.join(path))?;
    }
    for (path, text) in &made {
        fs::write(root.join(path), text)?;
    }
    println!("bench-results: {} pages written", made.len());
    Ok(())
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench-results: {error}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_show_the_figures_of_the_files() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let made = generate(&root).expect("the files have pages");
        let mut wrong = obsolete(&root, &made).expect("the folder of pages can be read");
        for (path, text) in made {
            if fs::read_to_string(root.join(&path)).unwrap_or_default() != text {
                wrong.push(path);
            }
        }
        assert!(
            wrong.is_empty(),
            "not generated from the files of today: {wrong:?}; help: run `make results`"
        );
    }

    #[test]
    fn file_without_an_entry_is_refused() {
        let root = std::env::temp_dir().join(format!("bench-results-{}", std::process::id()));
        fs::create_dir_all(root.join(FILES)).unwrap();
        fs::write(root.join(FILES).join("index.toml"), "result = []\n").unwrap();
        fs::write(root.join(FILES).join("new.json"), "{}\n").unwrap();
        let error = generate(&root).unwrap_err().to_string();
        fs::remove_dir_all(&root).unwrap();
        assert_eq!(
            error,
            "bench/results/new.json: no entry in index.toml; help: add one"
        );
    }
}
