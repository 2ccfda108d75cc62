//! PCI: one root bus with up to 31 functions, configured by ports 0xCF8 and 0xCFC or by ECAM.
//!
//! The bus finds a function by the current address of its BAR. A guest that moves a BAR therefore affects
//! nothing else: the machine claims the windows once. Each function has a lock of its own, so that a function
//! that waits for its device's thread, as during a reset, blocks no vCPU that uses another. BARs have
//! addresses from the start (there is no firmware); memory decoding starts disabled.
//!
//! ```text
//! let interrupts = Interrupts::new(vm.clone());                 // Arc<VmFd>, after KVM_CREATE_IRQCHIP
//! let pci = PciBus::new(layout.mmio64.clone());
//! pci.add(|bar| VirtioPci::new(Box::new(rng), "rng", ram.clone(), &interrupts, log.clone(), bar))?;
//! ports.claim(0xCF8..0xD00, Arc::new(pci.config_ports()))?;
//! memory.claim(ECAM_START..ECAM_START + ECAM_BYTES, Arc::new(pci.ecam()))?;
//! memory.claim(layout.mmio64.clone(), Arc::new(pci.window()))?;
//! memory.claim(MMIO32_START..MMIO32_START + MMIO32_BYTES, Arc::new(pci.window_at(MMIO32_START)))?;
//! pci.status();      // one JSON object for each function
//! pci.stop();        // takes the queues back from every device: after the vCPUs have stopped
//! ```

mod access;
pub mod config;
mod host_bridge;
pub mod msix;

use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, RwLock, RwLockReadGuard};

use locks::IgnorePoison;
use serde_json::Value;

pub use access::{ConfigPorts, Ecam, Window};
use host_bridge::HostBridge;

/// Device numbers on the bus; number 0 is the host bridge.
pub const SLOTS: usize = 32;
/// Size of each function's BAR.
pub const BAR_BYTES: u64 = 32 << 10;

/// One function. Calls are serialized.
pub trait PciFunction: Send {
    /// Reads configuration registers at any offset below 4 KiB, with any length.
    fn read_config(&mut self, offset: usize, data: &mut [u8]);
    /// Writes configuration registers.
    fn write_config(&mut self, offset: usize, data: &[u8]);
    /// Returns the first of the [`BAR_BYTES`] addresses that the function serves now. Only `write_config`
    /// changes it.
    fn decoded(&self) -> Option<u64>;
    /// Reads the BAR at `offset`.
    fn read_bar(&mut self, offset: u64, data: &mut [u8]);
    /// Writes the BAR at `offset`.
    fn write_bar(&mut self, offset: u64, data: &[u8]);
    /// Returns counters for the VM's status.
    fn status(&self) -> Value;
    /// Returns the function's state while the VM is paused.
    fn save(&self) -> io::Result<Value>;
    /// Restores the state of such a function of another VM, before anything runs.
    fn restore(&mut self, state: &Value) -> io::Result<()>;
    /// Ends the function's work; the VM is ending.
    fn stop(&mut self);
}

/// A function's device number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot(pub u8);

/// The root bus. Cheap to clone; all clones are the same bus.
#[derive(Clone)]
pub struct PciBus {
    functions: Arc<RwLock<Functions>>,
}

struct Functions {
    slots: Vec<FunctionEntry>,
    window: Range<u64>,
    next_bar: u64,
}

/// A function with its lock, and its BAR's address, readable without the lock.
struct FunctionEntry {
    function: Mutex<Box<dyn PciFunction>>,
    decoded: AtomicU64,
}

/// Address of a function that serves none.
const NOWHERE: u64 = u64::MAX;

impl FunctionEntry {
    fn new(function: impl PciFunction + 'static) -> Self {
        let decoded = AtomicU64::new(function.decoded().unwrap_or(NOWHERE));
        Self {
            function: Mutex::new(Box::new(function)),
            decoded,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Box<dyn PciFunction>> {
        // A device that panics ends the process (agent::panic); tests may continue.
        self.function.lock().ignore_poison()
    }

    fn write_config(&self, offset: usize, data: &[u8]) {
        let mut function = self.lock();
        function.write_config(offset, data);
        self.decoded
            .store(function.decoded().unwrap_or(NOWHERE), Ordering::Release);
    }

    fn restore(&self, state: &Value) -> io::Result<()> {
        let mut function = self.lock();
        function.restore(state)?;
        self.decoded
            .store(function.decoded().unwrap_or(NOWHERE), Ordering::Release);
        Ok(())
    }

    /// Returns the offset of `address` in the BAR, if it is inside.
    fn offset(start: u64, address: u64) -> Option<u64> {
        address.checked_sub(start).filter(|offset| *offset < BAR_BYTES)
    }
}

impl PciBus {
    /// Creates a bus with a host bridge that places BARs in `window`.
    pub fn new(window: Range<u64>) -> Self {
        let next_bar = window.start.next_multiple_of(BAR_BYTES);
        Self {
            functions: Arc::new(RwLock::new(Functions {
                slots: vec![FunctionEntry::new(HostBridge::new())],
                window,
                next_bar,
            })),
        }
    }

    /// Adds the function that `make` creates for a BAR address.
    ///
    /// # Errors
    /// Fails if the bus or the window is full, or with the error of `make`.
    pub fn add<F: PciFunction + 'static>(&self, make: impl FnOnce(u64) -> io::Result<F>) -> io::Result<Slot> {
        let mut functions = self.functions.write().ignore_poison();
        let number = functions.slots.len();
        let bar_end = functions
            .next_bar
            .checked_add(BAR_BYTES)
            .filter(|end| *end <= functions.window.end);
        let (Some(bar_end), true) = (bar_end, number < SLOTS) else {
            return Err(io::Error::other("a VM has at most 31 PCI devices"));
        };
        let function = make(functions.next_bar)?;
        functions.slots.push(FunctionEntry::new(function));
        functions.next_bar = bar_end;
        Ok(Slot(number as u8))
    }

    /// Returns the device of ports 0xCF8 to 0xCFF.
    pub fn config_ports(&self) -> ConfigPorts {
        ConfigPorts::new(self.clone())
    }

    /// Returns the device of the memory-mapped configuration space.
    pub fn ecam(&self) -> Ecam {
        Ecam::new(self.clone())
    }

    /// Returns the device of the window given to [`PciBus::new`].
    pub fn window(&self) -> Window {
        let base = self.read().window.start;
        self.window_at(base)
    }

    /// Returns the device of another window, which starts at `base`.
    pub fn window_at(&self, base: u64) -> Window {
        Window::new(self.clone(), base)
    }

    /// Returns each function's counters in the order of their slots, without the host bridge.
    pub fn status(&self) -> Value {
        let functions = self.read();
        Value::Array(
            functions.slots[1..]
                .iter()
                .map(|seat| seat.lock().status())
                .collect(),
        )
    }

    /// Returns the state of every function in the order of their slots. The VM is paused.
    pub fn save(&self) -> io::Result<Vec<Value>> {
        self.read().slots.iter().map(|seat| seat.lock().save()).collect()
    }

    /// Restores the state of every function from that of the same function in another VM.
    ///
    /// # Errors
    /// Fails if the saved functions differ from these in number or kind.
    pub fn restore(&self, states: &[Value]) -> io::Result<()> {
        let functions = self.read();
        if functions.slots.len() != states.len() {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "the saved VM had other devices than this one",
            ));
        }
        functions
            .slots
            .iter()
            .zip(states)
            .try_for_each(|(seat, state)| seat.restore(state))
    }

    /// Stops every device's queues. After the return no device accesses guest memory.
    pub fn stop(&self) {
        self.read().slots.iter().for_each(|seat| seat.lock().stop());
    }

    fn read_config(&self, slot: usize, offset: usize, data: &mut [u8]) {
        match self.read().slots.get(slot) {
            Some(seat) => seat.lock().read_config(offset, data),
            None => data.fill(0xFF),
        }
    }

    fn write_config(&self, slot: usize, offset: usize, data: &[u8]) {
        if let Some(seat) = self.read().slots.get(slot) {
            seat.write_config(offset, data);
        }
    }

    fn read_memory(&self, address: u64, data: &mut [u8]) {
        if !self.at(address, |function, offset| function.read_bar(offset, data)) {
            data.fill(0xFF);
        }
    }

    fn write_memory(&self, address: u64, data: &[u8]) {
        self.at(address, |function, offset| function.write_bar(offset, data));
    }

    /// Calls `access` with the first function that serves `address`; returns false if none does.
    fn at(&self, address: u64, access: impl FnOnce(&mut dyn PciFunction, u64)) -> bool {
        let functions = self.read();
        let found = functions.slots.iter().find_map(|seat| {
            let start = seat.decoded.load(Ordering::Acquire);
            Some((seat, FunctionEntry::offset(start, address)?))
        });
        // Another vCPU may move the BAR meanwhile. The access then uses the old address, as on a real bus.
        found
            .map(|(seat, offset)| access(&mut **seat.lock(), offset))
            .is_some()
    }

    /// Locks the table for readers. It is written only while the machine is being built, so that no vCPU
    /// waits here.
    fn read(&self) -> RwLockReadGuard<'_, Functions> {
        self.functions.read().ignore_poison()
    }
}

#[cfg(test)]
mod tests;
