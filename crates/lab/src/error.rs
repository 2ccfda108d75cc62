//! Errors of labs.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// An error of a lab. Each message has help where there is a remedy.
#[derive(Debug, thiserror::Error, miette::Diagnostic)]
pub enum LabError {
    /// QEMU is missing.
    #[error("qemu-system-x86_64 was not found: install it with `apt-get install qemu-system-x86`")]
    NoQemu,
    /// There is no host kernel, and no means to get one.
    #[error(
        "no kernel for the lab's hosts: {reason}. Give one with MIRRORBALL_LAB_KERNEL=/path/to/vmlinuz and \
         MIRRORBALL_LAB_MODULES=/path/to/lib/modules/VERSION"
    )]
    NoKernel {
        /// Reason of the failure.
        reason: String,
    },
    /// A kernel module that a host needs isn't there.
    #[error("the lab's kernel has no module {name} below {}", directory.display())]
    NoModule {
        /// Name of the module.
        name: String,
        /// Directory in which it was searched.
        directory: PathBuf,
    },
    /// A host ended by itself.
    #[error(
        "the lab died: host {host} ended by itself ({status}); its console is in {}{tail}",
        console.display()
    )]
    Died {
        /// Name of the host.
        host: String,
        /// How QEMU ended.
        status: String,
        /// Its whole console.
        console: PathBuf,
        /// The console's last lines, each after a line break.
        tail: String,
    },
    /// A host hangs.
    #[error(
        "the lab died: host {host} has not answered for {limit:?}; its console is in {}{tail}",
        console.display()
    )]
    Silent {
        /// Name of the host.
        host: String,
        /// For how long.
        limit: Duration,
        /// Its whole console.
        console: PathBuf,
        /// The console's last lines, each after a line break.
        tail: String,
    },
    /// A host was not up in time.
    #[error("host {host} was not up after {limit:?}; its console is in {}{tail}", console.display())]
    NotUp {
        /// Name of the host.
        host: String,
        /// How long was waited.
        limit: Duration,
        /// Its whole console.
        console: PathBuf,
        /// The console's last lines, each after a line break.
        tail: String,
    },
    /// The run took longer than its limit.
    #[error("the run took longer than its limit of {limit:?} and was killed; host {host}'s console is in \
        {}{tail}",
        console.display())]
    TimeLimit {
        /// Time that the run had.
        limit: Duration,
        /// Name of the host.
        host: String,
        /// Its whole console.
        console: PathBuf,
        /// The console's last lines, each after a line break.
        tail: String,
    },
    /// No lab of that name runs.
    #[error("no lab named {0} is running: start it with `mirrorball lab up --name {0}`")]
    NotRunning(String),
    /// A lab of that name runs already.
    #[error("a lab named {0} is running already: end it with `mirrorball lab down --name {0}`")]
    Running(String),
    /// The lab has no such host.
    #[error("lab {lab} has no host {host}: it has {hosts}")]
    NoHost {
        /// Name of the lab.
        lab: String,
        /// The requested host.
        host: String,
        /// The existing hosts.
        hosts: String,
    },
    /// Two hosts that no network joins.
    #[error(
        "lab {lab} has no link between {one} and {other}: its file names those that it has, as `[[links]]`"
    )]
    NoLink {
        /// Name of the lab.
        lab: String,
        /// Host at one end of the link.
        one: String,
        /// The other, or the same.
        other: String,
    },
    /// A lab inside a lab.
    #[error("this is a lab host already: a lab can't be started inside a lab")]
    InLab,
    /// The supervisor could not start the lab: its reason.
    #[error("{0}")]
    Supervisor(String),
    /// A name that can't be one.
    #[error(
        "{0:?} can't be a lab's name: letters, digits, `-`, `_` and `.`, 63 at most, not starting with `.`"
    )]
    Name(String),
    /// A variable of the environment that makes no sense.
    #[error("{name} is {value:?}: it takes a whole number of seconds")]
    Setting {
        /// Name of the environment variable.
        name: &'static str,
        /// Value of the variable.
        value: String,
    },
    /// The agent in the host failed.
    #[error("the lab host's agent failed")]
    Agent(#[from] agent::client::ClientError),
    /// QEMU did not answer as it should.
    #[error("QEMU's monitor failed: {0}")]
    Monitor(String),
    /// QEMU did not start.
    #[error("QEMU did not start host {host}: {reason}; what it wrote is in {}", log.display())]
    Qemu {
        /// Name of the host.
        host: String,
        /// Last line of its output.
        reason: String,
        /// File of its output.
        log: PathBuf,
    },
    /// An argument, path or variable isn't UTF-8.
    #[error("{0} is not UTF-8, which a lab can't pass on")]
    NotUtf8(String),
    /// A command line that the protocol can't carry.
    #[error("the command is too long for a lab: {bytes} bytes, {limit} at most")]
    TooLong {
        /// Its length in bytes.
        bytes: usize,
        /// The limit, bytes.
        limit: usize,
    },
    /// The operating system reported an error.
    #[error("{what}")]
    Io {
        /// The failed operation.
        what: String,
        /// Error of the host.
        #[source]
        source: io::Error,
    },
}

impl LabError {
    /// The message with its causes, for a person.
    pub fn chain(&self) -> String {
        let mut text = self.to_string();
        let mut cause = std::error::Error::source(self);
        while let Some(error) = cause {
            text += &format!(": {error}");
            cause = error.source();
        }
        text
    }
}

/// Adds the attempted operation to an I/O error.
pub(crate) trait Context<T> {
    /// Returns the error with this text.
    fn context(self, what: impl FnOnce() -> String) -> Result<T, LabError>;

    /// With a verb and a path.
    fn on(self, verb: &str, path: &Path) -> Result<T, LabError>
    where
        Self: Sized,
    {
        self.context(|| format!("could not {verb} {}", path.display()))
    }
}

impl<T, E: Into<io::Error>> Context<T> for Result<T, E> {
    fn context(self, what: impl FnOnce() -> String) -> Result<T, LabError> {
        self.map_err(|source| LabError::Io {
            what: what(),
            source: source.into(),
        })
    }
}
