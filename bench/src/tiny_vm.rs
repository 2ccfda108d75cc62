//! A VM of the image `tiny`, and a program that runs in it, by Mirrorball's commands.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use std::time::Duration;

use serde_json::Value;

use crate::Outcome;
use crate::mirrorball::Mirrorball;

/// Time limit of a boot, which the command of a VM that has not booted keeps, and one for that command.
const BOOT_LIMIT_S: &str = "240";
const EXEC_BOOT_LIMIT: Duration = Duration::from_secs(260);
/// Time limit of any other command.
const LIMIT: Duration = Duration::from_secs(120);

/// A running VM. Ended when dropped.
pub struct TinyVm<'a> {
    mirrorball: &'a Mirrorball,
    name: &'static str,
    /// Path of the program in the guest.
    program: String,
    /// Messages of the guest's kernel at its boot.
    log: String,
}

impl<'a> TinyVm<'a> {
    /// Starts a VM without a network, waits until it has booted, and copies `program` into it. `words` follow
    /// `run`.
    ///
    /// # Errors
    /// If it does not boot.
    pub fn start(
        mirrorball: &'a Mirrorball,
        name: &'static str,
        words: &[&str],
        program: &Path,
    ) -> Outcome<Self> {
        let mut all = vec!["run", "--detach", "--boot-limit", BOOT_LIMIT_S, "--lab", "never"];
        all.extend([
            "--image", "tiny", "--net", "none", "--share", "never", "--name", name,
        ]);
        all.extend(words);
        mirrorball.call(&all, LIMIT)?;
        let file_name = program.file_name().and_then(|name| name.to_str());
        let [program, file_name] = [program.to_str(), file_name];
        let (program, file_name) = program.zip(file_name).ok_or("a path that is no text")?;
        let mut vm = Self {
            mirrorball,
            name,
            program: format!("/{file_name}"),
            log: String::new(),
        };
        let (log, _) = mirrorball.call(&["exec", name, "-T", "--", "dmesg"], EXEC_BOOT_LIMIT)?;
        vm.log = log;
        mirrorball.call(&["cp", program, &format!("{name}:{}", vm.program)], LIMIT)?;
        Ok(vm)
    }

    /// Messages of the guest's kernel at its boot.
    pub fn log(&self) -> &str {
        &self.log
    }

    /// Runs the guest's program to its end; returns the JSON that it prints.
    ///
    /// # Errors
    /// If it fails, or does not end within two minutes.
    pub fn call(&self, words: &[&str]) -> Outcome<Value> {
        let output = self.mirrorball.call(&self.in_guest(words), LIMIT)?.0;
        Ok(serde_json::from_str(&output)?)
    }

    /// Starts the guest's program, which ends after `limit` at the latest.
    ///
    /// # Errors
    /// If the command can't be started.
    pub fn work(&self, words: &[&str], limit: Duration) -> Outcome<Working> {
        let mut command = self.mirrorball.command(&self.in_guest(words), limit);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let input = child.stdin.take();
        let output = BufReader::new(child.stdout.take().ok_or("no output")?);
        Ok(Working { child, input, output })
    }

    /// A command of Mirrorball for this VM: `words`, the VM's name, and `after`.
    ///
    /// # Errors
    /// If it fails.
    pub fn command(&self, word: &str, after: &[&str]) -> Outcome<String> {
        let words = [&[word, self.name], after].concat();
        Ok(self.mirrorball.call(&words, LIMIT)?.0)
    }

    /// The VM's record and state.
    ///
    /// # Errors
    /// If it does not run.
    pub fn inspect(&self) -> Outcome<Value> {
        Ok(serde_json::from_str(&self.command("inspect", &[])?)?)
    }

    fn in_guest<'w>(&'w self, words: &[&'w str]) -> Vec<&'w str> {
        [&["exec", self.name, "-T", "--", &self.program], words].concat()
    }
}

impl Drop for TinyVm<'_> {
    fn drop(&mut self) {
        let _ = self.mirrorball.call(&["kill", self.name], LIMIT);
    }
}

/// A copy of a guest's program, which is beside this one, in Mirrorball's folder.
///
/// # Errors
/// If there is no such program, or no room.
pub fn copy_program(mirrorball: &Mirrorball, name: &str) -> Outcome<PathBuf> {
    let copy = mirrorball.folder().join(name);
    std::fs::copy(std::env::current_exe()?.with_file_name(name), &copy)?;
    Ok(copy)
}

/// A started program of a guest: it prints `READY`, begins after a line of input, prints a line with its
/// result, and ends with its input. Ended when dropped.
pub struct Working {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Working {
    /// Waits until the program awaits its start.
    ///
    /// # Errors
    /// If it ends before.
    pub fn ready(&mut self) -> Outcome<()> {
        match self.line()?.as_str() {
            "READY" => Ok(()),
            line => Err(format!("the guest's program is not ready: {line}").into()),
        }
    }

    /// Starts the work.
    ///
    /// # Errors
    /// If the program has ended.
    pub fn go(&mut self) -> Outcome<()> {
        let input = self.input.as_mut().ok_or("the program has ended")?;
        Ok(writeln!(input, "go")?)
    }

    /// Waits for the result. The program may go on.
    ///
    /// # Errors
    /// If it ends without one.
    pub fn result(&mut self) -> Outcome<Value> {
        Ok(serde_json::from_str(&self.line()?)?)
    }

    fn line(&mut self) -> Outcome<String> {
        let mut line = String::new();
        match self.output.read_line(&mut line)? {
            0 => Err("the guest's program ended without an answer".into()),
            _ => Ok(line.trim_end().to_owned()),
        }
    }
}

impl Drop for Working {
    fn drop(&mut self) {
        drop(self.input.take());
        let _ = self.child.wait();
    }
}
