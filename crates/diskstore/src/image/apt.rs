//! Debian's packages: where this machine gets them from, and downloading one with its signature chain checked.
//!
//! `apt-get` does the work, with lists and packages in the store's cache, so that the machine's own apt is not
//! touched and no privilege is needed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::command::run;
use super::{ImageError, failed};

/// How old package lists may be.
const LISTS_AGE_MAX: Duration = Duration::from_secs(24 * 3600);

const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// The sources of `suite` as this machine has them, or `mirror`'s when it has none: a deb822 file's text.
pub fn sources(etc_apt: &Path, suite: &str, mirror: &str) -> String {
    let mut stanzas = Vec::new();
    let mut files = vec![etc_apt.join("sources.list")];
    let entries = fs::read_dir(etc_apt.join("sources.list.d"))
        .into_iter()
        .flatten()
        .flatten();
    files.extend(entries.map(|entry| entry.path()));
    files.sort();
    for path in files {
        let Ok(text) = fs::read_to_string(&path) else {
            continue;
        };
        match path.extension().and_then(|extension| extension.to_str()) {
            Some("sources") => {
                stanzas.extend(text.split("\n\n").filter_map(|stanza| of_deb822(stanza, suite)))
            }
            Some("list") => stanzas.extend(text.lines().filter_map(|line| of_line(line, suite))),
            _ => {}
        }
    }
    if !stanzas
        .iter()
        .any(|stanza| stanza.lines().any(|line| line == format!("Suites: {suite}")))
    {
        stanzas = vec![
            stanza(mirror, suite, "main"),
            stanza(mirror, &format!("{suite}-updates"), "main"),
            stanza(
                &format!("{mirror}-security"),
                &format!("{suite}-security"),
                "main",
            ),
        ];
    }
    stanzas.dedup();
    stanzas.join("\n")
}

fn stanza(uri: &str, suite: &str, components: &str) -> String {
    format!("Types: deb\nURIs: {uri}\nSuites: {suite}\nComponents: {components}\nSigned-By: {KEYRING}\n")
}

/// Debian's archive only has these; third parties name their own suites after Debian's.
fn is_debian(uri: &str, suite: &str, wanted: &str) -> bool {
    let own = ["", "-updates", "-security"]
        .iter()
        .any(|end| suite == format!("{wanted}{end}"));
    let uri = uri.trim_end_matches('/');
    own && (uri.ends_with("/debian") || uri.ends_with("/debian-security") || uri.contains("/debian/"))
}

fn of_deb822(text: &str, wanted: &str) -> Option<String> {
    let field = |name: &str| {
        let mut lines = text.lines().filter(|line| !line.starts_with('#'));
        lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(':').map(str::trim))
    };
    if field("Enabled").is_some_and(|enabled| enabled.eq_ignore_ascii_case("no")) {
        return None;
    }
    if !field("Types")?.split_whitespace().any(|kind| kind == "deb") {
        return None;
    }
    let uri = field("URIs")?.split_whitespace().next()?;
    let suites = field("Suites")?
        .split_whitespace()
        .filter(|suite| is_debian(uri, suite, wanted));
    let stanzas: Vec<String> = suites.map(|suite| stanza(uri, suite, "main")).collect();
    (!stanzas.is_empty()).then(|| stanzas.join("\n"))
}

fn of_line(line: &str, wanted: &str) -> Option<String> {
    let rest = line.trim().strip_prefix("deb ")?.trim_start();
    let rest = if rest.starts_with('[') {
        rest.split_once(']')?.1
    } else {
        rest
    };
    let mut words = rest.split_whitespace();
    let (uri, suite) = (words.next()?, words.next()?);
    is_debian(uri, suite, wanted).then(|| stanza(uri, suite, "main"))
}

/// apt with lists and packages of its own.
pub struct Apt {
    folder: PathBuf,
}

impl Apt {
    /// Prepares apt for `sources`, and fetches package lists unless they are fresh.
    pub fn open(cache: &Path, sources: &str, each: &mut dyn FnMut(&str)) -> Result<Self, ImageError> {
        let apt = Self {
            folder: cache.join("apt"),
        };
        for folder in [
            "lists/partial",
            "archives/partial",
            "none/partial",
            "etc/preferences.d",
            "etc/apt.conf.d",
        ] {
            let folder = apt.folder.join(folder);
            fs::create_dir_all(&folder).map_err(failed("make", &folder))?;
        }
        let path = apt.folder.join("debian.sources");
        let same = fs::read_to_string(&path).is_ok_and(|before| before == sources);
        let stamp = apt.folder.join("updated");
        let age = fs::metadata(&stamp)
            .and_then(|meta| meta.modified())
            .ok()
            .and_then(|time| time.elapsed().ok());
        if !same || age.is_none_or(|age| age > LISTS_AGE_MAX) {
            fs::write(&path, sources).map_err(failed("write", &path))?;
            run(apt.command("apt-get").args(["-q", "update"]), "apt", each)?;
            fs::write(&stamp, "").map_err(failed("write", &stamp))?;
        }
        Ok(apt)
    }

    /// The package a meta-package stands for: the first it depends on whose name starts with `prefix`.
    pub fn behind(&self, package: &str, prefix: &str) -> Result<String, ImageError> {
        let text = run(
            self.command("apt-cache").args(["depends", package]),
            "apt",
            &mut |_| {},
        )?;
        let mut names = text
            .lines()
            .filter_map(|line| line.trim().strip_prefix("Depends: "));
        names
            .find(|name| name.starts_with(prefix))
            .map(String::from)
            .ok_or_else(|| {
                ImageError::Unable(format!(
                    "Debian's {package} does not depend on a {prefix} package"
                ))
            })
    }

    /// Downloads a package (or finds it downloaded): its file. apt checks it against the signed lists.
    pub fn download(&self, package: &str, each: &mut dyn FnMut(&str)) -> Result<PathBuf, ImageError> {
        let archives = self.folder.join("archives");
        let mut uris = self.command("apt-get");
        // With an empty archive: of a package that is there already, apt prints nothing.
        uris.arg("-o").arg(format!(
            "Dir::Cache::archives={}",
            self.folder.join("none").display()
        ));
        let text = run(
            uris.args(["download", "--print-uris", "-q", package]),
            "apt",
            &mut |_| {},
        )?;
        // 'http://…' name.deb bytes SHA256:…
        let name = text
            .lines()
            .last()
            .and_then(|line| line.split_whitespace().nth(1));
        let Some(name) = name.filter(|name| name.ends_with(".deb") && !name.contains('/')) else {
            return Err(ImageError::Unable(format!(
                "apt does not know where {package} is"
            )));
        };
        let file = archives.join(name);
        // apt itself takes a file that is there and whole for downloaded.
        run(
            self.command("apt-get")
                .args(["download", "-q", package])
                .current_dir(&archives),
            "apt",
            each,
        )?;
        if !file.exists() {
            return Err(ImageError::File {
                path: file,
                reason: "apt did not download it".into(),
            });
        }
        Ok(file)
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        let folder = |name: &str| self.folder.join(name).display().to_string();
        for (key, value) in [
            ("Dir::Etc::sourcelist", folder("debian.sources")),
            ("Dir::Etc::sourceparts", "-".into()),
            ("Dir::Etc::preferencesparts", folder("etc/preferences.d")),
            ("Dir::State::lists", folder("lists")),
            ("Dir::Cache::archives", folder("archives")),
            ("Dir::Cache::pkgcache", String::new()),
            ("Dir::Cache::srcpkgcache", String::new()),
            ("Dir::State::status", "/dev/null".into()),
            ("APT::Architecture", "amd64".into()),
            ("APT::Architectures", "amd64".into()),
            ("Acquire::Languages", "none".into()),
            ("APT::Get::List-Cleanup", "true".into()),
            ("DPkg::Post-Invoke::", String::new()),
            // Into the user's own folder, which apt's own user may not enter.
            ("APT::Sandbox::User", "root".into()),
        ] {
            command.arg("-o").arg(format!("{key}={value}"));
        }
        command
            .env("LC_ALL", "C.UTF-8")
            .env("DEBIAN_FRONTEND", "noninteractive");
        command
    }
}

/// Unpacks a package's files into `target`.
pub fn unpack(package: &Path, target: &Path) -> Result<(), ImageError> {
    fs::create_dir_all(target).map_err(failed("make", target))?;
    run(
        Command::new("dpkg-deb").arg("-x").arg(package).arg(target),
        "dpkg",
        &mut |_| {},
    )
    .map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machines_own_mirror_is_used_and_others_archives_are_not() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("sources.list.d")).unwrap();
        let deb822 = "Types: deb deb-src\n# a comment\nURIs: http://mirror.example/debian/\nSuites: bookworm \
                      bookworm-updates bookworm-backports\nComponents: main\n\nEnabled: no\nTypes: deb\nURIs: \
                      http://off.example/debian\nSuites: bookworm\n";
        fs::write(folder.path().join("sources.list.d/debian.sources"), deb822).unwrap();
        let lines = "# deb http://no.example/debian bookworm main\ndeb [signed-by=/k] \
                     http://sec.example/debian-security bookworm-security main\ndeb http://other.example/apt bookworm \
                     main\n";
        fs::write(folder.path().join("sources.list"), lines).unwrap();

        let text = sources(folder.path(), "bookworm", "http://default.example/debian");

        let uris: Vec<&str> = text
            .lines()
            .filter_map(|line| line.strip_prefix("URIs: "))
            .collect();
        let mirror = "http://mirror.example/debian/";
        assert_eq!(uris, ["http://sec.example/debian-security", mirror, mirror]);
        assert!(!text.contains("backports"));
    }

    #[test]
    fn a_machine_of_another_suite_uses_the_default_mirror() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(
            folder.path().join("sources.list"),
            "deb http://mirror.example/debian trixie main\n",
        )
        .unwrap();
        let text = sources(folder.path(), "bookworm", "http://default.example/debian");
        assert!(text.contains("URIs: http://default.example/debian-security\nSuites: bookworm-security\n"));
        assert!(!text.contains("mirror.example"));
    }
}
