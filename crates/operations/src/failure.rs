//! Errors of operations.

/// Kind of a failure. The API derives its HTTP status from it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Kind {
    /// There is no such VM, cell or cluster.
    Unknown,
    /// The VM, the guest or the cell can't carry the operation out now.
    Refused,
    /// No reply came within the limit.
    Late,
    /// The host failed.
    Host,
}

/// Reason why an operation was not carried out.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("{what}")]
pub struct Failure {
    /// Kind, from which the API takes the HTTP status.
    pub kind: Kind,
    /// Cause, in one line.
    pub what: String,
    /// Help for the user, if any.
    pub help: Option<String>,
}

impl Failure {
    /// Creates a failure without help.
    pub fn new(kind: Kind, what: impl Into<String>) -> Self {
        Self {
            kind,
            what: what.into(),
            help: None,
        }
    }

    /// Creates a failure from an error of the host.
    pub fn host(error: impl std::fmt::Display) -> Self {
        Self::new(Kind::Host, error.to_string())
    }

    /// Adds a line that says what the user can do.
    #[must_use]
    pub fn help(self, help: impl Into<String>) -> Self {
        Self {
            help: Some(help.into()),
            ..self
        }
    }

    /// Formats cause and help as one line.
    pub fn line(&self) -> String {
        match &self.help {
            Some(help) => format!("{}; {help}", self.what),
            None => self.what.clone(),
        }
    }
}

/// Formats an error and its causes as one line.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(cause) => format!("{error}: {}", chain(cause)),
        None => error.to_string(),
    }
}
