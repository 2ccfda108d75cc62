//! A lab that runs while a test does other things.

use crate::command::{Ended, directory, lab};

/// A background lab that is ended however the test ends.
pub struct Background {
    pub name: String,
}

impl Background {
    #[track_caller]
    pub fn up(text: &str) -> Self {
        let place = tempfile::tempdir().unwrap();
        let file = place.path().join("lab.toml");
        std::fs::write(&file, text).unwrap();
        let running = Self {
            name: format!("test-{}", std::process::id()),
        };
        let up = Ended::of(lab(&["up", file.to_str().unwrap(), "--name", &running.name]));
        let up = up.expect(0);
        assert!(up.stderr.contains("is up after"), "no time is told: {up}");
        eprint!("{}", up.stderr);
        running
    }

    pub fn command<'a>(&'a self, host: &'a str, argv: &[&'a str]) -> Vec<&'a str> {
        [&["exec", "--lab", &self.name, host, "--"], argv].concat()
    }

    /// Runs a program in a host; gives what it wrote to standard output.
    #[track_caller]
    pub fn on(&self, host: &str, argv: &[&str]) -> String {
        Ended::of(lab(&self.command(host, argv))).expect(0).text()
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        let _ = lab(&["down", "--name", &self.name]).output();
        // One that died is kept for a person, who has not asked for it.
        let _ = std::fs::remove_dir_all(directory(&self.name));
    }
}
