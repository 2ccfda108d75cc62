//! Errors of operations.

/// The kind of a failure, from which the API takes its status.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Kind {
    /// There is no such VM, cell or cluster.
    Unknown,
    /// The VM, the guest or the cell can't do it now.
    Refused,
    /// No answer came within the limit.
    Late,
    /// The host failed.
    Host,
}

/// Why an operation was not carried out.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("{what}")]
pub struct Failure {
    /// What kind of failure it is.
    pub kind: Kind,
    /// What failed, in one line.
    pub what: String,
    /// What helps, if that is known.
    pub help: Option<String>,
}

impl Failure {
    /// Without help.
    pub fn new(kind: Kind, what: impl Into<String>) -> Self {
        Self {
            kind,
            what: what.into(),
            help: None,
        }
    }

    /// An error of the host.
    pub fn host(error: impl std::fmt::Display) -> Self {
        Self::new(Kind::Host, error.to_string())
    }

    /// With help.
    #[must_use]
    pub fn help(self, help: impl Into<String>) -> Self {
        Self {
            help: Some(help.into()),
            ..self
        }
    }

    /// What failed and what helps, in one line.
    pub fn line(&self) -> String {
        match &self.help {
            Some(help) => format!("{}; {help}", self.what),
            None => self.what.clone(),
        }
    }
}

/// An error and its causes, in one line.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(cause) => format!("{error}: {}", chain(cause)),
        None => error.to_string(),
    }
}
