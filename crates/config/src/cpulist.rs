//! Lists of CPUs as Linux writes them: `0-1,4`.

/// Reads a list of CPUs; sorted, each once. `None` when it is not one, is empty, or names a CPU above 253.
pub fn parse(text: &str) -> Option<Vec<u8>> {
    let mut cpus = Vec::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (u8, u8) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        if first > last || last > 253 {
            return None;
        }
        cpus.extend(first..=last);
    }
    cpus.sort_unstable();
    cpus.dedup();
    Some(cpus)
}
