//! The interrupt controllers of a VM with four vCPUs: any registers, lines, messages and times; every sent
//! interrupt is delivered.

use apic::{Delivery, Interrupt, IoApic, LocalApic, Shorthand, Targets, Written, message, targets};
use libfuzzer_sys::arbitrary::{Result, Unstructured};

const VCPUS: u32 = 4;
const STEPS_MAX: usize = 500;

struct Machine {
    vcpus: Vec<LocalApic>,
    io: IoApic,
    /// Value of the guest's TSC.
    now: u64,
}

pub fn fuzz(data: &[u8]) {
    let mut u = Unstructured::new(data);
    let mut machine = Machine {
        vcpus: (0..VCPUS).map(|id| LocalApic::new(id, 1 + id * 7)).collect(),
        io: IoApic::new(),
        now: 0,
    };
    // Enabled, except for one; the one error of a step is that the bytes have ended.
    for apic in &mut machine.vcpus[1..] {
        apic.write(0x80F, 0x1FF, 0).expect("a legal write");
    }
    for _ in 0..STEPS_MAX {
        if u.is_empty() || machine.step(&mut u).is_err() {
            break;
        }
        assert!(machine.io.is_sane());
        assert!(machine.vcpus.iter().all(LocalApic::is_sane));
    }
    machine.serve_all();
}

impl Machine {
    fn step(&mut self, u: &mut Unstructured) -> Result<()> {
        let number = usize::from(u.arbitrary::<u8>()?) % self.vcpus.len();
        match u.arbitrary::<u8>()? % 12 {
            0..=3 => {
                let (msr, value) = (register(u)?, value(u)?);
                self.access(number, msr, value);
            }
            4 => {
                self.take(number);
            }
            5 => self.access(number, 0x80B, 0),
            6 => {
                self.now = self.now.saturating_add(value(u)?);
                self.expire(number);
            }
            7 => {
                let sent = self.io.set_line(u.arbitrary::<u8>()? % 25, u.arbitrary()?);
                self.deliver_all(sent);
            }
            8 => {
                // An entry as a driver programs it: random trigger mode, mask and destination.
                let pin = u.arbitrary::<u8>()? % 24;
                let low = u32::from(u.arbitrary::<u8>()?) | (u.arbitrary::<u32>()? & 0x1_8800);
                self.program(0x11 + 2 * pin, u.arbitrary()?);
                self.program(0x10 + 2 * pin, low);
            }
            9 => {
                let offsets = [0x00, 0x10, 0x40, u64::from(u.arbitrary::<u16>()?)];
                let offset = offsets[usize::from(u.arbitrary::<u8>()?) % offsets.len()];
                self.write(offset, value(u)? as u32);
            }
            10 => {
                let address = 0xFEE0_0000 ^ u64::from(u.arbitrary::<u32>()? & 0x001F_FFFF);
                self.deliver_all(message(address, value(u)? as u32));
            }
            _ => self.travel(number),
        }
        Ok(())
    }

    /// Writes a register of the IOAPIC that is behind its index.
    fn program(&mut self, register: u8, value: u32) {
        self.write(0x00, register.into());
        self.write(0x10, value);
    }

    fn write(&mut self, offset: u64, value: u32) {
        let sent = self.io.write(offset, value);
        assert!(sent.iter().all(|interrupt| interrupt.level));
        self.deliver_all(sent);
        self.io.read(offset);
    }

    /// Reads and writes a register; a fault changes nothing.
    fn access(&mut self, number: usize, msr: u32, value: u64) {
        let apic = &mut self.vcpus[number];
        let before = apic.clone();
        let _ = apic.read(msr, self.now);
        assert_eq!(*apic, before);
        match apic.write(msr, value, self.now) {
            Err(_) => assert_eq!(*apic, before),
            Ok(Written::Nothing) => {}
            Ok(Written::Send(ipi)) => self.deliver(ipi.interrupt, ipi.shorthand, Some(number as u32)),
            Ok(Written::EndOfInterrupt { vector }) => {
                let sent = self.io.end_of_interrupt(vector);
                self.deliver_all(sent);
            }
            Ok(Written::Enabled(is_enabled)) => {
                assert!(apic.is_enabled() == is_enabled && before.is_enabled() != is_enabled);
            }
        }
    }

    fn deliver_all(&mut self, sent: impl IntoIterator<Item = Interrupt>) {
        for interrupt in sent {
            self.deliver(interrupt, Shorthand::None, None);
        }
    }

    /// Checks the delivery of an interrupt: a fixed one is requested on all targets that are enabled, a
    /// lowest-priority one on one of them at most.
    fn deliver(&mut self, interrupt: Interrupt, shorthand: Shorthand, from: Option<u32>) {
        let enabled: Targets = (0..VCPUS)
            .filter(|&vcpu| self.vcpus[vcpu as usize].is_enabled())
            .collect();
        let found = targets(&interrupt, shorthand, from, VCPUS, &enabled);
        let is_lowest = interrupt.delivery == Delivery::LowestPriority;
        assert!(!is_lowest || found.iter().count() <= 1);
        for vcpu in found.iter() {
            assert!(vcpu < VCPUS && (!is_lowest || enabled.contains(vcpu)));
            let apic = &mut self.vcpus[vcpu as usize];
            match interrupt.delivery {
                Delivery::Fixed | Delivery::LowestPriority => {
                    apic.accept(interrupt.vector, interrupt.level);
                    let (vector, vectors) = (u32::from(interrupt.vector), 32);
                    let is_wanted = apic.is_enabled() && vector >= 16;
                    let word = apic.read(0x820 + vector / vectors, self.now).unwrap_or(0);
                    assert!(!is_wanted || word >> (vector % vectors) & 1 == 1);
                }
                Delivery::Init => apic.init(),
                _ => {}
            }
        }
    }

    /// Serves an interrupt, and checks that it is above the priority, and in service then.
    fn take(&mut self, number: usize) {
        let apic = &mut self.vcpus[number];
        let priority = apic.read(0x80A, self.now).unwrap_or(0) as u8;
        let expected = apic.next();
        let taken = apic.take();
        assert_eq!(taken, expected);
        if let Some(vector) = taken {
            assert!(vector >= 16 && vector >> 4 > priority >> 4);
            assert_eq!(
                apic.read(0x80A, self.now).expect("a register"),
                u64::from(vector & 0xF0)
            );
        }
    }

    /// Checks that the timer is never early, rings at most once, and is not due afterwards.
    fn expire(&mut self, number: usize) {
        let apic = &mut self.vcpus[number];
        let is_due = apic.timer_due().is_some_and(|due| due <= self.now);
        let before = apic.clone();
        apic.expire(self.now);
        assert!(is_due || apic.read(0x832, 0).is_ok_and(|lvt| lvt & 0x1_0000 != 0) || *apic == before);
        assert!(waiting(apic) <= waiting(&before) + 1);
        assert!(apic.timer_due().is_none_or(|due| due > self.now));
        let after = apic.clone();
        apic.expire(self.now);
        assert_eq!(*apic, after);
    }

    /// Moves a vCPU, or the home, to another process.
    fn travel(&mut self, number: usize) {
        let text = serde_json::to_string(&(&self.vcpus[number], &self.io)).expect("plain data");
        let (apic, io): (LocalApic, IoApic) = serde_json::from_str(&text).expect("what was written");
        assert!(apic == self.vcpus[number] && io == self.io);
        (self.vcpus[number], self.io) = (apic, io);
    }

    /// Checks that all waiting interrupts are served when nothing blocks them, and that this ends.
    fn serve_all(&mut self) {
        for number in 0..self.vcpus.len() {
            self.vcpus[number].set_task_priority(0);
            // Each vector is requested and in service once at most.
            for _ in 0..2 * 256 {
                self.take(number);
                if self.vcpus[number].next().is_none() {
                    self.vcpus[number].end_of_interrupt();
                }
            }
            assert_eq!(waiting(&self.vcpus[number]), 0);
            let priority = self.vcpus[number].read(0x80A, self.now).unwrap_or(0);
            assert_eq!(priority, 0);
        }
    }
}

/// Number of requested vectors.
fn waiting(apic: &LocalApic) -> u32 {
    let words = (0x820..0x828).map(|msr| apic.read(msr, 0).unwrap_or(0));
    words.map(u64::count_ones).sum()
}

/// A random register, mostly one that exists.
fn register(u: &mut Unstructured) -> Result<u32> {
    const OFTEN: [u32; 10] = [
        0x808, 0x80F, 0x828, 0x830, 0x832, 0x837, 0x838, 0x83E, 0x83F, 0x6E0,
    ];
    let choice = u.arbitrary::<u8>()?;
    Ok(match choice {
        0 => 0x1B,
        1 => u.arbitrary()?,
        2..=0x3F => 0x800 + u32::from(choice),
        _ => OFTEN[usize::from(choice) % OFTEN.len()],
    })
}

/// A random value: small ones, those with a bit above a vector, a command's destination, and wild ones.
fn value(u: &mut Unstructured) -> Result<u64> {
    let vector = u64::from(u.arbitrary::<u8>()?);
    Ok(match u.arbitrary::<u8>()? % 8 {
        0 => 0,
        1..=2 => vector,
        3 => vector | 0x100,
        4 => vector | u64::from(u.arbitrary::<u16>()? & 0x70F) << 8,
        5 => vector | u64::from(u.arbitrary::<u8>()? & 7) << 32 | u64::from(u.arbitrary::<u16>()?) << 8,
        6 => [
            0xFEE0_0000,
            0xFEE0_0C00,
            0xFEE0_0D00,
            0x4_0000 | vector,
            0x2_0000 | vector,
        ][usize::from(u.arbitrary::<u8>()?) % 5],
        _ => u.arbitrary()?,
    })
}
