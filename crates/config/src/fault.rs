//! What is wrong with a spec, before it is known where in which text it stands.

/// Something a spec may not say: where (keys and indices), what, and the mend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    pub(crate) path: Vec<String>,
    /// What is wrong, in one line.
    pub message: String,
    /// How to mend it.
    pub mend: String,
    /// How to mend it where the spec was made from flags, when that differs.
    pub(crate) flag_mend: Option<String>,
}

impl Fault {
    /// Says how to mend it with flags.
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
