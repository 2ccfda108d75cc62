//! A guest kernel's symbols, and which of them are in a page of the guest's memory. Pure: text in, names out.

use page::PAGE_BYTES;

/// Where x86-64 kernels map themselves: physical address 0 is here, as long as the kernel lies where it was
/// linked, which it does as this monitor loads it.
const KERNEL_MAP: u64 = 0xffff_ffff_8000_0000;
/// Length of the kernel's mapping; modules come after it.
const KERNEL_MAP_BYTES: u64 = 1 << 30;
/// Prefix of the symbols of padding before functions, which are left out.
const PADDING: &str = "__pfx_";
/// Maximum number of names reported for a page.
const NAMES_MAX: usize = 3;
/// Maximum number of characters shown of a wrong line.
const SHOWN_CHARS: usize = 40;

/// The symbols of a kernel at their guest-physical addresses.
#[derive(Debug)]
pub struct Symbols(Vec<Symbol>);

/// In the order of addresses, and data before code at one address.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Symbol {
    address: u64,
    is_code: bool,
    name: String,
}

/// Reason why a file of symbols is refused.
#[derive(Debug, PartialEq, Eq)]
pub struct Fault {
    /// Number of the line, from 1.
    pub line: usize,
    /// Description of the fault, without the line's number.
    pub what: String,
    /// Help: how to fix the fault.
    pub help: &'static str,
}

/// Content of a line.
enum Line {
    /// No symbol: an empty line.
    Blank,
    /// A symbol of a module: its address does not give its guest-physical address.
    Module,
    /// A symbol of the kernel: virtual address, whether it is code, name.
    Kernel(u64, bool, String),
}

impl Symbols {
    /// Parses a System.map, or `/proc/kallsyms`: a symbol per line, as `ffffffff82a07000 D jiffies`.
    ///
    /// # Errors
    /// At the first line that is no symbol, and when no symbol is at an address of the kernel.
    pub fn parse(text: &[u8]) -> Result<Self, Fault> {
        let (mut symbols, mut last, mut are_hidden) = (Vec::new(), 1, true);
        for (number, bytes) in (1..).zip(text.split(|byte| *byte == b'\n')) {
            match line(bytes) {
                Some(Line::Blank) => continue,
                Some(Line::Module) => {}
                Some(Line::Kernel(address, is_code, name)) => {
                    are_hidden &= address == 0;
                    let address = address.checked_sub(KERNEL_MAP);
                    if let Some(address) = address.filter(|address| *address < KERNEL_MAP_BYTES)
                        && !name.starts_with(PADDING)
                    {
                        symbols.push(Symbol {
                            address,
                            is_code,
                            name,
                        });
                    }
                }
                None => {
                    let shown: String = String::from_utf8_lossy(bytes).chars().take(SHOWN_CHARS).collect();
                    return Err(Fault {
                        line: number,
                        what: format!("{shown:?} is no symbol"),
                        help: "a System.map or a guest's /proc/kallsyms has lines as `ffffffff82a07000 D \
                               jiffies`",
                    });
                }
            }
            last = number;
        }
        let (what, help) = match (symbols.is_empty(), text.trim_ascii().is_empty(), are_hidden) {
            (false, ..) => {
                symbols.sort();
                return Ok(Self(symbols));
            }
            (_, true, _) => (
                "no symbol is here",
                "give the guest kernel's System.map, or its /proc/kallsyms",
            ),
            (_, _, true) => (
                "all addresses up to here are hidden (kptr_restrict)",
                "read /proc/kallsyms as root in the guest",
            ),
            _ => (
                "no symbol up to here is at an address of a kernel (ffffffff80000000 to ffffffffbfffffff)",
                "give those of the guest's x86-64 kernel",
            ),
        };
        Err(Fault {
            line: last,
            what: what.to_owned(),
            help,
        })
    }

    /// Returns the symbols that begin in the page at a guest-physical address, data first, at most three;
    /// else the symbol that the page is a part of, as `name+0x1000`. Outside the kernel's image there are
    /// none.
    pub fn of_page(&self, page: u64) -> Vec<String> {
        let before = |address: u64| self.0.partition_point(|symbol| symbol.address < address);
        let (first, end) = (before(page), before(page.saturating_add(PAGE_BYTES)));
        if first < end {
            let mut inside: Vec<&Symbol> = self.0[first..end].iter().collect();
            inside.sort_by_key(|symbol| symbol.is_code);
            let names = inside.iter().take(NAMES_MAX);
            return names.map(|symbol| symbol.name.clone()).collect();
        }
        match first.checked_sub(1).and_then(|last| self.0.get(last)) {
            Some(last) if first < self.0.len() => {
                let symbol = &self.0[before(last.address)];
                vec![format!("{}+{:#x}", symbol.name, page - symbol.address)]
            }
            _ => Vec::new(),
        }
    }
}

/// Parses a line; none if it is neither blank nor a symbol.
fn line(bytes: &[u8]) -> Option<Line> {
    let mut words = std::str::from_utf8(bytes).ok()?.split_ascii_whitespace();
    let Some(address) = words.next() else {
        return Some(Line::Blank);
    };
    let (kind, name, module) = (words.next()?, words.next()?, words.next());
    // A number's parser would accept a sign.
    if !address.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return None;
    }
    let address = u64::from_str_radix(address, 16).ok()?;
    let &[kind] = kind.as_bytes() else {
        return None;
    };
    // They are printed.
    if !kind.is_ascii_graphic() || !name.bytes().all(|byte| byte.is_ascii_graphic()) || words.next().is_some()
    {
        return None;
    }
    match module {
        Some(module) if module.starts_with('[') && module.ends_with(']') => Some(Line::Module),
        Some(_) => None,
        None => {
            let is_data = b"bcdgrsv".contains(&kind.to_ascii_lowercase());
            Some(Line::Kernel(address, !is_data, name.to_owned()))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAP: &str = "\
0000000000000000 D fixed_percpu_data
ffffffff81000000 T _text
ffffffff81000008 t __pfx_startup_64
ffffffff81000010 T startup_64
ffffffff82a07000 T code_among_data
ffffffff82a07040 D jiffies
ffffffff82a07080 B timekeeper
ffffffff82a07fff d last_byte
ffffffff82a08000 b log_buf
ffffffff82a08000 t alias_of_log_buf

ffffffff82a0b000 B _end
ffffffffc0001000 t probe\t[virtio_net]
ffffffffff600000 T vsyscall
";

    fn symbols() -> Symbols {
        Symbols::parse(MAP.as_bytes()).unwrap()
    }

    fn fault(text: &[u8]) -> Fault {
        Symbols::parse(text).unwrap_err()
    }

    #[test]
    fn a_page_has_the_names_that_begin_in_it_and_data_comes_first() {
        assert_eq!(
            symbols().of_page(0x2a0_7000),
            ["jiffies", "timekeeper", "last_byte"]
        );
        assert_eq!(symbols().of_page(0x100_0000), ["_text", "startup_64"]);
    }

    #[test]
    fn page_inside_a_symbol_has_that_symbols_name_and_offset() {
        assert_eq!(symbols().of_page(0x2a0_9000), ["log_buf+0x1000"]);
        assert_eq!(symbols().of_page(0x100_1000), ["startup_64+0xff0"]);
    }

    #[test]
    fn pages_outside_of_the_kernel_have_no_names() {
        for page in [0, 0xff_f000, 0x2a0_c000, 0x4000_0000, u64::MAX - 4095, u64::MAX] {
            assert_eq!(symbols().of_page(page), [""; 0], "{page:#x}");
        }
    }

    #[test]
    fn addresses_that_are_hidden_are_to_be_read_by_root() {
        let hidden = fault(
            b"0000000000000000 T _text\n0000000000000000 D jiffies\n0000000000000000 t probe\t[virtio_net]\n",
        );
        assert_eq!(hidden.line, 3);
        assert!(hidden.what.contains("kptr_restrict"), "{hidden:?}");
        assert!(hidden.help.contains("as root"), "{hidden:?}");
    }

    #[test]
    fn invalid_symbol_is_refused_with_its_line() {
        for wrong in [
            "jiffies",
            "zz D jiffies",
            "+1 D jiffies",
            "ffffffff82a07000 D",
            "ffffffff82a07000 DD jiffies",
            "1ffffffff82a07000 D jiffies",
            "ffffffff82a07000 D jiffies virtio_net",
            "ffffffff82a07000 D jiffies [a] b",
            "ffffffff82a07000 D \u{1b}[31mred",
            "ffffffff82a07000 D jiffi\u{e9}s",
        ] {
            let found = fault(format!("ffffffff81000000 T _text\n{wrong}\n").as_bytes());
            assert_eq!(found.line, 2, "{wrong}");
            assert!(found.what.is_ascii() || wrong.contains('\u{e9}'), "{found:?}");
            assert!(!found.what.contains('\u{1b}'), "{found:?}");
        }
        let long = fault(&[0xff; 100_000]);
        assert!((long.line, long.what.len() < 1000) == (1, true), "{long:?}");
    }

    #[test]
    fn files_without_a_symbol_of_the_kernel_are_refused_with_the_reason() {
        for empty in [&b""[..], b"\n \n\t\n"] {
            assert_eq!(fault(empty).what, "no symbol is here");
        }
        let program = fault(b"0000000000401000 T main\n0000000000404000 D environ\n");
        assert!(
            program.line == 2 && program.what.contains("address of a kernel"),
            "{program:?}"
        );
    }

    #[test]
    fn garbage_is_refused_or_read_and_never_a_panic() {
        // Words of symbols in a pseudo-random order (xorshift, any seed but 0).
        let words: [&[u8]; 12] = [
            b"ffffffffffffffff",
            b"ffffffff80000000",
            b"0",
            b"D",
            b"[x]",
            b"[",
            b"\xff\xfe",
            b" ",
            b"\t",
            b"\r",
            b"\n",
            b"\0",
        ];
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        for _ in 0..20_000 {
            let mut text = Vec::new();
            for _ in 0..12 {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                text.extend_from_slice(words[(state % 12) as usize]);
            }
            match Symbols::parse(&text) {
                Ok(symbols) => drop(symbols.of_page(state)),
                Err(fault) => assert!(fault.line >= 1 && !fault.what.contains('\n'), "{fault:?}"),
            }
        }
    }
}
