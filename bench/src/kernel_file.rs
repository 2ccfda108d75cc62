//! Numbers in files of the kernel that have a name and a number on each line, such as `/proc/vmstat`.

use std::fs;
use std::io::{self, Error};

/// Fields of `/proc/vmstat`: pages that were read from swap, and written to it.
const SWAPPED: [&str; 2] = ["pswpin", "pswpout"];

/// The number on the line of `name` in the file.
///
/// # Errors
/// If the file has no such line, or can't be read.
pub fn field(file: &str, name: &str) -> io::Result<u64> {
    let number = number(&fs::read_to_string(file)?, name);
    number.ok_or_else(|| Error::other(format!("no {name} in {file}")))
}

/// Pages that this kernel has read from swap, and written to it, so far.
///
/// # Errors
/// If the kernel does not count them.
pub fn swapped_pages() -> io::Result<[u64; 2]> {
    let [read, written] = SWAPPED.map(|name| field("/proc/vmstat", name));
    Ok([read?, written?])
}

fn number(text: &str, name: &str) -> Option<u64> {
    let mut lines = text.lines().map(str::split_whitespace);
    let mut words = lines.find_map(|mut words| (words.next()? == name).then_some(words))?;
    words.next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn number_is_that_of_the_whole_name() {
        let text = "pswpin_other 7\npswpin 12\npswpout 345\n\nMemAvailable:  89 kB\npswpin";
        let found = ["pswpin", "pswpout", "MemAvailable:", "kB"].map(|name| number(text, name));
        assert_eq!(found, [Some(12), Some(345), Some(89), None]);
    }

    #[test]
    fn error_names_file_and_field() {
        let error = field("/proc/meminfo", "Nothing:").unwrap_err().to_string();
        assert_eq!(error, "no Nothing: in /proc/meminfo");
    }
}
