//! CPU lists in Linux's format: `0-1,4`.

/// vCPU numbers are below this: a VM has at most 254.
const CPUS_MAX: u8 = 254;

/// Parses a list of guest CPUs; sorted, each once. `None` if it is invalid, is empty, or has a CPU above 253.
pub fn parse(text: &str) -> Option<Vec<u8>> {
    let cpus = parse_below(text, usize::from(CPUS_MAX))?;
    Some(
        cpus.into_iter()
            .filter_map(|cpu| u8::try_from(cpu).ok())
            .collect(),
    )
}

/// Parses a list of CPUs with numbers below `limit`; sorted, each once. `None` if it is invalid or empty.
pub fn parse_below(text: &str, limit: usize) -> Option<Vec<usize>> {
    let mut listed = vec![false; limit];
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (number(first)?, number(last)?);
        if first > last {
            return None;
        }
        listed.get_mut(first..=last)?.fill(true);
    }
    Some((0..limit).filter(|&cpu| listed[cpu]).collect())
}

/// Formats sorted CPUs as a list.
pub fn write(cpus: &[usize]) -> String {
    let mut parts = Vec::new();
    for run in cpus.chunk_by(|a, b| a + 1 == *b) {
        parts.push(match run {
            [one] => one.to_string(),
            [first, .., last] => format!("{first}-{last}"),
            [] => continue,
        });
    }
    parts.join(",")
}

/// Parses digits only: `parse` alone would accept a sign.
fn number(text: &str) -> Option<usize> {
    let text = text.trim();
    text.bytes()
        .all(|byte| byte.is_ascii_digit())
        .then(|| text.parse().ok())?
}
