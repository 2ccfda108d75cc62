//! Archives of packages: those that this machine's apt is configured for, or the one that the caller names.
//!
//! Both formats of apt are read: lines (`*.list`) and stanzas (`*.sources`). Only entries of a Debian archive
//! are used. Third parties reuse the names of Debian's suites, but not its components and addresses.

use std::fs;
use std::path::{Path, PathBuf};

use super::ImageError;

/// Keys of Debian's archives, on this machine and in the guest.
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// Maximum entries named in an error.
const NAMED_MAX: usize = 3;

/// A text that is not the URL of an archive.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum MirrorError {
    /// No scheme.
    #[error("it is no URL; {MIRROR_HELP}")]
    NoUrl,
    /// Another scheme.
    #[error("it is not http, https or file; {MIRROR_HELP}")]
    Scheme,
    /// No host, or no absolute path.
    #[error("it is no whole URL; {MIRROR_HELP}")]
    Part,
    /// White space or a control character.
    #[error("{0:?} can't be in it; {MIRROR_HELP}")]
    Character(char),
}

/// Help for a URL that apt could not use.
const MIRROR_HELP: &str = "help: give the folder that holds `dists`, as in http://mirror.example/debian";

/// An archive that the caller names.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Mirror(String);

impl Mirror {
    /// Checks a URL: that of the folder with `dists` and `pool`.
    ///
    /// # Errors
    /// If apt could not use it.
    pub fn parse(text: &str) -> Result<Self, MirrorError> {
        let (scheme, rest) = text.split_once(':').ok_or(MirrorError::NoUrl)?;
        let is_whole = match scheme {
            "http" | "https" => rest
                .strip_prefix("//")
                .is_some_and(|rest| !rest.is_empty() && !rest.starts_with('/')),
            "file" => {
                let path = rest.strip_prefix("//").unwrap_or(rest);
                path.starts_with('/')
            }
            _ => return Err(MirrorError::Scheme),
        };
        if !is_whole {
            return Err(MirrorError::Part);
        }
        // It becomes a line of a file for apt.
        if let Some(bad) = text.chars().find(|c| c.is_whitespace() || c.is_control()) {
            return Err(MirrorError::Character(bad));
        }
        Ok(Self(text.trim_end_matches('/').to_owned()))
    }

    /// The archive of its security updates.
    pub fn security(&self) -> Self {
        Self(format!("{}-security", self.0))
    }
}

/// Archives of packages.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Sources {
    /// Text of a deb822 file.
    pub text: String,
    /// Folder of apt's configuration, or the flag, that names the archives.
    pub origin: String,
}

impl Sources {
    /// Returns the sources of an archive that the caller names.
    pub fn of_mirrors(mirror: &Mirror, security: &Mirror, suite: &str) -> Self {
        let stanzas = [
            stanza(&mirror.0, suite, KEYRING),
            stanza(&mirror.0, &format!("{suite}-updates"), KEYRING),
            stanza(&security.0, &format!("{suite}-security"), KEYRING),
        ];
        Self {
            text: stanzas.join("\n"),
            origin: format!("--mirror {}", shown(&mirror.0)),
        }
    }

    /// Returns the sources of this machine's apt. If they are of another suite, their archive is used for the
    /// wanted one: an archive has all suites.
    ///
    /// # Errors
    /// If they can't be read, are invalid, or name no archive of Debian.
    pub fn of_machine(etc_apt: &Path, suite: &str) -> Result<Self, ImageError> {
        let entries = read_all(etc_apt)?;
        let mut stanzas = entries_of(&entries, suite)?;
        if !stanzas.iter().any(|(of, _)| of == suite) {
            stanzas = other_suites(&entries, suite)?;
        }
        if stanzas.is_empty() {
            return Err(none_usable(etc_apt, suite, &entries));
        }
        let mut texts: Vec<String> = Vec::new();
        for (_, text) in stanzas {
            if !texts.contains(&text) {
                texts.push(text);
            }
        }
        Ok(Self {
            text: texts.join("\n"),
            origin: etc_apt.display().to_string(),
        })
    }
}

/// An entry for binary packages of this machine's architecture.
#[derive(Clone, Debug, Default)]
struct Entry {
    /// File and line where it begins.
    place: String,
    uris: Vec<String>,
    suites: Vec<String>,
    components: Vec<String>,
    signed_by: Option<String>,
}

impl Entry {
    /// Returns the archives that it names, with each list of mirrors replaced by its best one.
    fn archives(&self) -> Result<Vec<String>, ImageError> {
        let uris = self.uris.iter();
        uris.map(|uri| match uri.strip_prefix("mirror+file:") {
            Some(path) => self.best_mirror(path),
            None => Ok(uri.clone()),
        })
        .collect()
    }

    /// Returns the mirror of a list that apt would try first: one URI per line, after a tab perhaps
    /// `priority:N`, where the lowest wins.
    fn best_mirror(&self, path: &str) -> Result<String, ImageError> {
        let path = Path::new(path.strip_prefix("//").unwrap_or(path));
        let list = fs::read_to_string(path)
            .map_err(|error| bad(&self.place, &format!("its list {}: {error}", path.display())))?;
        let mirrors = list.lines().map(str::trim).filter(|line| !line.is_empty());
        let mirrors = mirrors.filter(|line| !line.starts_with('#')).filter_map(|line| {
            let mut words = line.split_whitespace();
            let uri = words.next()?;
            let priority = words.find_map(|word| word.strip_prefix("priority:")?.parse().ok());
            Some((priority.unwrap_or(u32::MAX), uri))
        });
        let best = mirrors.min_by_key(|(priority, _)| *priority);
        best.map(|(_, uri)| uri.to_owned())
            .ok_or_else(|| bad(&self.place, &format!("its list {} is empty", path.display())))
    }

    fn is_main(&self) -> bool {
        self.components.iter().any(|component| component == "main")
    }

    /// Keys for its packages. Debian's own keyring has another name in some releases, and one in the guest.
    fn keys(&self) -> &str {
        let file = |keys: &str| keys.rsplit('/').next().unwrap_or_default().to_owned();
        match &self.signed_by {
            Some(keys) if !file(keys).starts_with("debian-archive-") => keys,
            _ => KEYRING,
        }
    }

    /// Whether it is a dated snapshot of Debian's archive, whose address continues after `debian/`. Third
    /// parties have such addresses too, with their own keys.
    fn is_dated(&self, uri: &str) -> bool {
        self.keys() == KEYRING && (uri.contains("/debian/") || uri.contains("/debian-security/"))
    }
}

fn is_archive(uri: &str) -> bool {
    uri.trim_end_matches('/').ends_with("/debian")
}

fn is_security(uri: &str) -> bool {
    uri.trim_end_matches('/').ends_with("/debian-security")
}

/// Returns the entries of the suite: its part, and the stanza.
fn entries_of(entries: &[Entry], suite: &str) -> Result<Vec<(String, String)>, ImageError> {
    let wanted = ["", "-updates", "-security"].map(|end| format!("{suite}{end}"));
    let mut stanzas = Vec::new();
    for entry in entries.iter().filter(|entry| entry.is_main()) {
        let suites: Vec<&String> = entry.suites.iter().filter(|of| wanted.contains(of)).collect();
        if suites.is_empty() {
            continue;
        }
        for uri in entry.archives()? {
            if is_archive(&uri) || is_security(&uri) || entry.is_dated(&uri) {
                let of_uri = suites.iter();
                stanzas.extend(of_uri.map(|of| ((*of).clone(), stanza(&uri, of, entry.keys()))));
            }
        }
    }
    Ok(stanzas)
}

/// Returns the suite from archives that are configured for other suites.
fn other_suites(entries: &[Entry], suite: &str) -> Result<Vec<(String, String)>, ImageError> {
    let mut stanzas = Vec::new();
    for entry in entries.iter().filter(|entry| entry.is_main()) {
        for uri in entry.archives()? {
            let parts: &[&str] = match () {
                () if is_archive(&uri) => &["", "-updates"],
                () if is_security(&uri) => &["-security"],
                () => &[],
            };
            for part in parts {
                let of = format!("{suite}{part}");
                let text = stanza(&uri, &of, entry.keys());
                stanzas.push((of, text));
            }
        }
    }
    let has_suite = stanzas.iter().any(|(of, _)| of == suite);
    Ok(if has_suite { stanzas } else { Vec::new() })
}

fn stanza(uri: &str, suite: &str, keys: &str) -> String {
    format!("Types: deb\nURIs: {uri}\nSuites: {suite}\nComponents: main\nSigned-By: {keys}\n")
}

fn none_usable(etc_apt: &Path, suite: &str, entries: &[Entry]) -> ImageError {
    let mut named: Vec<String> = entries
        .iter()
        .filter_map(|entry| {
            Some(format!(
                "{} {}",
                shown(entry.uris.first()?),
                entry.suites.join(" ")
            ))
        })
        .collect();
    let more = named.len().saturating_sub(NAMED_MAX);
    named.truncate(NAMED_MAX);
    let mut there = if named.is_empty() {
        "they have no entry for packages".to_owned()
    } else {
        format!("they have {}", named.join(", "))
    };
    if more > 0 {
        there += &format!(" and {more} more");
    }
    ImageError::NoArchive {
        etc_apt: etc_apt.into(),
        suite: suite.to_owned(),
        there,
    }
}

/// Returns a URI without a name and password.
fn shown(uri: &str) -> String {
    match uri.split_once("://") {
        Some((scheme, rest)) => {
            let (host, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
            let host = host.rsplit('@').next().unwrap_or_default();
            format!("{scheme}://{host}{path}")
        }
        None => uri.to_owned(),
    }
}

fn bad(place: &str, reason: &str) -> ImageError {
    ImageError::Sources {
        place: place.to_owned(),
        reason: reason.to_owned(),
    }
}

/// Returns all entries, in the order in which apt reads them.
fn read_all(etc_apt: &Path) -> Result<Vec<Entry>, ImageError> {
    let mut files: Vec<PathBuf> = fs::read_dir(etc_apt.join("sources.list.d"))
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
        .collect();
    files.sort();
    files.insert(0, etc_apt.join("sources.list"));
    let mut entries = Vec::new();
    for path in files {
        let extension = path.extension().and_then(|extension| extension.to_str());
        let parse: fn(&str, &str) -> Result<Vec<Entry>, ImageError> = match extension {
            Some("list") => parse_lines,
            Some("sources") => parse_stanzas,
            _ => continue,
        };
        let place = path.display().to_string();
        match fs::read(&path) {
            Ok(bytes) => entries.extend(parse(&place, &String::from_utf8_lossy(&bytes))?),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => return Err(bad(&place, &error.to_string())),
        }
    }
    Ok(entries)
}

fn is_ours<'a>(mut architectures: impl Iterator<Item = &'a str>) -> bool {
    architectures.any(|name| name == "amd64")
}

/// Parses `deb [option=value ...] URI SUITE COMPONENT ...`, one per line.
fn parse_lines(file: &str, text: &str) -> Result<Vec<Entry>, ImageError> {
    let mut entries = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.split('#').next().unwrap_or_default().trim();
        let Some(rest) = line.strip_prefix("deb").filter(|rest| {
            // Not `deb-src`.
            rest.starts_with(char::is_whitespace) || rest.starts_with('[')
        }) else {
            continue;
        };
        let place = format!("{file}:{number}");
        let rest = rest.trim_start();
        let (options, rest) = match rest.strip_prefix('[') {
            Some(rest) => rest
                .split_once(']')
                .ok_or_else(|| bad(&place, "`[` has no `]`"))?,
            None => ("", rest),
        };
        let option = |name: &str| {
            let mut all = options.split_whitespace();
            all.find_map(|option| option.strip_prefix(name)?.strip_prefix('='))
        };
        // A disc's name has spaces in it, and no disc has an image's packages.
        let rest = rest.trim_start();
        if rest.starts_with("cdrom:") || option("arch").is_some_and(|arch| !is_ours(arch.split(','))) {
            continue;
        }
        let mut words = rest.split_whitespace().map(str::to_owned);
        let (Some(uri), Some(suite)) = (words.next(), words.next()) else {
            return Err(bad(&place, "`deb` needs a URI and a suite after it"));
        };
        entries.push(Entry {
            place,
            uris: vec![uri],
            suites: vec![suite],
            components: words.collect(),
            signed_by: option("signed-by").map(str::to_owned),
        });
    }
    Ok(entries)
}

/// Parses `Name: value` lines, in stanzas separated by an empty line. A line that begins with a space
/// continues the value.
fn parse_stanzas(file: &str, text: &str) -> Result<Vec<Entry>, ImageError> {
    let mut entries = Vec::new();
    let mut fields: Vec<(String, String)> = Vec::new();
    let mut begins = 1;
    for (number, line) in (1..).zip(text.lines().chain([""])) {
        if line.starts_with('#') {
            continue;
        }
        if line.trim().is_empty() {
            entries.extend(of_fields(&format!("{file}:{begins}"), &fields)?);
            fields.clear();
        } else if line.starts_with([' ', '\t']) {
            let (_, value) = fields
                .last_mut()
                .ok_or_else(|| bad(&format!("{file}:{number}"), "it goes on with no field"))?;
            value.push('\n');
            value.push_str(line.trim());
        } else {
            let (name, value) = line.split_once(':').ok_or_else(|| {
                bad(
                    &format!("{file}:{number}"),
                    "a field is `Name: value`, and this has no `:`",
                )
            })?;
            if fields.is_empty() {
                begins = number;
            }
            fields.push((name.trim().to_ascii_lowercase(), value.trim().to_owned()));
        }
    }
    Ok(entries)
}

fn of_fields(place: &str, fields: &[(String, String)]) -> Result<Option<Entry>, ImageError> {
    if fields.is_empty() {
        return Ok(None);
    }
    let field = |name: &str| {
        let found = fields.iter().find(|(of, _)| of == name);
        found.map(|(_, value)| value.as_str())
    };
    let is_off = field("enabled").is_some_and(|value| {
        let value = value.to_ascii_lowercase();
        ["no", "false", "without", "off", "disable", "0"].contains(&value.as_str())
    });
    if is_off {
        return Ok(None);
    }
    let needed = |name: &str, shown: &str| {
        let value = field(name).filter(|value| !value.is_empty());
        value.ok_or_else(|| bad(place, &format!("the entry has no `{shown}`")))
    };
    let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    let is_binary = needed("types", "Types")?
        .split_whitespace()
        .any(|kind| kind == "deb");
    if !is_binary || field("architectures").is_some_and(|names| !is_ours(names.split_whitespace())) {
        return Ok(None);
    }
    Ok(Some(Entry {
        place: place.to_owned(),
        uris: words(needed("uris", "URIs")?),
        suites: words(needed("suites", "Suites")?),
        components: words(field("components").unwrap_or_default()),
        // The key itself may be here, one line after another.
        signed_by: field("signed-by")
            .filter(|keys| !keys.is_empty())
            .map(|keys| keys.replace('\n', "\n ")),
    }))
}

#[cfg(test)]
mod tests;
