//! Against pins as plain structures.

use proptest::prelude::*;

use super::*;

#[derive(Clone, Copy, Default)]
struct Pin {
    low: u32,
    high: u32,
    asserted: bool,
    in_service: bool,
}

impl Pin {
    fn mode(self) -> u32 {
        self.low >> 8 & 7
    }

    fn is_level(self) -> bool {
        self.low & 0x8000 != 0 && self.mode() < 2
    }

    fn is_masked(self) -> bool {
        self.low & 0x1_0000 != 0
    }

    /// Sends a level if it is there, may go, and is not in service.
    fn settle(&mut self) -> Option<(u8, u8)> {
        let goes = self.is_level() && self.asserted && !self.is_masked() && !self.in_service;
        self.in_service |= goes;
        goes.then(|| self.message())
    }

    fn message(self) -> (u8, u8) {
        (self.low as u8, (self.high >> 24) as u8)
    }
}

#[derive(Clone, Debug)]
enum Event {
    Line(u8, bool),
    Low(u8, u32),
    High(u8, u32),
    End(u8),
    EndRegister(u8),
}

fn event() -> impl Strategy<Value = Event> {
    let pin = 0..4_u8;
    // Few vectors, so that pins share them
    let low = (0x40..0x43_u32, prop::bits::u32::masked(0xFFFF_FF00)).prop_map(|(vector, bits)| vector | bits);
    let tame = (0x40..0x43_u32, prop::bits::u32::masked(0x1_8000)).prop_map(|(vector, bits)| vector | bits);
    prop_oneof![
        6 => (pin.clone(), any::<bool>()).prop_map(|(pin, high)| Event::Line(pin, high)),
        1 => (pin.clone(), low).prop_map(|(pin, low)| Event::Low(pin, low)),
        3 => (pin.clone(), tame).prop_map(|(pin, low)| Event::Low(pin, low)),
        1 => (pin, any::<u32>()).prop_map(|(pin, high)| Event::High(pin, high)),
        2 => (0x40..0x43_u8).prop_map(Event::End),
        1 => (0x40..0x43_u8).prop_map(Event::EndRegister),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn interrupts_match_the_per_pin_model(events in prop::collection::vec(event(), 0..100)) {
        let mut chip = IoApic::new();
        let mut pins = [Pin { low: 0x1_0000, ..Pin::default() }; 4];
        for event in events {
            let mut expected = Vec::new();
            let sent = match event {
                Event::Line(number, high) => {
                    let pin = &mut pins[usize::from(number)];
                    let rises = high && !pin.asserted;
                    pin.asserted = high;
                    let edge = rises && !pin.is_level() && !pin.is_masked() && ![3, 6].contains(&pin.mode());
                    expected.extend(pin.settle().or(edge.then(|| pin.message())));
                    chip.set_line(number, high).into_iter().collect()
                }
                Event::Low(number, value) => {
                    let pin = &mut pins[usize::from(number)];
                    pin.low = value & 0x1_AFFF;
                    pin.in_service &= pin.is_level();
                    expected.extend(pin.settle());
                    write(&mut chip, 0x10 + 2 * number, value)
                }
                Event::High(number, value) => {
                    pins[usize::from(number)].high = value & 0xFF00_0000;
                    write(&mut chip, 0x11 + 2 * number, value)
                }
                Event::End(vector) | Event::EndRegister(vector) => {
                    for pin in pins.iter_mut().filter(|pin| pin.low as u8 == vector) {
                        pin.in_service = false;
                        expected.extend(pin.settle());
                    }
                    match event {
                        Event::End(_) => chip.end_of_interrupt(vector),
                        _ => chip.write(0x40, vector.into()),
                    }
                }
            };
            let sent: Vec<(u8, u8)> = sent.iter().map(|interrupt| {
                let destination = match interrupt.destination {
                    Destination::Physical(u32::MAX) => 0xFF,
                    Destination::Physical(id) | Destination::Logical(id) => id as u8,
                };
                (interrupt.vector, destination)
            }).collect();
            prop_assert_eq!(sent, expected);
            prop_assert!(chip.is_sane());
            for (number, pin) in (0..).zip(pins) {
                let remote = if pin.in_service { 0x4000 } else { 0 };
                prop_assert_eq!(read(&mut chip, 0x10 + 2 * number), pin.low | remote);
                prop_assert_eq!(read(&mut chip, 0x11 + 2 * number), pin.high);
            }
        }
    }

    #[test]
    fn every_access_sequence_leaves_a_valid_state(
        accesses in prop::collection::vec(
            (prop_oneof![Just(0_u64), Just(0x10), Just(0x40), any::<u64>()], any::<u32>(), any::<u8>()),
            0..200
        ),
    ) {
        let mut chip = IoApic::new();
        for (offset, value, pin) in accesses {
            let written = chip.write(offset, value);
            prop_assert!(written.iter().all(|interrupt| interrupt.level));
            let _ = chip.set_line(pin % 32, value & 1 == 1);
            chip.read(offset);
            prop_assert!(chip.is_sane());
        }
    }
}
