//! The terminal of `mirrorball top`: keys, samples and answers come in, screens go out.
//!
//! Samples and orders are made on threads of their own, so that keys are served at once. The terminal is
//! restored at the end, by a signal and after a panic, too.

use std::os::fd::AsFd;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use config::cpulist;
use miette::{IntoDiagnostic, Result};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};
use operations::usage::{Collector, Reading, Sample};
use operations::{Failure, placement};
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui::layout::Rect;

use super::screen::{Screen, heights};
use super::state::{Effect, Key, Order, State, Target};
use super::time_of_next;

/// Longest time for which keys are awaited before samples and signals are looked at.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Whether a signal requests that this process end.
static IS_TO_END: AtomicBool = AtomicBool::new(false);

extern "C" fn note(_: i32) {
    IS_TO_END.store(true, Ordering::Relaxed);
}

/// Message of another thread.
enum News {
    Sample(std::result::Result<Box<Sample>, Failure>),
    /// The end of an order, in one line.
    Answer(String),
}

/// Shows the view until a key or a signal ends it. `first` is the reading that the first rates are since.
pub(super) fn run(collector: Collector, first: Reading, interval: Duration) -> Result<ExitCode> {
    let action = SigAction::new(SigHandler::Handler(note), SaFlags::SA_RESTART, SigSet::empty());
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP] {
        // SAFETY: the handler only stores to an atomic.
        unsafe { sigaction(signal, &action) }.into_diagnostic()?;
    }
    let (sender, news) = channel();
    let (refresh, refreshes) = channel();
    let own = sender.clone();
    let sampler = move || sample(collector, first, interval, &own, &refreshes);
    // Begun before the terminal changes: the host may have no thread left.
    let sampler = thread::Builder::new()
        .name("top-sampler".to_owned())
        .spawn(sampler);
    sampler.into_diagnostic()?;
    let hang_up = thread::Builder::new().name("top-hang-up".to_owned());
    hang_up.spawn(end_with_terminal).into_diagnostic()?;
    // Its panic hook restores the terminal before the process ends.
    let shown = ratatui::try_init()
        .into_diagnostic()
        .and_then(|mut terminal| show(&mut terminal, &news, &sender, &refresh));
    ratatui::restore();
    shown.map(|()| ExitCode::SUCCESS)
}

fn show(
    terminal: &mut DefaultTerminal,
    news: &Receiver<News>,
    sender: &Sender<News>,
    refresh: &Sender<()>,
) -> Result<()> {
    let mut state = State::default();
    let mut sample: Option<Box<Sample>> = None;
    let mut is_changed = true;
    while !IS_TO_END.load(Ordering::Relaxed) {
        while let Ok(new) = news.try_recv() {
            is_changed = true;
            match new {
                News::Sample(Ok(new)) => sample = Some(new),
                News::Sample(Err(failure)) => state.message = failure.line(),
                News::Answer(answer) => state.message = answer,
            }
        }
        let rows = sample
            .as_deref()
            .map_or_else(Vec::new, |sample| state.rows(sample));
        if is_changed {
            let draw = |frame: &mut ratatui::Frame<'_>| {
                let screen = Screen {
                    sample: sample.as_deref(),
                    state: &state,
                    rows: &rows,
                };
                frame.render_widget(screen, frame.area());
            };
            let area = terminal.draw(draw).into_diagnostic()?.area;
            state.page = page(area, sample.as_deref());
            is_changed = false;
        }
        if !event::poll(POLL_INTERVAL).into_diagnostic()? {
            continue;
        }
        is_changed = true;
        let Some(key) = key(&event::read().into_diagnostic()?) else {
            continue;
        };
        match state.press(key, &rows) {
            Effect::Draw => {}
            Effect::Quit => return Ok(()),
            Effect::Give(order) => give(order, sender.clone(), refresh.clone(), &mut state),
        }
    }
    Ok(())
}

/// Ends the process when the terminal is gone. The wait for keys does not return then: each read of the
/// terminal ends at once with nothing. There is no screen to restore.
fn end_with_terminal() {
    let input = std::io::stdin();
    loop {
        // Without events to wait for, only an end or an error of the file is reported.
        match poll(
            &mut [PollFd::new(input.as_fd(), PollFlags::empty())],
            PollTimeout::NONE,
        ) {
            Err(Errno::EINTR) => {}
            _ => std::process::exit(0),
        }
    }
}

/// Number of rows that a page of the table has.
fn page(area: Rect, sample: Option<&Sample>) -> usize {
    let count = |of: fn(&Sample) -> usize| sample.map_or(0, of);
    let heights = heights(
        area,
        count(|sample| sample.cpus.len()),
        count(|sample| sample.cells.len()),
    );
    usize::from(heights.rows).max(1)
}

/// Sends a sample each `interval`, and at each request of a refresh, until the receiver is gone.
fn sample(
    mut collector: Collector,
    mut before: Reading,
    interval: Duration,
    news: &Sender<News>,
    refreshes: &Receiver<()>,
) {
    let mut next = Instant::now() + interval;
    let first = Sample::between(None, &before);
    if news.send(News::Sample(Ok(Box::new(first)))).is_err() {
        return;
    }
    loop {
        let left = next.saturating_duration_since(Instant::now());
        if let Err(RecvTimeoutError::Disconnected) = refreshes.recv_timeout(left) {
            return;
        }
        let begun = Instant::now();
        let sample = collector.read().map(|after| {
            let sample = Sample::between(Some(&before), &after);
            before = after;
            Box::new(sample)
        });
        if news.send(News::Sample(sample)).is_err() {
            return;
        }
        next = time_of_next(begun, Instant::now(), interval);
    }
}

/// Gives an order to a VM on a thread of its own.
fn give(order: Order, news: Sender<News>, refresh: Sender<()>, state: &mut State) {
    let obey = move || {
        let answer = obey(&order).unwrap_or_else(|failure| failure.line());
        // The view may have ended.
        let _ = news.send(News::Answer(answer));
        let _ = refresh.send(());
    };
    if let Err(error) = thread::Builder::new().name("top-order".to_owned()).spawn(obey) {
        state.message = format!("not ordered: {error}");
    }
}

/// Carries an order out; returns what has become of it, in one line.
fn obey(order: &Order) -> std::result::Result<String, Failure> {
    match order {
        Order::Move {
            vm,
            vcpu,
            to: Target::Cell(cell),
        } => placement::move_vcpu(vm, *vcpu, *cell).map(|moved| {
            let still_us = moved.still_ns.div_ceil(1000);
            let pin = match &moved.dropped_pin {
                Some(cpus) => format!("; its pin to CPUs {} is dropped", cpulist::write(cpus)),
                None => String::new(),
            };
            format!("vCPU {vcpu} of {vm} runs in cell {cell}; it stood still for {still_us} us{pin}")
        }),
        Order::Move {
            vm,
            vcpu,
            to: Target::Cpu(cpu),
        } => placement::place_vcpu(vm, *vcpu, *cpu)
            .map(|placed| placement::placed_line(vm, *vcpu, *cpu, &placed)),
        Order::Move {
            vm,
            vcpu,
            to: Target::Cpus(cpus),
        } => placement::pin_vcpu(vm, *vcpu, cpus.clone()).map(|()| match &cpus[..] {
            [] => format!("vCPU {vcpu} of {vm} may run on all CPUs of its VM"),
            cpus => format!("vCPU {vcpu} of {vm} runs on CPUs {}", cpulist::write(cpus)),
        }),
        Order::Cap { vm, limit } => placement::set_cpu_limit(vm, *limit).map(|()| match limit {
            Some(limit) => format!("{vm} uses {limit} CPUs at most"),
            None => format!("{vm} has no limit of CPUs"),
        }),
    }
}

/// Converts an event of the terminal; none if it is no key with a meaning.
fn key(event: &Event) -> Option<Key> {
    let Event::Key(KeyEvent {
        code,
        modifiers,
        kind: KeyEventKind::Press | KeyEventKind::Repeat,
        ..
    }) = event
    else {
        return None;
    };
    let has_control = modifiers.contains(KeyModifiers::CONTROL);
    Some(match code {
        KeyCode::Char('c') if has_control => Key::Interrupt,
        KeyCode::Char(c) if !has_control && !modifiers.contains(KeyModifiers::ALT) => Key::Char(*c),
        KeyCode::Up => Key::Up,
        KeyCode::Down => Key::Down,
        KeyCode::Left => Key::Left,
        KeyCode::Right => Key::Right,
        KeyCode::PageUp => Key::PageUp,
        KeyCode::PageDown => Key::PageDown,
        KeyCode::Home => Key::Home,
        KeyCode::End => Key::End,
        KeyCode::Tab => Key::Tab,
        KeyCode::BackTab => Key::BackTab,
        KeyCode::Enter => Key::Enter,
        KeyCode::Esc => Key::Escape,
        KeyCode::Backspace => Key::Backspace,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_c_quits_and_other_control_keys_do_nothing() {
        let press = |code, modifiers| key(&Event::Key(KeyEvent::new(code, modifiers)));
        assert_eq!(
            press(KeyCode::Char('c'), KeyModifiers::CONTROL),
            Some(Key::Interrupt)
        );
        assert_eq!(
            press(KeyCode::Char('c'), KeyModifiers::NONE),
            Some(Key::Char('c'))
        );
        assert_eq!(
            press(KeyCode::Char('R'), KeyModifiers::SHIFT),
            Some(Key::Char('R'))
        );
        for modifiers in [KeyModifiers::CONTROL, KeyModifiers::ALT] {
            assert_eq!(press(KeyCode::Char('q'), modifiers), None);
        }
        assert_eq!(key(&Event::Resize(80, 24)), None);
    }
}
