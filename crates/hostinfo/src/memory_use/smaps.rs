//! `/proc/PID/smaps` as values: one [`Area`] for each mapping, sizes in bytes.
//!
//! Unknown fields are skipped, and a field that an older kernel does not print is 0.

/// A file as the kernel numbers it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FileId {
    /// Major and minor number of its device.
    pub device: (u32, u32),
    /// The file's inode; 0 where no file is mapped.
    pub inode: u64,
}

/// One mapping of a process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Area {
    /// Whether writes reach the file and other processes that map it.
    pub shared: bool,
    /// Whether the processor may execute it.
    pub executable: bool,
    /// The file that is mapped.
    pub file: FileId,
    /// The mapping's name: a path, a tag such as `[heap]`, or nothing.
    pub name: String,
    /// Bytes of it in memory, huge pages of a pool included.
    pub resident: u64,
    /// The same, each page divided by the number of processes that map it.
    pub proportional: u64,
    /// Bytes of it that are this process's own copies, or never were a file's.
    pub anonymous: u64,
    /// Bytes of it that no other page table has, neither this process's a second time.
    pub private: u64,
    /// Bytes of it that are swapped out.
    pub swapped: u64,
    /// The part of `swapped` that is anonymous, each page divided by the number of its users.
    pub swapped_anonymous: u64,
    /// Whether it is left out of core dumps, as a shard's guest memory is.
    pub undumped: bool,
    /// Whether the host's scanner merges its anonymous pages with equal ones.
    pub scanned: bool,
}

impl Area {
    /// Bytes in memory that are pages of the file.
    pub fn of_file(&self) -> u64 {
        self.resident.saturating_sub(self.anonymous)
    }

    /// The process's part of [`Self::of_file`]. A shard has no children, so it shares no anonymous page that
    /// the host's scanner has not merged.
    pub fn part_of_file(&self) -> u64 {
        self.proportional.saturating_sub(self.anonymous)
    }

    /// Bytes of the file that are swapped out: of memory without a file on disk only.
    pub fn swapped_of_file(&self) -> u64 {
        self.swapped.saturating_sub(self.swapped_anonymous)
    }
}

/// Parses the mappings in `text`. Lines that are neither a mapping nor a field of one are skipped.
pub fn parse(text: &str) -> Vec<Area> {
    let mut areas: Vec<Area> = Vec::new();
    for line in text.lines() {
        if let Some(area) = header(line) {
            areas.push(area);
        } else if let (Some(area), Some(flags)) = (areas.last_mut(), line.strip_prefix("VmFlags:")) {
            let has = |wanted| flags.split_whitespace().any(|flag| flag == wanted);
            (area.undumped, area.scanned) = (has("dd"), has("mg"));
        } else if let (Some(area), Some((name, bytes))) = (areas.last_mut(), field(line)) {
            match name {
                "Rss" => area.resident += bytes,
                "Pss" => area.proportional += bytes,
                "Anonymous" => area.anonymous = bytes,
                "Private_Clean" | "Private_Dirty" => area.private += bytes,
                "Swap" => area.swapped = bytes,
                "SwapPss" => area.swapped_anonymous = bytes,
                // Pages of a pool are in neither Rss nor Pss.
                "Private_Hugetlb" | "Shared_Hugetlb" => {
                    area.resident += bytes;
                    area.proportional += bytes;
                }
                _ => {}
            }
        }
    }
    areas
}

/// Parses the line `7f0000000000-7f0008000000 rw-s 00000000 00:01 1033  /memfd:guest-memory (deleted)`.
fn header(line: &str) -> Option<Area> {
    let mut rest = line;
    let mut word = || {
        let trimmed = rest.trim_start();
        let (word, after) = trimmed.split_once(' ').unwrap_or((trimmed, ""));
        rest = after;
        word
    };
    let (start, end) = word().split_once('-')?;
    if [start, end]
        .iter()
        .any(|address| u64::from_str_radix(address, 16).is_err())
    {
        return None;
    }
    let permissions = word().as_bytes();
    let _offset = word();
    let (major, minor) = word().split_once(':')?;
    let device = (
        u32::from_str_radix(major, 16).ok()?,
        u32::from_str_radix(minor, 16).ok()?,
    );
    let inode = word().parse().ok()?;
    Some(Area {
        executable: permissions.get(2) == Some(&b'x'),
        shared: permissions.get(3) == Some(&b's'),
        file: FileId { device, inode },
        name: rest.trim().to_owned(),
        ..Area::default()
    })
}

/// Parses the line `Rss:     81920 kB` to bytes. `/proc/PID/status` and `/proc/meminfo` have such lines too.
pub fn field(line: &str) -> Option<(&str, u64)> {
    let (name, value) = line.split_once(':')?;
    let kib: u64 = value.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some((name, kib.checked_mul(1024)?))
}
