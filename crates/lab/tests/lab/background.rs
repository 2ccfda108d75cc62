//! A lab that runs while a test does other things.

use crate::command::{Ended, directory, lab};

/// A background lab that is ended however the test ends.
pub struct Background {
    pub name: String,
    /// Whether a host did not start at first.
    pub started_again: bool,
}

impl Background {
    #[track_caller]
    pub fn up(text: &str) -> Self {
        let place = tempfile::tempdir().unwrap();
        let file = place.path().join("lab.toml");
        std::fs::write(&file, text).unwrap();
        let mut running = Self {
            name: format!("test-{}", std::process::id()),
            started_again: false,
        };
        let up = Ended::of(lab(&["up", file.to_str().unwrap(), "--name", &running.name]));
        let up = up.expect(0);
        assert!(
            up.stderr.contains("is up after"),
            "no start-up time in the output: {up}"
        );
        eprint!("{}", up.stderr);
        running.started_again = up.stderr.contains("the lab starts again");
        running
    }

    pub fn command<'a>(&'a self, host: &'a str, argv: &[&'a str]) -> Vec<&'a str> {
        [&["exec", "--lab", &self.name, host, "--"], argv].concat()
    }

    /// Runs a program in a host; returns its standard output.
    #[track_caller]
    pub fn on(&self, host: &str, argv: &[&str]) -> String {
        Ended::of(lab(&self.command(host, argv))).expect(0).text()
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        let _ = lab(&["down", "--name", &self.name]).output();
        // A lab that died is kept for a person, who does not exist here.
        let _ = std::fs::remove_dir_all(directory(&self.name));
    }
}
