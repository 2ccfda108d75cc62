//! A guest's kernel command line as Linux reads it (`kernel/params.c`): words between blanks, where a blank
//! between double quotes does not count. Words after `--` are for init. Of several words with one key, the
//! last counts for most keys.

/// Returns `cmdline` with `words` before it, so that its own words are later. Omits words whose keys it has,
/// because for a few keys the first word counts, or all do.
pub fn before<'a>(words: impl IntoIterator<Item = &'a str>, cmdline: &str) -> String {
    let mut all: Vec<&str> = words.into_iter().filter(|word| !has(cmdline, word)).collect();
    all.extend((!cmdline.is_empty()).then_some(cmdline));
    all.join(" ")
}

/// Returns whether `cmdline` has a word with the key of `word`, with any value.
pub fn has(cmdline: &str, word: &str) -> bool {
    words(cmdline).any(|other| key(other) == key(word))
}

/// Returns the value of the last word with that key and a `=`.
pub fn value<'a>(cmdline: &'a str, of: &str) -> Option<&'a str> {
    let values = words(cmdline).filter(|word| key(word) == key(of));
    let said = values.filter_map(|word| Some(word.split_once('=')?.1));
    said.last().map(|value| value.trim_matches('"'))
}

/// Returns the words that the kernel reads.
fn words(cmdline: &str) -> impl Iterator<Item = &str> {
    let mut is_quoted = false;
    let words = cmdline.split(move |character: char| {
        is_quoted ^= character == '"';
        character.is_ascii_whitespace() && !is_quoted
    });
    words.take_while(|word| *word != "--")
}

/// Returns a normalized form of a word's key: `-` equals `_`, and in names of sysctls `/` equals `.`.
fn key(word: &str) -> String {
    let bare = word.trim_start_matches('"');
    let key = bare.split('=').next().unwrap_or(bare);
    key.replace('-', "_").replace('/', ".")
}

/// Adds the frequency of the TSC to the command line of a guest without KVM's clock. Otherwise the guest
/// would measure it, slowly and inaccurately. Unless the guest may rely on the TSC, it would also check the
/// TSC by counting ticks, some of which it may miss.
pub fn with_tsc(cmdline: &str, is_relied_on: bool, khz: u32) -> String {
    let reliable = is_relied_on.then_some("tsc=reliable");
    let khz = format!("tsc_early_khz={khz}");
    before(reliable.into_iter().chain([khz.as_str()]), cmdline)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn added_words_come_first_and_omit_keys_that_are_present() {
        assert_eq!(before(["a=1", "b", "c=2"], "c=3 d"), "a=1 b c=3 d");
        assert_eq!(before(["a=1"], ""), "a=1");
        assert_eq!(before(["a=1", "b"], "b=0 a"), "b=0 a");
    }

    #[test]
    fn tsc_words_are_added_unless_the_command_line_has_them() {
        assert_eq!(
            with_tsc("quiet", true, 2500),
            "tsc=reliable tsc_early_khz=2500 quiet"
        );
        assert_eq!(with_tsc("quiet", false, 2500), "tsc_early_khz=2500 quiet");
        assert_eq!(
            with_tsc("quiet tsc=unstable", true, 2500),
            "tsc_early_khz=2500 quiet tsc=unstable"
        );
        assert_eq!(
            with_tsc("tsc_early_khz=1", true, 2500),
            "tsc=reliable tsc_early_khz=1"
        );
    }

    #[test]
    fn last_word_with_a_key_has_its_value() {
        for (cmdline, expected) in [
            ("quiet a.b=1 a.b=2 -- a.b=3", Some("2")),
            ("a/b=1 a.b", Some("1")),
            ("a.b=\"x y\" c", Some("x y")),
            ("\"a.b=x y\" c", Some("x y")),
            ("a.b= c", Some("")),
            ("a.b a.bc=1", None),
            ("", None),
        ] {
            assert_eq!(value(cmdline, "a.b"), expected, "{cmdline:?}");
        }
    }

    #[test]
    fn keys_are_equal_in_each_spelling_that_linux_accepts() {
        for (cmdline, word, expected) in [
            ("quiet skew-tick=0", "skew_tick=1", true),
            ("sysctl.vm/stat_interval=1", "sysctl.vm.stat_interval=60", true),
            ("\"psi=1\" quiet", "psi=0", true),
            ("a\t psi", "psi=0", true),
            // A part of a value, of another key, and of init's words.
            ("dyndbg=\"file x psi=1 +p\" quiet", "psi=0", false),
            ("psi_x=1 xpsi=1 x=psi", "psi=0", false),
            ("quiet -- psi=1", "psi=0", false),
            ("dyndbg=\"a b\" psi=1", "psi=0", true),
            ("", "psi=0", false),
        ] {
            assert_eq!(has(cmdline, word), expected, "{cmdline:?}, {word:?}");
        }
    }
}
