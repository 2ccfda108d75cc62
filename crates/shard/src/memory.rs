//! The guest's memory.

/// The guest's memory as every device sees it. Cheap to clone; the mapping lives as long as the last clone.
pub type GuestRam = std::sync::Arc<vm_memory::GuestMemoryMmap<()>>;
