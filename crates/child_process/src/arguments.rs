//! Arguments of sealed processes: words `name=value` of the command line. Pure.

/// How strictly a process seals itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Seal {
    /// Applies the layers that the host allows.
    #[default]
    Auto,
    /// Applies every layer, or ends.
    Require,
    /// Applies nothing.
    Off,
}

impl Seal {
    const ALL: [(Self, &str); 3] = [
        (Self::Auto, "auto"),
        (Self::Require, "require"),
        (Self::Off, "off"),
    ];
}

/// A word of the command line that is no argument.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no argument")]
pub struct UnknownWord(pub String);

/// Returns the words of what every sealed process receives: its seal, and the user and group to which it
/// changes.
pub fn words(seal: Seal, user: Option<(u32, u32)>) -> Vec<String> {
    let seals = Seal::ALL.iter().filter(|(each, _)| *each == seal);
    let mut words: Vec<String> = seals.map(|(_, name)| format!("sandbox={name}")).collect();
    words.extend(user.map(|(uid, gid)| format!("user={uid}:{gid}")));
    words
}

/// Parses the words of a process. `take` applies a name and its value, or returns none where they are no
/// argument.
///
/// # Errors
/// Returns the first word that is no argument.
pub fn read<A: Default>(
    words: impl IntoIterator<Item = String>,
    take: impl Fn(&mut A, &str, &str) -> Option<()>,
) -> Result<A, UnknownWord> {
    let mut arguments = A::default();
    for word in words {
        let taken = word.split_once('=');
        let taken = taken.and_then(|(name, value)| take(&mut arguments, name, value));
        taken.ok_or(UnknownWord(word))?;
    }
    Ok(arguments)
}

/// Parses the value of the word `sandbox`.
pub fn read_seal(value: &str) -> Option<Seal> {
    let found = Seal::ALL.into_iter().find(|(_, name)| *name == value);
    found.map(|(seal, _)| seal)
}

/// Parses the value of the word `user`.
pub fn read_user(value: &str) -> Option<(u32, u32)> {
    let (uid, gid) = value.split_once(':')?;
    Some((uid.parse().ok()?, gid.parse().ok()?))
}
