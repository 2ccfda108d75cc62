//! A fault in a spec, before its place in a text is known.

/// A fault in a spec: its path (keys and indices), its description, and how to fix it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    pub(crate) path: Vec<String>,
    /// Cause, in one line.
    pub message: String,
    /// How to fix the fault.
    pub help: String,
    /// How to fix the fault where the spec was made from flags, when that differs.
    pub(crate) flag_help: Option<String>,
}

impl Fault {
    /// Sets how to fix the fault with flags.
    pub(crate) fn or_by_flag(mut self, help: impl Into<String>) -> Self {
        self.flag_help = Some(help.into());
        self
    }
}

pub(crate) fn fault(path: &[&str], message: impl Into<String>, help: impl Into<String>) -> Fault {
    Fault {
        path: path.iter().map(|&step| step.to_owned()).collect(),
        message: message.into(),
        help: help.into(),
        flag_help: None,
    }
}
