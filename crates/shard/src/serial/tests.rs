use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::output::Output;
use super::panic_text::PanicText;
use super::{Console, ConsoleCounters, pump};
use crate::bus::BusDevice;
use crate::ending::EndSignal;
use crate::launch::Ending;

fn console() -> Arc<Console> {
    Arc::new(Console::new(Arc::new(EndSignal::new().unwrap())).unwrap())
}

fn start(console: &Arc<Console>) -> (UnixStream, EventFd, std::thread::JoinHandle<()>) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    theirs.set_nonblocking(true).unwrap();
    let stop = EventFd::new(EFD_NONBLOCK).unwrap();
    let (stopped, console) = (stop.try_clone().unwrap(), console.clone());
    let thread = std::thread::spawn(move || pump(&console, File::from(OwnedFd::from(theirs)), &stopped));
    (ours, stop, thread)
}

#[test]
fn output_is_complete_when_the_pump_stops() {
    let console = console();
    let (mut monitor, stop, thread) = start(&console);
    for _ in 0..1000 {
        console.write(0, b"x");
    }
    stop.write(1).unwrap();
    thread.join().unwrap();
    let mut text = Vec::new();
    monitor.read_to_end(&mut text).unwrap();
    assert_eq!(text, [b'x'; 1000]);
}

#[test]
fn output_that_is_not_read_is_dropped_and_counted() {
    let console = console();
    let (_monitor, stop, thread) = start(&console);
    for _ in 0..4 << 20 {
        console.write(0, b"x");
    }
    stop.write(1).unwrap();
    thread.join().unwrap();
    assert_eq!(console.counters().written.load(Ordering::Relaxed), 4 << 20);
    assert!(console.counters().dropped.load(Ordering::Relaxed) > 0);
}

#[test]
fn input_waits_for_the_guest() {
    let console = console();
    let (mut monitor, stop, thread) = start(&console);
    let sent: Vec<u8> = (0..4000u32).map(|byte| (byte % 251) as u8).collect();
    monitor.write_all(&sent).unwrap();
    let mut got = Vec::new();
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(20);
    while got.len() < sent.len() && std::time::Instant::now() < deadline {
        let mut status = [0];
        console.read(5, &mut status);
        if status[0] & 1 != 0 {
            let mut byte = [0];
            console.read(0, &mut byte);
            got.push(byte[0]);
        } else {
            std::thread::yield_now();
        }
    }
    stop.write(1).unwrap();
    thread.join().unwrap();
    assert!(got == sent, "{} of {} bytes came", got.len(), sent.len());
}

#[test]
fn accesses_of_odd_size_do_nothing() {
    let console = console();
    let mut data = [0xFF; 4];
    console.read(0, &mut data);
    assert_eq!(data, [0xFF; 4]);
    console.write(0, &[b'x'; 2]);
    console.write(0, &[]);
    assert_eq!(console.counters().written.load(Ordering::Relaxed), 0);
}

#[test]
fn panic_text_is_found_across_noise() {
    let mut text = PanicText::default();
    let found = |text: &mut PanicText, bytes: &[u8]| bytes.iter().filter(|&&byte| text.push(byte)).count();
    assert_eq!(found(&mut text, b"KKernel panic - not syncin"), 0);
    assert_eq!(
        found(
            &mut text,
            b"KKernel panic - not syncing: x. Kernel Kernel panic - not syncing"
        ),
        2
    );
}

#[test]
fn reset_after_panic_text_is_a_panic() {
    let end = Arc::new(EndSignal::new().unwrap());
    let console = Console::new(end.clone()).unwrap();
    for byte in b"Kernel panic - not syncing: sysrq" {
        console.write(0, &[*byte]);
    }
    assert_eq!(end.cause(), None);
    end.end(Ending::Reboot);
    assert_eq!(end.cause(), Some(Ending::Panic));
}

#[test]
fn a_restored_console_has_the_registers_and_the_input_of_the_saved_one() {
    let (before, after) = (console(), console());
    // Divisor latch, line control, interrupt enable, modem control, scratch: a different value in each
    // register.
    for (register, value) in [
        (3, 0x83),
        (0, 12),
        (1, 34),
        (3, 0x03),
        (1, 0x05),
        (4, 0x08),
        (7, 0x5A),
    ] {
        before.write(register, &[value]);
    }
    assert_eq!(before.input(b"ab"), 2);
    let end = Arc::new(EndSignal::new().unwrap());
    after.restore(&before.save(), end).unwrap();
    let registers = |console: &Console| {
        [3, 1, 4, 7].map(|register| {
            let mut byte = [0];
            console.read(register, &mut byte);
            byte[0]
        })
    };
    assert_eq!(registers(&after), [0x03, 0x05, 0x08, 0x5A]);
    assert_eq!(after.save().divisor, [12, 34]);
    let input = [(); 2].map(|()| {
        let mut byte = [0];
        after.read(0, &mut byte);
        byte[0]
    });
    assert_eq!(&input, b"ab");
}

#[test]
fn panic_text_after_a_restore_reaches_the_new_vms_end() {
    let (console, end) = (console(), Arc::new(EndSignal::new().unwrap()));
    console.restore(&console.save(), end.clone()).unwrap();
    for byte in b"Kernel panic - not syncing" {
        console.write(0, &[*byte]);
    }
    end.end(Ending::Reboot);
    assert_eq!(end.cause(), Some(Ending::Panic));
}

#[test]
fn input_beyond_the_chips_room_is_counted_only_as_far_as_it_was_accepted() {
    let console = console();
    let room = console.input_room();
    assert!(room > 0);
    assert_eq!(console.input(&vec![b'x'; room]), room);
    assert_eq!(console.input_room(), 0);
    assert_eq!(console.input(b"y"), 0);
    assert_eq!(console.counters().received.load(Ordering::Relaxed), room as u64);
}

#[test]
fn received_input_raises_the_interrupt_that_the_guest_enabled() {
    let console = console();
    console.write(1, &[1]);
    assert!(console.interrupt().read().is_err(), "nothing has come yet");
    console.input(b"x");
    assert_eq!(console.interrupt().read().unwrap(), 1);
}

#[test]
fn output_wakes_the_pump_once_and_is_consumed_in_order() {
    let ready = EventFd::new(EFD_NONBLOCK).unwrap();
    let counters = Arc::new(ConsoleCounters::default());
    let end = Arc::new(EndSignal::new().unwrap());
    let mut output = Output::new(ready.try_clone().unwrap(), counters, end);
    assert!(output.is_empty() && output.front().is_empty());
    output.write_all(b"abc").unwrap();
    assert_eq!(
        ready.read().unwrap(),
        1,
        "one wake-up for all writes while the pump waits"
    );
    assert!(!output.is_empty());
    assert_eq!(output.front(), b"abc");
    output.consume(2);
    assert_eq!(output.front(), b"c");
    output.consume(5);
    assert!(output.is_empty());
    output.write_all(b"d").unwrap();
    assert_eq!(ready.read().unwrap(), 1);
}

#[test]
fn output_of_a_monitor_that_is_gone_is_dropped_and_counted() {
    let console = console();
    let (monitor, stop, thread) = start(&console);
    drop(monitor);
    for _ in 0..1000 {
        console.write(0, b"x");
    }
    stop.write(1).unwrap();
    thread.join().unwrap();
    assert!(console.uart().writer().is_empty());
    assert_eq!(console.counters().dropped.load(Ordering::Relaxed), 1000);
}

#[test]
fn output_that_a_broken_connection_refuses_is_counted_once() {
    let console = console();
    let (mut monitor, theirs) = UnixStream::pair().unwrap();
    theirs.set_nonblocking(true).unwrap();
    for _ in 0..1000 {
        console.write(0, b"x");
    }
    // The pump reads this before its own writes fail.
    monitor.write_all(b"?").unwrap();
    drop(monitor);
    let stop = EventFd::new(EFD_NONBLOCK).unwrap();
    stop.write(1).unwrap();
    pump(&console, File::from(OwnedFd::from(theirs)), &stop);
    assert_eq!(console.counters().received.load(Ordering::Relaxed), 1);
    assert_eq!(console.counters().dropped.load(Ordering::Relaxed), 1000);
}
