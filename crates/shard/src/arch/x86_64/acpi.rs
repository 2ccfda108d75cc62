//! The ACPI tables. They are hardware-reduced (ACPI 6.5, 4.1): no chipset is emulated, only the devices of
//! the DSDT.
//!
//! Devices: the PCI host bridge with its windows, COM1, the generic event device, the generation id and
//! pvpanic. The generic event device reports the power button and changes of the generation id. Tables: FADT,
//! MADT, MCFG; SRAT and SLIT for a VM with nodes; HMAT where the nodes' memory was measured.

use acpi_tables::aml::{
    AddressSpace, AddressSpaceCacheable, Arg, Device, EISAName, Equal, IO, If, Interrupt, Memory32Fixed,
    Method, Name, Notify, Package, Path, ResourceTemplate, Scope,
};
use acpi_tables::fadt::{FADTBuilder, Flags};
use acpi_tables::gas::{AccessSize, AddressSpace as GasSpace, GAS};
use acpi_tables::madt::{EnabledStatus, IoApic, LocalInterruptController, MADT, ProcessorLocalApic};
use acpi_tables::mcfg::MCFG;
use acpi_tables::rsdp::Rsdp;
use acpi_tables::sdt::Sdt;
use acpi_tables::xsdt::XSDT;
use acpi_tables::{Aml, AmlSink};
use std::ops::Range;

use super::layout::*;
use crate::power::SLEEP_TYPE_OFF;

mod hmat;

const OEM_ID: [u8; 6] = *b"MIRROR";
const OEM_TABLE_ID: [u8; 8] = *b"MIRRBALL";
const OEM_REVISION: u32 = 1;
/// FADT boot flags: no VGA, no CMOS clock; without bit 1 there is no keyboard controller.
const BOOT_ARCH: u16 = (1 << 2) | (1 << 5);
const TABLE_ALIGN: usize = 16;

/// A guest NUMA node as SRAT, SLIT and HMAT describe it.
#[derive(Clone, Debug, Default)]
pub struct NodeTable {
    /// APIC ids of the node's vCPUs.
    pub vcpus: Vec<u8>,
    /// Guest-physical addresses of the node's memory.
    pub ranges: Vec<Range<u64>>,
    /// Distances to every node.
    pub distances: Vec<u8>,
    /// Latency of accesses from the node's CPUs to each node's memory, picoseconds; empty if not measured.
    pub latencies_ps: Vec<u64>,
    /// Read bandwidth of the node's CPUs to each node's memory, millions of bytes per second; empty if not
    /// measured.
    pub bandwidths_mb_s: Vec<u64>,
}

/// Error: the tables are larger than the area reserved for them.
#[derive(Debug, thiserror::Error)]
#[error("the ACPI tables need {0} bytes, more than there is room for: too many NUMA nodes")]
pub struct TooLarge(usize);

/// Returns all tables as they lie from [`ACPI_START`], the RSDP first.
pub fn tables(layout: &Layout, vcpus: u8, nodes: &[NodeTable]) -> Result<Vec<u8>, TooLarge> {
    let mut image = Image(vec![0; Rsdp::len()]);
    let dsdt = image.add(&dsdt(layout));
    let mut entries = vec![
        image.add(&fadt(dsdt)),
        image.add(&madt(vcpus)),
        image.add(&mcfg()),
    ];
    if !nodes.is_empty() {
        entries.push(image.add(&srat(nodes)));
        entries.push(image.add(&slit(nodes)));
        entries.extend(hmat::hmat(nodes).map(|hmat| image.add(&hmat)));
    }
    let mut xsdt = XSDT::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION);
    for entry in entries {
        xsdt.add_entry(entry);
    }
    let xsdt = image.add(&xsdt);
    let mut rsdp = Vec::new();
    Rsdp::new(OEM_ID, xsdt).to_aml_bytes(&mut rsdp);
    image.0[..rsdp.len()].copy_from_slice(&rsdp);
    if image.0.len() as u64 > ACPI_BYTES {
        return Err(TooLarge(image.0.len()));
    }
    Ok(image.0)
}

struct Image(Vec<u8>);

impl Image {
    /// Appends a table and returns its address.
    fn add(&mut self, table: &dyn Aml) -> u64 {
        self.0.resize(self.0.len().next_multiple_of(TABLE_ALIGN), 0);
        let address = ACPI_START + self.0.len() as u64;
        table.to_aml_bytes(&mut self.0);
        address
    }
}

fn fadt(dsdt: u64) -> impl Aml {
    let port = |port: u16| GAS::new(GasSpace::SystemIo, 8, 0, AccessSize::ByteAccess, u64::from(port));
    let mut fadt = FADTBuilder::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION)
        .dsdt_64(dsdt)
        .flag(Flags::HwReducedAcpi)
        .flag(Flags::ResetRegSup)
        .flag(Flags::Wbinvd)
        // The buttons are devices of the DSDT, not fixed registers.
        .flag(Flags::PwrButton)
        .flag(Flags::SlpButton);
    fadt.iapc_boot_arch = BOOT_ARCH.into();
    fadt.reset_reg = port(RESET_PORT);
    fadt.reset_value = RESET_VALUE;
    fadt.sleep_control_reg = port(SLEEP_CONTROL_PORT);
    fadt.sleep_status_reg = port(SLEEP_STATUS_PORT);
    fadt.finalize()
}

fn madt(vcpus: u8) -> MADT {
    let lapic = LocalInterruptController::Address(LAPIC_START as u32);
    let mut madt = MADT::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION, lapic);
    madt.add_structure(IoApic::new(0, IOAPIC_START as u32, 0));
    for id in 0..vcpus {
        madt.add_structure(ProcessorLocalApic::new(id, id, EnabledStatus::Enabled));
    }
    madt
}

fn mcfg() -> MCFG {
    let mut mcfg = MCFG::new(OEM_ID, OEM_TABLE_ID, OEM_REVISION);
    mcfg.add_ecam(ECAM_START, 0, 0, 0);
    mcfg
}

fn table(signature: &[u8; 4], revision: u8) -> Sdt {
    const HEADER_BYTES: u32 = 36;
    Sdt::new(
        *signature,
        HEADER_BYTES,
        revision,
        OEM_ID,
        OEM_TABLE_ID,
        OEM_REVISION,
    )
}

/// System resource affinity table (ACPI 6.5, 5.2.16). Written by hand: the crate has no structure for x86
/// processors.
fn srat(nodes: &[NodeTable]) -> Sdt {
    const ENABLED: u32 = 1;
    let mut body = Vec::new();
    body.dword(1);
    body.qword(0);
    for (node, table) in nodes.iter().enumerate() {
        let node = node as u32;
        for &id in &table.vcpus {
            // Processor local x2APIC affinity: type 2, 24 bytes.
            body.vec(&[2, 24, 0, 0]);
            for word in [node, u32::from(id), ENABLED, 0, 0] {
                body.dword(word);
            }
        }
        for range in &table.ranges {
            // Memory affinity: type 1, 40 bytes.
            body.vec(&[1, 40]);
            body.dword(node);
            body.word(0);
            body.qword(range.start);
            body.qword(range.end - range.start);
            body.dword(0);
            body.dword(ENABLED);
            body.qword(0);
        }
    }
    let mut srat = table(b"SRAT", 3);
    srat.append_slice(&body);
    srat
}

/// System locality information table (ACPI 6.5, 5.2.17). A missing distance counts as remote.
fn slit(nodes: &[NodeTable]) -> Sdt {
    const LOCAL: u8 = 10;
    const REMOTE: u8 = 20;
    let mut body = Vec::new();
    body.qword(nodes.len() as u64);
    for (from, table) in nodes.iter().enumerate() {
        for to in 0..nodes.len() {
            let other = if from == to { LOCAL } else { REMOTE };
            body.byte(table.distances.get(to).copied().unwrap_or(other));
        }
    }
    let mut slit = table(b"SLIT", 1);
    slit.append_slice(&body);
    slit
}

fn dsdt(layout: &Layout) -> Sdt {
    let mut aml = Vec::new();
    let off = Package::new(vec![&SLEEP_TYPE_OFF, &0u8, &0u8, &0u8]);
    Name::new("_S5_".into(), &off).to_aml_bytes(&mut aml);
    pci_host(layout, &mut aml);
    platform(&mut aml);
    let mut dsdt = table(b"DSDT", 2);
    dsdt.append_slice(&aml);
    dsdt
}

fn pci_host(layout: &Layout, aml: &mut Vec<u8>) {
    let memory = AddressSpaceCacheable::NotCacheable;
    let bus = AddressSpace::new_bus_number(0u16, 0u16);
    let config = IO::new(PCI_CONFIG_PORT, PCI_CONFIG_PORT, 1, PCI_CONFIG_PORTS as u8);
    let ports = AddressSpace::new_io(PCI_IO_PORTS.start, PCI_IO_PORTS.end - 1, None);
    let (low, low_last) = (MMIO32_START as u32, (MMIO32_START + MMIO32_BYTES - 1) as u32);
    let low = AddressSpace::new_memory(memory, true, low, low_last, None);
    let high = AddressSpace::new_memory(memory, true, layout.mmio64.start, layout.mmio64.end - 1, None);
    let resources = ResourceTemplate::new(vec![&bus, &config, &ports, &low, &high]);
    let ecam = Memory32Fixed::new(true, ECAM_START as u32, ECAM_BYTES as u32);
    let ecam = ResourceTemplate::new(vec![&ecam]);
    Scope::new(
        "\\_SB_".into(),
        vec![
            &Device::new(
                "PCI0".into(),
                vec![
                    &Name::new("_HID".into(), &EISAName::new("PNP0A08")),
                    &Name::new("_CID".into(), &EISAName::new("PNP0A03")),
                    &Name::new("_SEG".into(), &0u8),
                    &Name::new("_BBN".into(), &0u8),
                    &Name::new("_UID".into(), &0u8),
                    &Name::new("_CCA".into(), &1u8),
                    &Name::new("_CRS".into(), &resources),
                ],
            ),
            // Linux uses an ECAM only when a motherboard device reserves it.
            &Device::new(
                "MBRD".into(),
                vec![
                    &Name::new("_HID".into(), &EISAName::new("PNP0C02")),
                    &Name::new("_UID".into(), &0u8),
                    &Name::new("_CRS".into(), &ecam),
                ],
            ),
        ],
    )
    .to_aml_bytes(aml);
}

fn platform(aml: &mut Vec<u8>) {
    const NOTIFY_BUTTON_PRESSED: u8 = 0x80;
    const NOTIFY_ID_CHANGED: u8 = 0x80;
    let com1 = IO::new(COM1_PORT, COM1_PORT, 1, 8);
    let com1_interrupt = Interrupt::new(true, true, false, false, SERIAL_GSI);
    let com1_resources = ResourceTemplate::new(vec![&com1, &com1_interrupt]);
    let event = Interrupt::new(true, true, false, false, EVENT_GSI);
    let generation = Interrupt::new(true, true, false, false, GENERATION_GSI);
    let event_resources = ResourceTemplate::new(vec![&event, &generation]);
    let panic = IO::new(PVPANIC_PORT, PVPANIC_PORT, 1, 1);
    let panic_resources = ResourceTemplate::new(vec![&panic]);
    let (button, id) = (Path::new("PWRB"), Path::new("VGEN"));
    let pressed = Notify::new(&button, &NOTIFY_BUTTON_PRESSED);
    let changed = Notify::new(&id, &NOTIFY_ID_CHANGED);
    let (event_number, generation_number, which) = (EVENT_GSI as u8, GENERATION_GSI as u8, Arg(0));
    let is_button = Equal::new(&which, &event_number);
    let is_generation = Equal::new(&which, &generation_number);
    let press = If::new(&is_button, vec![&pressed]);
    let change = If::new(&is_generation, vec![&changed]);
    // Low and high half of the id's address.
    let (low, high) = (GENERATION_ID as u32, (GENERATION_ID >> 32) as u32);
    let id_address = Package::new(vec![&low, &high]);
    Scope::new(
        "\\_SB_".into(),
        vec![
            &Device::new(
                "COM1".into(),
                vec![
                    &Name::new("_HID".into(), &EISAName::new("PNP0501")),
                    &Name::new("_UID".into(), &0u8),
                    &Name::new("_CRS".into(), &com1_resources),
                ],
            ),
            &Device::new(
                "PWRB".into(),
                vec![&Name::new("_HID".into(), &EISAName::new("PNP0C0C"))],
            ),
            &Device::new(
                "GED0".into(),
                vec![
                    &Name::new("_HID".into(), &"ACPI0013"),
                    &Name::new("_UID".into(), &0u8),
                    &Name::new("_CRS".into(), &event_resources),
                    &Method::new("_EVT".into(), 1, true, vec![&press, &change]),
                ],
            ),
            // Microsoft's "Virtual Machine Generation ID", as QEMU names it.
            &Device::new(
                "VGEN".into(),
                vec![
                    &Name::new("_HID".into(), &"QEMUVGID"),
                    &Name::new("_CID".into(), &"VM_Gen_Counter"),
                    &Name::new("_DDN".into(), &"VM_Gen_Counter"),
                    &Name::new("_STA".into(), &0xFu8),
                    &Name::new("ADDR".into(), &id_address),
                ],
            ),
            &Device::new(
                "PEVT".into(),
                vec![
                    &Name::new("_HID".into(), &"QEMU0001"),
                    &Name::new("_STA".into(), &0xFu8),
                    &Name::new("_CRS".into(), &panic_resources),
                ],
            ),
        ],
    )
    .to_aml_bytes(aml);
}
