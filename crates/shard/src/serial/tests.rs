use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::panic_text::PanicText;
use super::{Console, pump};
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
fn flood_nobody_reads_is_dropped_and_counted() {
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
