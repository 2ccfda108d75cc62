//! A fault in a spec, before its place in a text is known.

/// A fault in a spec: its path (keys and indices), what is wrong, and how to fix it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    pub(crate) path: Vec<String>,
    /// What is wrong, in one line.
    pub message: String,
    /// How to fix the fault.
    pub mend: String,
    /// How to fix the fault where the spec was made from flags, when that differs.
    pub(crate) flag_mend: Option<String>,
}

impl Fault {
    /// Sets how to fix the fault with flags.
    pub(crate) fn or_by_flag(mut self, mend: impl Into<String>) -> Self {
        self.flag_mend = Some(mend.into());
        self
    }
}

pub(crate) fn fault(path: &[&str], message: impl Into<String>, mend: impl Into<String>) -> Fault {
    Fault {
        path: path.iter().map(|&step| step.to_owned()).collect(),
        message: message.into(),
        mend: mend.into(),
        flag_mend: None,
    }
}
