//! The compared VMs. All of them run the same program, with the same limit of memory on the host.

/// Place of the memory that a VM uses beyond its limit.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Kind {
    /// Mirrorball pages, and the guest does not swap.
    Paging,
    /// Mirrorball pages, and the guest swaps to an ordinary disk.
    PagingAndDisk,
    /// Mirrorball pages, and the guest swaps to the virtual paging disk.
    PagingDisk,
    /// The host swaps QEMU's memory, and the guest does not swap.
    Qemu,
    /// The host swaps QEMU's memory, and the guest swaps to an ordinary disk.
    QemuAndDisk,
}

impl Kind {
    /// All kinds, in the order in which they run.
    pub const ALL: [Self; 5] = [
        Self::Paging,
        Self::PagingAndDisk,
        Self::PagingDisk,
        Self::Qemu,
        Self::QemuAndDisk,
    ];

    /// The kind that others are compared with: the guest pages what the host has paged.
    pub const REFERENCE: Self = Self::PagingAndDisk;

    /// The name on the command line.
    pub fn word(self) -> &'static str {
        match self {
            Self::Paging => "paging",
            Self::PagingAndDisk => "paging-and-disk",
            Self::PagingDisk => "paging-disk",
            Self::Qemu => "qemu",
            Self::QemuAndDisk => "qemu-and-disk",
        }
    }

    /// The kinds of a list such as `paging,qemu`, in the order in which they run.
    pub fn of_list(list: &str) -> Result<Vec<Self>, String> {
        let unknown = |word: &&str| !Self::ALL.iter().any(|kind| kind.word() == *word);
        if let Some(word) = list.split(',').find(unknown) {
            let words = Self::ALL.map(Self::word).join(", ");
            return Err(format!("--kinds: no kind '{word}'; there are {words}"));
        }
        let is_listed = |kind: &Self| list.split(',').any(|word| word == kind.word());
        Ok(Self::ALL.into_iter().filter(is_listed).collect())
    }

    /// The name in the tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Paging => "Mirrorball pages, the guest does not",
            Self::PagingAndDisk => "Mirrorball pages, the guest swaps to an ordinary disk",
            Self::PagingDisk => "Mirrorball pages, the guest swaps to the virtual paging disk",
            Self::Qemu => "the host swaps QEMU's memory, the guest does not",
            Self::QemuAndDisk => "the host swaps QEMU's memory, the guest swaps to an ordinary disk",
        }
    }

    /// Whether QEMU runs the guest.
    pub fn is_qemu(self) -> bool {
        matches!(self, Self::Qemu | Self::QemuAndDisk)
    }

    /// Whether the guest swaps to an ordinary disk, so that each page that it swaps is I/O.
    pub fn has_ordinary_disk(self) -> bool {
        matches!(self, Self::PagingAndDisk | Self::QemuAndDisk)
    }

    /// Whether the guest swaps.
    pub fn guest_swaps(self) -> bool {
        self.has_ordinary_disk() || self == Self::PagingDisk
    }
}

/// Sizes of the compared VMs, MiB.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Guest memory that may be in the host's memory.
    pub resident_mib: u64,
    /// Memory of a guest that swaps.
    pub memory_mib: u64,
    /// Array of the guest's program.
    pub array_mib: u64,
}

impl Sizes {
    /// Memory of the guest. One that does not swap has room for the array beside the memory of others.
    pub fn memory_mib(self, kind: Kind) -> u64 {
        match kind.guest_swaps() {
            true => self.memory_mib,
            false => self.memory_mib + self.array_mib,
        }
    }

    /// A disk that takes all of the array.
    pub fn disk_mib(self) -> u64 {
        2 * self.array_mib
    }

    /// A swap file that takes all of any guest, and its QEMU.
    pub fn host_swap_mib(self) -> u64 {
        self.memory_mib + self.array_mib + self.resident_mib
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_are_found_by_their_words_and_others_refused() {
        let kinds = Kind::of_list("qemu,paging");
        assert_eq!(kinds, Ok(vec![Kind::Paging, Kind::Qemu]));
        let error = Kind::of_list("paging,swap").unwrap_err();
        assert_eq!(
            error,
            "--kinds: no kind 'swap'; there are paging, paging-and-disk, paging-disk, qemu, qemu-and-disk"
        );
    }

    #[test]
    fn guest_that_does_not_swap_has_room_for_the_array() {
        let sizes = Sizes {
            resident_mib: 48,
            memory_mib: 96,
            array_mib: 96,
        };
        assert_eq!(sizes.memory_mib(Kind::PagingDisk), 96);
        assert_eq!(sizes.memory_mib(Kind::Qemu), 192);
        assert!(sizes.host_swap_mib() >= sizes.memory_mib(Kind::Qemu) + sizes.resident_mib);
    }
}
