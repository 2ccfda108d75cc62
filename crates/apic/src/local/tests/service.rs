//! Requests, priorities, the end of service, the timer's interrupt.

use super::*;

/// SDM 11.8.4: the highest vector first, those of the same number once.
#[test]
fn highest_vector_is_served_first() {
    let mut apic = enabled(1);
    for vector in [0x41, 0xF1, 0x10, 0x41] {
        apic.accept(vector, false);
    }
    let order = [(); 4].map(|()| {
        let taken = apic.take();
        apic.end_of_interrupt();
        taken
    });
    assert_eq!(order, [Some(0xF1), Some(0x41), Some(0x10), None]);
}

/// SDM 11.8.3.1: only a higher class interrupts, and the end of service resumes the lower one.
#[test]
fn only_a_higher_priority_class_preempts() {
    let mut apic = enabled(1);
    apic.accept(0x41, false);
    assert_eq!(apic.take(), Some(0x41));
    apic.accept(0x4F, false);
    assert_eq!(apic.take(), None, "same class");
    apic.accept(0x50, false);
    assert_eq!(apic.take(), Some(0x50));
    assert_eq!(read(&apic, 0x80A), 0x50);
    write(&mut apic, 0x80B, 0);
    assert_eq!(read(&apic, 0x80A), 0x40);
    assert_eq!(apic.take(), None);
    write(&mut apic, 0x80B, 0);
    assert_eq!(apic.take(), Some(0x4F));
}

/// SDM 11.8.4: one in service and one requested of the same vector are two.
#[test]
fn vector_in_service_can_be_requested_again() {
    let mut apic = enabled(1);
    apic.accept(0x41, false);
    apic.take();
    apic.accept(0x41, false);
    apic.accept(0x41, false);
    assert_eq!((read(&apic, 0x812), read(&apic, 0x822)), (2, 2));
    apic.end_of_interrupt();
    assert_eq!(apic.take(), Some(0x41));
    apic.end_of_interrupt();
    assert_eq!(apic.take(), None);
}

/// SDM 11.8.3.1, 11.8.6: the task's priority holds back its class and those below; CR8 is its upper half.
#[test]
fn task_priority_blocks_its_class_and_below() {
    let mut apic = enabled(1);
    apic.accept(0x5F, false);
    write(&mut apic, 0x808, 0x50);
    assert_eq!(apic.next(), None);
    apic.set_task_priority(0x4 << 4);
    assert_eq!((apic.next(), apic.task_priority()), (Some(0x5F), 0x40));
    write(&mut apic, 0x808, 0x4F);
    assert_eq!(apic.next(), Some(0x5F));
    assert_eq!(read(&apic, 0x80A), 0x4F);
    apic.take();
    assert_eq!(read(&apic, 0x80A), 0x50);
    write(&mut apic, 0x808, 0xF0);
    apic.accept(0xFF, false);
    assert_eq!(apic.next(), None, "class 15 holds back all");
}

/// SDM 11.8.4, 11.8.5: the trigger mode of the last request decides whether the IOAPIC receives the end of
/// interrupt.
#[test]
fn eoi_of_a_level_is_reported() {
    let mut apic = enabled(1);
    apic.accept(0x61, true);
    assert_eq!(read(&apic, 0x81B), 2);
    apic.take();
    assert_eq!(
        apic.write(0x80B, 0, 0),
        Ok(Written::EndOfInterrupt { vector: 0x61 })
    );
    apic.accept(0x61, false);
    assert_eq!(read(&apic, 0x81B), 0);
    apic.take();
    write(&mut apic, 0x80B, 0);
    write(&mut apic, 0x80B, 0);
    assert_eq!(apic.end_of_interrupt(), None, "nothing in service");
}

/// SDM 11.4.7.2: disabled by software, it takes no new vectors; those it has stay, and are served.
#[test]
fn eoi_may_be_deferred_when_nothing_depends_on_it() {
    let mut apic = enabled(0);
    assert!(!apic.may_end_unseen());
    apic.accept(0x40, false);
    assert!(!apic.may_end_unseen());
    apic.take();
    assert!(apic.may_end_unseen());
    // Even one that is not served before the end.
    apic.accept(0x30, false);
    assert!(!apic.may_end_unseen());
    apic.end_of_interrupt();
    apic.take();
    assert!(apic.may_end_unseen());
    apic.accept(0x50, true);
    apic.take();
    assert!(!apic.may_end_unseen(), "the IOAPIC waits");
}

#[test]
fn software_disable_keeps_accepted_interrupts() {
    let mut apic = enabled(1);
    apic.accept(0x41, false);
    apic.write(0x80F, 0xFF, 0).expect("a legal write");
    apic.accept(0x51, false);
    apic.accept(3, false);
    assert_eq!(apic.take(), Some(0x41));
    assert_eq!(apic.next(), None);
    write(&mut apic, 0x828, 0);
    assert_eq!(read(&apic, 0x828), 0);
}

/// SDM 11.5.4.1
#[test]
fn due_timer_requests_its_vector() {
    let mut apic = enabled(1);
    write(&mut apic, 0x832, 0x4_00EC);
    write(&mut apic, 0x6E0, 1000);
    assert_eq!((apic.timer_due(), apic.read(0x6E0, 999)), (Some(1000), Ok(1000)));
    apic.expire(999);
    assert_eq!(apic.next(), None);
    apic.expire(1000);
    assert_eq!(
        (apic.take(), apic.timer_due(), apic.read(0x6E0, 1000)),
        (Some(0xEC), None, Ok(0))
    );
    apic.end_of_interrupt();
    apic.expire(2000);
    assert_eq!(apic.next(), None, "once");
}

/// A guest that sets a new deadline after the old one has passed had the old one's interrupt.
#[test]
fn due_timer_interrupt_survives_reprogramming() {
    let due_at_1000 = || {
        let mut apic = enabled(1);
        write(&mut apic, 0x832, 0x4_00EC);
        write(&mut apic, 0x6E0, 1000);
        apic
    };
    for (msr, value) in [
        (0x6E0, 5000),
        (0x6E0, 0),
        (0x832, 0x5_00EC),
        (0x838, 0),
        (0x83E, 0),
    ] {
        for (now, expected) in [(999, None), (1000, Some(0xEC))] {
            let mut apic = due_at_1000();
            assert_eq!(apic.write(msr, value, now), NOTHING);
            assert_eq!(apic.next(), expected, "{msr:#x} at {now}");
        }
    }
}

/// SDM 11.5.4: a count is not one of the TSC, a deadline is.
#[test]
fn tsc_step_shifts_a_count_and_keeps_a_deadline() {
    let mut counting = enabled(0);
    write(&mut counting, LVT_TIMER, 0x40);
    write(&mut counting, INITIAL_COUNT, 5);
    let due = counting.timer_due().expect("a timer that counts");
    counting.counter_moved(1000);
    assert_eq!(counting.timer_due(), Some(due + 1000));
    let mut armed = enabled(0);
    write(&mut armed, LVT_TIMER, 0x4_0040);
    write(&mut armed, TSC_DEADLINE, 500);
    armed.counter_moved(1000);
    assert_eq!(armed.timer_due(), Some(500));
}

/// SDM 11.5.1: a masked timer runs without an interrupt.
#[test]
fn masked_timer_sends_no_interrupt() {
    let mut apic = enabled(1);
    write(&mut apic, 0x832, 0x5_00EC);
    write(&mut apic, 0x6E0, 1000);
    assert_eq!((apic.timer_due(), apic.read(0x6E0, 0)), (None, Ok(1000)));
    apic.expire(1000);
    write(&mut apic, 0x832, 0x4_00EC);
    assert_eq!((apic.next(), apic.timer_due()), (None, None));
}

/// SDM 11.5.3: the error entry's interrupt is raised with the first error since the register was written,
/// unless it is masked.
#[test]
fn only_the_first_error_interrupts_until_esr_is_read() {
    let mut apic = enabled(1);
    write(&mut apic, 0x837, 0x1_00E0);
    apic.accept(3, false);
    assert_eq!(apic.next(), None, "masked");
    write(&mut apic, 0x837, 0xE0);
    apic.accept(3, false);
    assert_eq!(apic.next(), None, "not the first");
    for _ in 0..2 {
        write(&mut apic, 0x828, 0);
        apic.accept(3, false);
        assert_eq!(apic.take(), Some(0xE0));
        apic.accept(4, false);
        apic.end_of_interrupt();
        assert_eq!(apic.next(), None);
    }
}

/// SDM 11.5.3: a timer with a vector below 16 is an error.
#[test]
fn timer_with_an_illegal_vector_sets_an_error_bit() {
    let mut apic = enabled(1);
    write(&mut apic, 0x832, 0x4_000F);
    write(&mut apic, 0x6E0, 1);
    apic.expire(1);
    assert_eq!(apic.next(), None);
    write(&mut apic, 0x828, 0);
    assert_eq!(read(&apic, 0x828), 0x40);
}

/// Impossible states from another process.
#[test]
fn unreachable_states_are_rejected() {
    let sane = enabled(1);
    assert!(sane.is_sane());
    let spoils: [fn(&mut LocalApic); 16] = [
        |apic| apic.requested.insert(15),
        |apic| apic.in_service.insert(0),
        |apic| apic.level.insert(2),
        |apic| {
            apic.in_service.insert(0x40);
            apic.in_service.insert(0x4F);
        },
        |apic| {
            apic.in_service.insert(0x51);
            apic.in_service.insert(0x50);
        },
        |apic| apic.spurious |= 0x400,
        |apic| {
            apic.spurious = SPURIOUS_RESET;
            apic.lvt[0] = 0;
        },
        |apic| apic.lvt[LVT_ERROR] |= 0x100,
        |apic| apic.lvt[2] |= LVT_STATUS,
        |apic| apic.command = 0x300,
        |apic| apic.command = 0x1040,
        |apic| apic.errors = 1,
        |apic| apic.new_errors = 0x80,
        |apic| apic.is_present = false,
        // The reserved mode
        |apic| apic.timer.set_lvt(0x7_0040),
        |apic| {
            *apic = LocalApic::new(1, 10);
            apic.timer.set_lvt(0x40);
        },
    ];
    for (number, spoil) in spoils.iter().enumerate() {
        let mut apic = sane.clone();
        spoil(&mut apic);
        assert!(!apic.is_sane(), "{number}");
    }
    let mut apic = sane;
    apic.in_service.insert(0x4F);
    apic.in_service.insert(0x50);
    assert!(apic.is_sane(), "classes of their own");
}
