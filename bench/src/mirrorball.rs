//! Mirrorball in a runtime directory of the bench's own, and clusters in it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use crate::{Outcome, programs};

/// Time limit until cells are up, or gone.
const CLUSTER_LIMIT: Duration = Duration::from_secs(60);
/// Number of tries to end the cluster: a VM that was killed may still be ending.
const DOWN_TRIES: usize = 20;
const DOWN_PAUSE: Duration = Duration::from_millis(500);

/// A folder in memory, with copies of the started programs, so that none is read over a network. Removed when
/// dropped.
pub struct Mirrorball {
    folder: PathBuf,
}

impl Mirrorball {
    /// Makes the folder, and copies `program` and the programs that it starts into it.
    ///
    /// # Errors
    /// If there is such a folder already, a program is missing, or there is no room.
    pub fn new(folder: &Path, program: &Path) -> Outcome<Self> {
        fs::create_dir(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
        let mirrorball = Self {
            folder: folder.to_owned(),
        };
        programs::copy(program, &mirrorball.program())?;
        Ok(mirrorball)
    }

    /// The folder, where a bench may keep files of its own.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    fn program(&self) -> PathBuf {
        self.folder.join("mirrorball")
    }

    /// Its runtime directory.
    pub fn runtime(&self) -> PathBuf {
        self.folder.join("run")
    }

    /// A call of Mirrorball, without input, that ends after `limit`.
    pub fn command(&self, words: &[&str], limit: Duration) -> Command {
        let mut command = Command::new("timeout");
        command
            // In this process's group, so that a terminal's interrupt ends all of it.
            .args(["--foreground", "-k", "5", &limit.as_secs().to_string()])
            .arg(self.program())
            .args(words)
            .env("MIRRORBALL_RUNTIME", self.runtime())
            .stdin(Stdio::null());
        command
    }

    /// Calls Mirrorball; returns its standard output and standard error.
    ///
    /// # Errors
    /// If it fails, or does not end within `limit`.
    pub fn call(&self, words: &[&str], limit: Duration) -> Outcome<(String, String)> {
        let output = self.command(words, limit).output()?;
        let [said, told] =
            [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
        match output.status.code() {
            Some(0) => Ok((said, told)),
            Some(124) => Err(format!("mirrorball {}: not within {limit:?}", words.join(" ")).into()),
            _ => Err(format!("mirrorball {}: {}", words.join(" "), told.trim()).into()),
        }
    }
}

impl Drop for Mirrorball {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// Cells. Ended when dropped.
pub struct Cluster<'a>(&'a Mirrorball);

impl<'a> Cluster<'a> {
    /// Brings up this host's cells; `words` follow `cluster up`.
    ///
    /// # Errors
    /// If the cells do not come up.
    pub fn up(mirrorball: &'a Mirrorball, words: &[&str]) -> Outcome<Self> {
        let cluster = Self(mirrorball);
        let words = [&["cluster", "up", "--lab", "never"], words].concat();
        mirrorball.call(&words, CLUSTER_LIMIT)?;
        Ok(cluster)
    }
}

impl Drop for Cluster<'_> {
    fn drop(&mut self) {
        for _ in 0..DOWN_TRIES {
            if self.0.call(&["cluster", "down"], CLUSTER_LIMIT).is_ok() {
                return;
            }
            thread::sleep(DOWN_PAUSE);
        }
        eprintln!("bench: the cells do not end");
    }
}
