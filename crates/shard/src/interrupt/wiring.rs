//! Interface of the devices to KVM: event files bound to interrupts and addresses.

use std::io;

use kvm_bindings::{
    KVM_IRQ_ROUTING_IRQCHIP, KVM_IRQ_ROUTING_MSI, KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER,
    KVM_IRQCHIP_PIC_SLAVE, KvmIrqRouting, kvm_irq_routing_entry,
};
use kvm_ioctls::{IoEventAddress, NoDatamatch, VmFd};
use vmm_sys_util::eventfd::EventFd;

use super::Message;

/// Pins of each of the two 8259 chips.
const PIC_PINS: u32 = 8;

/// Target of an interrupt number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    /// The pin of the same number of the interrupt chips.
    Pin(u32),
    /// Local interrupt controllers, by a message.
    Message {
        /// Interrupt number.
        gsi: u32,
        /// Message of the interrupt.
        message: Message,
    },
}

/// Binding of event files to interrupts and addresses. KVM's VM and mocks implement it.
pub trait Wiring: Send + Sync {
    /// Raises interrupt `gsi` for each write to `fd`.
    fn bind_interrupt(&self, fd: &EventFd, gsi: u32) -> io::Result<()>;
    /// Undoes [`Wiring::bind_interrupt`].
    fn unbind_interrupt(&self, fd: &EventFd, gsi: u32) -> io::Result<()>;
    /// Raises interrupt `gsi`, to which `fd` is bound.
    fn raise(&self, fd: &EventFd, gsi: u32);
    /// Replaces the whole routing table.
    fn set_routes(&self, routes: &[Route]) -> io::Result<()>;
    /// Writes `fd` for each write of the guest to memory address `address`, of any length.
    fn bind_doorbell(&self, fd: &EventFd, address: u64) -> io::Result<()>;
    /// Undoes [`Wiring::bind_doorbell`].
    fn unbind_doorbell(&self, fd: &EventFd, address: u64) -> io::Result<()>;
}

impl Wiring for VmFd {
    fn bind_interrupt(&self, fd: &EventFd, gsi: u32) -> io::Result<()> {
        Ok(self.register_irqfd(fd, gsi)?)
    }

    fn unbind_interrupt(&self, fd: &EventFd, gsi: u32) -> io::Result<()> {
        Ok(self.unregister_irqfd(fd, gsi)?)
    }

    fn raise(&self, fd: &EventFd, _gsi: u32) {
        // The one possible error is a full counter: then KVM has yet to take an earlier signal, which
        // suffices.
        let _ = fd.write(1);
    }

    fn set_routes(&self, routes: &[Route]) -> io::Result<()> {
        let entries: Vec<kvm_irq_routing_entry> = routes.iter().flat_map(|route| entries(*route)).collect();
        let table = KvmIrqRouting::from_entries(&entries)
            .map_err(|_| io::Error::other("more interrupt routes than KVM takes"))?;
        Ok(self.set_gsi_routing(&table)?)
    }

    fn bind_doorbell(&self, fd: &EventFd, address: u64) -> io::Result<()> {
        Ok(self.register_ioevent(fd, &IoEventAddress::Mmio(address), NoDatamatch)?)
    }

    fn unbind_doorbell(&self, fd: &EventFd, address: u64) -> io::Result<()> {
        Ok(self.unregister_ioevent(fd, &IoEventAddress::Mmio(address), NoDatamatch)?)
    }
}

/// Returns KVM's entries for one route. Pins below 16 also lead to a PIC, as in KVM's own first table.
fn entries(route: Route) -> Vec<kvm_irq_routing_entry> {
    match route {
        Route::Pin(pin) => {
            let pic = match pin {
                0..PIC_PINS => Some((KVM_IRQCHIP_PIC_MASTER, pin)),
                pin if pin < 2 * PIC_PINS => Some((KVM_IRQCHIP_PIC_SLAVE, pin - PIC_PINS)),
                _ => None,
            };
            pic.into_iter()
                .chain([(KVM_IRQCHIP_IOAPIC, pin)])
                .map(|(chip, chip_pin)| on_chip(pin, chip, chip_pin))
                .collect()
        }
        Route::Message { gsi, message } => {
            let mut entry = kvm_irq_routing_entry {
                gsi,
                type_: KVM_IRQ_ROUTING_MSI,
                ..Default::default()
            };
            entry.u.msi.address_lo = message.address as u32;
            entry.u.msi.address_hi = (message.address >> 32) as u32;
            entry.u.msi.data = message.data;
            vec![entry]
        }
    }
}

fn on_chip(gsi: u32, irqchip: u32, pin: u32) -> kvm_irq_routing_entry {
    let mut entry = kvm_irq_routing_entry {
        gsi,
        type_: KVM_IRQ_ROUTING_IRQCHIP,
        ..Default::default()
    };
    entry.u.irqchip.irqchip = irqchip;
    entry.u.irqchip.pin = pin;
    entry
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pins_are_routed_to_the_ioapic_and_the_first_sixteen_to_an_8259_too() {
        for (pin, expected) in [
            (0, &[(KVM_IRQCHIP_PIC_MASTER, 0), (KVM_IRQCHIP_IOAPIC, 0)][..]),
            (7, &[(KVM_IRQCHIP_PIC_MASTER, 7), (KVM_IRQCHIP_IOAPIC, 7)]),
            (8, &[(KVM_IRQCHIP_PIC_SLAVE, 0), (KVM_IRQCHIP_IOAPIC, 8)]),
            (15, &[(KVM_IRQCHIP_PIC_SLAVE, 7), (KVM_IRQCHIP_IOAPIC, 15)]),
            (16, &[(KVM_IRQCHIP_IOAPIC, 16)]),
            (23, &[(KVM_IRQCHIP_IOAPIC, 23)]),
        ] {
            let found: Vec<_> = entries(Route::Pin(pin))
                .into_iter()
                .map(|entry| {
                    assert_eq!((entry.gsi, entry.type_), (pin, KVM_IRQ_ROUTING_IRQCHIP));
                    // SAFETY: the entry's type says that it holds a pin of a chip, plain numbers.
                    let chip = unsafe { entry.u.irqchip };
                    (chip.irqchip, chip.pin)
                })
                .collect();
            assert_eq!(found, expected, "{pin}");
        }
    }

    #[test]
    fn a_message_keeps_all_bits_of_its_address() {
        let message = Message {
            address: 0x1234_5678_FEE0_1000,
            data: 0x41,
        };
        let [entry] = entries(Route::Message { gsi: 30, message })[..] else {
            panic!("one entry for a message");
        };
        assert_eq!((entry.gsi, entry.type_), (30, KVM_IRQ_ROUTING_MSI));
        // SAFETY: the entry's type says that it holds a message, plain numbers.
        let sent = unsafe { entry.u.msi };
        assert_eq!(
            (sent.address_hi, sent.address_lo, sent.data),
            (0x1234_5678, 0xFEE0_1000, 0x41)
        );
    }
}
