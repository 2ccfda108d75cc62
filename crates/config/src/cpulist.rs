//! Lists of CPUs as Linux writes them: `0-1,4`.

/// CPUs are numbered below this: a VM has 254 at most.
const CPUS_MAX: u8 = 254;

/// Reads a list of CPUs; sorted, each once. `None` when it is not one, is empty, or names a CPU above 253.
pub fn parse(text: &str) -> Option<Vec<u8>> {
    let mut listed = [false; CPUS_MAX as usize];
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (number(first)?, number(last)?);
        if first > last {
            return None;
        }
        listed.get_mut(first..=last)?.fill(true);
    }
    Some((0..CPUS_MAX).filter(|&cpu| listed[usize::from(cpu)]).collect())
}

/// Digits only: `parse` alone would take a sign.
fn number(text: &str) -> Option<usize> {
    let text = text.trim();
    text.bytes()
        .all(|byte| byte.is_ascii_digit())
        .then(|| text.parse().ok())?
}
