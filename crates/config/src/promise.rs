//! Memory of the host that a VM is promised, needs at worst, and is counted with.

use crate::size::Size;
use crate::validate::MEMORY_BESIDE_BYTES;
use crate::vm::VmSpec;

/// Minimum of `resident`, bytes (`policy::memory::resident_set::LIMIT_MIN_PAGES`).
pub(crate) const RESIDENT_MIN_BYTES: u64 = 16 << 20;
const PAGE_BYTES: u64 = 4096;
/// Memory of a shard for the state of each page of a paged VM, and for the page's slot in the paging file
/// (`docs/design/paging.md`): 13 bytes, and 26 bytes and a bit.
const PAGE_STATE_BYTES: u64 = 40;
/// Memory of a shard for each page of a paging disk: an entry of the disk's table (4 bytes), and the slot.
const DISK_PAGE_STATE_BYTES: u64 = 31;
const MIB: u64 = 1 << 20;
/// Weight of a VM that sets none.
const MEMORY_WEIGHT_DEFAULT: u16 = 100;

impl VmSpec {
    /// Guest memory in the host's memory at most.
    pub fn resident_max(&self) -> Size {
        self.resident
            .map_or(self.memory, |resident| resident.min(self.memory))
    }

    /// Guest memory that stays in the host's memory whatever the pressure.
    pub fn promised(&self) -> Size {
        self.memory_min.unwrap_or_else(|| self.resident_max())
    }

    /// Memory of the host that the VM needs at worst: the guest's, and that of its shard.
    pub fn worst(&self) -> Size {
        let guest = self.resident_max().0.saturating_add(MEMORY_BESIDE_BYTES);
        Size(guest.saturating_add(self.page_states_bytes()))
    }

    /// Memory that a cell counts for the VM: its promise and the states of its pages if it can be trimmed,
    /// else all of its memory.
    pub fn counted(&self) -> Size {
        match self.is_trimmable() {
            true => Size(self.kept_bytes().saturating_add(self.page_states_bytes())),
            false => self.memory,
        }
    }

    /// Memory that a cluster of another user counts for the VM. The VM's own user's processes trim it, so its
    /// control group has what is counted, and the VM may need all that it may have in memory: `resident` and
    /// the states of its pages if it says that it can be trimmed, else all of its memory.
    pub fn counted_for_others(&self) -> Size {
        match self.is_trimmable() {
            true => Size(self.resident_max().0.saturating_add(self.page_states_bytes())),
            false => self.memory,
        }
    }

    /// Whether the host may keep less of the VM in memory than the VM has: it is paged, and says how much of
    /// it is promised.
    pub fn is_trimmable(&self) -> bool {
        self.resident.is_some() && self.memory_min.is_some()
    }

    /// The VM's weight when the host is short of memory.
    pub fn weight_of_memory(&self) -> u16 {
        self.memory_weight.unwrap_or(MEMORY_WEIGHT_DEFAULT)
    }

    /// Thousandths of the guest memory that the VM may have in the host's memory and was not promised.
    pub fn unpromised_permille(&self) -> u32 {
        let most = self.resident_max().0.max(1);
        let open = most.saturating_sub(self.promised().0);
        (u128::from(open) * 1000 / u128::from(most)) as u32
    }

    /// Guest memory below which a trimmed VM does not fall, bytes.
    fn kept_bytes(&self) -> u64 {
        self.promised()
            .0
            .max(RESIDENT_MIN_BYTES)
            .min(self.resident_max().0)
    }

    /// Memory for the states of the pages of a paged VM and of its paging disk, in whole MiB.
    fn page_states_bytes(&self) -> u64 {
        let pages = self.resident.map_or(0, |_| self.memory.0 / PAGE_BYTES);
        let disk_pages = self.paging_disk.map_or(0, |disk| disk.0 / PAGE_BYTES);
        pages
            .saturating_mul(PAGE_STATE_BYTES)
            .saturating_add(disk_pages.saturating_mul(DISK_PAGE_STATE_BYTES))
            .div_ceil(MIB)
            .saturating_mul(MIB)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(keys: &str) -> VmSpec {
        crate::parse("vm.toml", &format!("image = \"x\"\n{keys}")).unwrap()
    }

    #[test]
    fn vm_that_promises_nothing_less_is_promised_and_counted_as_a_whole() {
        let plain = spec("memory = \"512M\"\n");
        assert_eq!(
            (plain.promised(), plain.counted()),
            (Size(512 * MIB), Size(512 * MIB))
        );
        assert_eq!((plain.worst(), plain.unpromised_permille()), (Size(576 * MIB), 0));
        // Its limit may be raised while it runs, up to its memory.
        let paged = spec("memory = \"512M\"\nresident = \"128M\"\n");
        assert_eq!(
            (paged.promised(), paged.counted()),
            (Size(128 * MIB), Size(512 * MIB))
        );
        assert_eq!((paged.worst(), paged.is_trimmable()), (Size(197 * MIB), false));
        assert_eq!(paged.counted_for_others(), Size(512 * MIB));
        // Memory that is not paged can't be taken back.
        let part = spec("memory = \"512M\"\nmemory_min = \"128M\"\n");
        assert_eq!(
            (part.promised(), part.counted()),
            (Size(128 * MIB), Size(512 * MIB))
        );
        assert_eq!((part.is_trimmable(), part.unpromised_permille()), (false, 750));
    }

    #[test]
    fn vm_that_can_be_trimmed_is_counted_with_its_promise_and_the_states_of_its_pages() {
        let keys = |least| format!("memory = \"4G\"\nresident = \"1G\"\nmemory_min = \"{least}\"\n");
        let spec_of = |least| spec(&keys(least));
        // 40 MiB of states.
        assert_eq!(spec_of("256M").counted(), Size(296 * MIB));
        assert_eq!(spec_of("256M").worst(), Size((1024 + 64 + 40) * MIB));
        assert_eq!(spec_of("256M").unpromised_permille(), 750);
        // A shard keeps 16 MiB in any case.
        assert_eq!(spec_of("0M").counted(), Size(56 * MIB));
        assert_eq!(
            (spec_of("0M").promised(), spec_of("0M").unpromised_permille()),
            (Size(0), 1000)
        );
        assert_eq!(spec_of("1G").counted(), Size(1064 * MIB));
        // Another user's cluster does not rely on a trim.
        assert_eq!(spec_of("256M").counted_for_others(), Size(1064 * MIB));
    }

    #[test]
    fn limit_above_the_memory_counts_as_the_memory() {
        let large = spec("memory = \"64M\"\nresident = \"1G\"\nmemory_min = \"64M\"\n");
        assert_eq!(
            (large.resident_max(), large.counted()),
            (Size(64 * MIB), Size(65 * MIB))
        );
    }
}
