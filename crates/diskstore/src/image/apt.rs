//! Debian packages: downloads them and checks the chain of signatures.
//!
//! `apt-get` does the work, with lists and packages in the store's cache. So the machine's own apt is
//! unchanged and no privilege is needed.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::command::run;
use super::sources::Sources;
use super::{ImageError, failed};

/// Maximum age of package lists.
const LISTS_AGE_MAX: Duration = Duration::from_secs(24 * 3600);

/// apt with separate lists and packages.
pub struct Apt {
    folder: PathBuf,
}

impl Apt {
    /// Prepares apt for `sources`, and fetches package lists unless they are fresh.
    pub fn open(cache: &Path, sources: &Sources, each: &mut dyn FnMut(&str)) -> Result<Self, ImageError> {
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
        let same = fs::read_to_string(&path).is_ok_and(|before| before == sources.text);
        let stamp = apt.folder.join("updated");
        let age = fs::metadata(&stamp)
            .and_then(|meta| meta.modified())
            .ok()
            .and_then(|time| time.elapsed().ok());
        if !same || age.is_none_or(|age| age > LISTS_AGE_MAX) {
            if !same {
                // If this update fails, the next attempt must fetch the lists again.
                let _ = fs::remove_file(&stamp);
                fs::write(&path, &sources.text).map_err(failed("write", &path))?;
            }
            let is_first = !stamp.exists();
            apt.update(&sources.origin, is_first, each)?;
            fs::write(&stamp, "").map_err(failed("write", &stamp))?;
        }
        Ok(apt)
    }

    /// Fetches package lists. All of them must arrive only when there are none yet.
    fn update(&self, origin: &str, is_first: bool, each: &mut dyn FnMut(&str)) -> Result<(), ImageError> {
        let mut command = self.command("apt-get");
        command.args(["-q", "update"]);
        if is_first {
            command.arg("--error-on=any");
        }
        let updated = run(&mut command, "apt", each);
        updated.map(drop).map_err(|error| match error {
            ImageError::ProgramFailed { output, .. } => ImageError::Lists {
                origin: origin.to_owned(),
                reason: first_error(&output),
            },
            other => other,
        })
    }

    /// Resolves a meta-package: the first of its dependencies whose name starts with `prefix`.
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

    /// Downloads a package, or finds it in the cache, and returns its file. apt checks it against the signed
    /// lists.
    pub fn download(&self, package: &str, each: &mut dyn FnMut(&str)) -> Result<PathBuf, ImageError> {
        let archives = self.folder.join("archives");
        let mut uris = self.command("apt-get");
        // With an empty archive: for a package that is already downloaded, apt prints nothing.
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
        // apt itself accepts a complete file as downloaded.
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
            // Into the user's own folder, which apt's own user can't enter.
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

/// Returns apt's first error, or else its last line.
fn first_error(output: &str) -> String {
    let mut lines = output.lines().map(str::trim);
    let complaint = lines.find_map(|line| line.strip_prefix("E: "));
    let last = || output.lines().map(str::trim).rfind(|line| !line.is_empty());
    complaint.or_else(last).unwrap_or("it gave no reason").to_owned()
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
    fn apts_first_complaint_is_the_reason() {
        let output = "Ign:1 http://mirror.example/debian bookworm InRelease\nE: The repository has no Release file.\nE: Other";
        assert_eq!(first_error(output), "The repository has no Release file.");
        assert_eq!(first_error("apt: killed\n\n"), "apt: killed");
        assert_eq!(first_error(""), "it gave no reason");
    }
}
