//! Routes of device interrupts where the interrupt controllers are this crate's.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex};

use apic::Shorthand;
use kvm_ioctls::VmFd;
use locks::lock;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::os::fd::{AsRawFd, BorrowedFd};
use vmm_sys_util::eventfd::EventFd;

use super::ioapic::IoApicDevice;
use super::router::Router;
use crate::arch::x86_64::layout::IOAPIC_PINS;
use crate::interrupt::{Message, Route, Wiring};

/// Wiring of the home: messages go to the router and pins to the IOAPIC. KVM serves doorbells, as in plain
/// VMs.
pub struct SpanWiring {
    vm: Arc<VmFd>,
    router: Arc<Router>,
    routes: Mutex<BTreeMap<u32, Message>>,
    pins: Mutex<Vec<(EventFd, u8)>>,
}

impl SpanWiring {
    /// Creates the wiring of the home's VM.
    pub fn new(vm: Arc<VmFd>, router: Arc<Router>) -> Self {
        Self {
            vm,
            router,
            routes: Mutex::default(),
            pins: Mutex::default(),
        }
    }

    /// Takes the event files that are bound to pins, for [`watch_pins`].
    pub fn take_pins(&self) -> Vec<(EventFd, u8)> {
        std::mem::take(&mut *lock(&self.pins))
    }
}

impl Wiring for SpanWiring {
    fn bind_interrupt(&self, fd: &EventFd, gsi: u32) -> io::Result<()> {
        if gsi < IOAPIC_PINS
            && let Ok(pin) = u8::try_from(gsi)
        {
            lock(&self.pins).push((fd.try_clone()?, pin));
        }
        Ok(())
    }

    fn unbind_interrupt(&self, _fd: &EventFd, _gsi: u32) -> io::Result<()> {
        Ok(())
    }

    fn raise(&self, _fd: &EventFd, gsi: u32) {
        let message = lock(&self.routes).get(&gsi).copied();
        let interrupt = message.and_then(|message| apic::message(message.address, message.data));
        if let Some(interrupt) = interrupt {
            self.router.interrupt(&interrupt, Shorthand::None, None);
        }
    }

    fn set_routes(&self, routes: &[Route]) -> io::Result<()> {
        *lock(&self.routes) = routes
            .iter()
            .filter_map(|route| match route {
                Route::Message { gsi, message } => Some((*gsi, *message)),
                Route::Pin(_) => None,
            })
            .collect();
        Ok(())
    }

    fn bind_doorbell(&self, fd: &EventFd, address: u64) -> io::Result<()> {
        self.vm.bind_doorbell(fd, address)
    }

    fn unbind_doorbell(&self, fd: &EventFd, address: u64) -> io::Result<()> {
        self.vm.unbind_doorbell(fd, address)
    }
}

/// Pulses a pin whenever its event file is written. Runs until the process ends.
pub fn watch_pins(pins: &[(EventFd, u8)], ioapic: &IoApicDevice) {
    // SAFETY: each descriptor is open as long as its event file, which the caller keeps.
    let borrow = |event: &EventFd| unsafe { BorrowedFd::borrow_raw(event.as_raw_fd()) };
    loop {
        let mut files: Vec<PollFd<'_>> = pins
            .iter()
            .map(|(event, _)| PollFd::new(borrow(event), PollFlags::POLLIN))
            .collect();
        match poll(&mut files, PollTimeout::NONE) {
            Ok(_) | Err(nix::Error::EINTR) => {}
            // For open files it fails for no other reason.
            Err(_) => return,
        }
        for ((event, pin), file) in pins.iter().zip(&files) {
            if file.any().unwrap_or(false) && event.read().is_ok() {
                ioapic.pulse(*pin);
            }
        }
    }
}
