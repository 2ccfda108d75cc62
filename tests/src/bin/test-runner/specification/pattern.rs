//! Patterns of test names: `shard block::*`, `endings::five_reboots...`, `boot::with_{one,two}_cpus`.

/// Expands `a{b,c}d` to `abd` and `acd`.
pub fn braces(text: &str) -> Vec<String> {
    let Some((start, rest)) = text.split_once('{') else {
        return vec![text.to_owned()];
    };
    let Some((inner, end)) = rest.split_once('}') else {
        return vec![text.to_owned()];
    };
    inner
        .split(',')
        .flat_map(|part| braces(&format!("{start}{}{end}", part.trim())))
        .collect()
}

/// Whether a pattern matches a test's full name.
pub fn matches(pattern: &str, name: &str) -> bool {
    let (package, path) = pattern.rsplit_once(' ').unwrap_or(("", pattern));
    let (own, modules) = name.split_once(' ').unwrap_or(("", name));
    // A guest test's name has no crate; its program is its first module.
    if !own.is_empty() && !package.is_empty() && package.split(' ').next() != Some(own) {
        return false;
    }
    let mut modules = modules.split("::");
    path.split("::")
        .all(|wanted| modules.by_ref().any(|module| alike(wanted, module)))
}

/// Whether a pattern matches a text; `*` and `...` match anything.
pub fn alike(wanted: &str, word: &str) -> bool {
    let wanted = wanted.replace("...", "*");
    let mut parts = wanted.split('*');
    let Some(mut rest) = parts.next().and_then(|first| word.strip_prefix(first)) else {
        return false;
    };
    let Some(last) = wanted
        .contains('*')
        .then(|| wanted.rsplit('*').next().unwrap_or_default())
    else {
        return rest.is_empty();
    };
    for part in parts {
        let Some(at) = rest.find(part) else { return false };
        rest = &rest[at + part.len()..];
    }
    last.is_empty() || word.ends_with(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stars_and_dots_stand_for_anything() {
        assert!(alike("a*", "abc") && alike("a*c", "abc") && alike("*", "") && alike("ab...", "ab"));
        assert!(!alike("a", "ab") && !alike("b*", "ab") && !alike("a*d", "abc"));
    }
}
