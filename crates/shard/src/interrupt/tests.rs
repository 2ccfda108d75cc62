use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use vmm_sys_util::eventfd::EventFd;

use super::*;

const REFUSED: Message = Message {
    address: u64::MAX,
    data: 0x41,
};
const GOOD: Message = Message {
    address: 0xFEE0_0000,
    data: 0x42,
};

/// Mock of KVM that refuses tables with [`REFUSED`] in them.
#[derive(Default)]
struct Picky {
    routes: Mutex<Vec<Route>>,
    raised: AtomicUsize,
}

impl Wiring for Picky {
    fn bind_interrupt(&self, _fd: &EventFd, _gsi: u32) -> io::Result<()> {
        Ok(())
    }
    fn unbind_interrupt(&self, _fd: &EventFd, _gsi: u32) -> io::Result<()> {
        Ok(())
    }
    fn raise(&self, _fd: &EventFd, _gsi: u32) {
        self.raised.fetch_add(1, Ordering::Relaxed);
    }
    fn set_routes(&self, routes: &[Route]) -> io::Result<()> {
        let is_refused =
            |route: &Route| matches!(route, Route::Message { message, .. } if *message == REFUSED);
        if routes.iter().any(is_refused) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        *self.routes.lock().unwrap() = routes.to_vec();
        Ok(())
    }
    fn bind_doorbell(&self, _fd: &EventFd, _address: u64) -> io::Result<()> {
        Ok(())
    }
    fn unbind_doorbell(&self, _fd: &EventFd, _address: u64) -> io::Result<()> {
        Ok(())
    }
}

impl Picky {
    fn messages(&self) -> Vec<(u32, Message)> {
        let routes = self.routes.lock().unwrap();
        let messages = routes.iter().filter_map(|route| match route {
            Route::Message { gsi, message } => Some((*gsi, *message)),
            Route::Pin(_) => None,
        });
        messages.collect()
    }
}

#[test]
fn a_refused_message_is_refused_again_and_leaves_other_vectors_their_routes() {
    let kvm = Arc::new(Picky::default());
    let interrupts = Interrupts::new(kvm.clone());
    let [first, second] = [(); 2].map(|()| interrupts.vector().unwrap());
    first.signal();
    for _ in 0..2 {
        assert!(first.unmask(REFUSED).is_err());
        assert!(first.pending(), "the vector stays masked");
    }
    second.unmask(GOOD).unwrap();
    assert_eq!(kvm.messages(), [(MSI_GSI_START + 1, GOOD)]);
    assert_eq!(kvm.raised.load(Ordering::Relaxed), 0);
    first.unmask(GOOD).unwrap();
    assert_eq!(kvm.messages(), [(MSI_GSI_START, GOOD), (MSI_GSI_START + 1, GOOD)]);
    assert_eq!(
        kvm.raised.load(Ordering::Relaxed),
        1,
        "the pending interrupt is delivered"
    );
    // The former message stays if its successor is refused.
    first.mask();
    assert!(first.unmask(REFUSED).is_err());
    second.unmask(Message { data: 0x43, ..GOOD }).unwrap();
    assert_eq!(kvm.messages()[0], (MSI_GSI_START, GOOD));
}

#[test]
fn a_cleared_vector_delivers_nothing_when_it_is_unmasked() {
    let kvm = Arc::new(Picky::default());
    let vector = Interrupts::new(kvm.clone()).vector().unwrap();
    assert!(!vector.pending());
    vector.signal();
    vector.clear();
    assert!(!vector.pending());
    vector.unmask(GOOD).unwrap();
    assert_eq!(kvm.raised.load(Ordering::Relaxed), 0);
    vector.signal();
    assert_eq!(kvm.raised.load(Ordering::Relaxed), 1, "the vector is unmasked");
    assert!(!vector.pending());
}

#[test]
fn message_numbers_follow_the_pins_and_are_limited() {
    let kvm = Arc::new(Picky::default());
    let interrupts = Interrupts::new(kvm.clone());
    *interrupts.lock() = vec![None; (MSI_GSI_END - MSI_GSI_START) as usize - 1];
    let last = interrupts.vector().unwrap();
    last.unmask(GOOD).unwrap();
    assert_eq!(kvm.messages(), [(MSI_GSI_END - 1, GOOD)]);
    assert!(interrupts.vector().is_err());
    let routes = kvm.routes.lock().unwrap();
    let pins = (0..IOAPIC_PINS).map(Route::Pin);
    assert!(routes.iter().copied().take(IOAPIC_PINS as usize).eq(pins));
}
