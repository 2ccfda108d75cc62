use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::ThreadId;

use super::*;

const LIMIT: Duration = Duration::from_secs(20);
const NONE: [u32; 0] = [];

enum Event {
    /// Reports the number.
    Number(u32),
    /// Reports the number, then waits until the test sends something or has ended.
    Wait(u32, Receiver<()>),
    /// Reports the number, and posts another one.
    Post(u32, u32),
    /// For the main thread only.
    Main(u32),
    End,
}

struct Log {
    queue: EventQueue<Log>,
    handled: Sender<(u32, ThreadId)>,
}

impl Handle for Log {
    type Event = Event;
    type End = &'static str;

    fn handle(&mut self, event: Event) -> Option<&'static str> {
        let number = match &event {
            Event::Number(number) | Event::Wait(number, _) | Event::Main(number) => *number,
            Event::Post(number, _) => *number,
            Event::End => return Some("ended"),
        };
        let _ = self.handled.send((number, thread::current().id()));
        match event {
            Event::Wait(_, go) => _ = go.recv_timeout(LIMIT),
            Event::Post(_, other) => self.queue.post(Event::Number(other)),
            _ => {}
        }
        None
    }

    fn allows_any_thread(&self, event: &Event) -> bool {
        !matches!(event, Event::Main(_))
    }
}

/// A queue whose main thread runs, with that thread, and the numbers of handled events.
struct Running {
    queue: EventQueue<Log>,
    main: thread::JoinHandle<&'static str>,
    handled: Receiver<(u32, ThreadId)>,
}

impl Running {
    fn start() -> Self {
        let queue = EventQueue::start().unwrap();
        let (sender, handled) = mpsc::channel();
        let log = Box::new(Log {
            queue: queue.clone(),
            handled: sender,
        });
        let main = thread::spawn({
            let queue = queue.clone();
            move || queue.run(log).1
        });
        let running = Self { queue, main, handled };
        // The main thread has the handler from here on.
        running.queue.post(Event::Number(0));
        assert_eq!(running.next(), (0, running.main.thread().id()));
        while running.queue.inner().handler.is_none() {
            thread::yield_now();
        }
        running
    }

    fn next(&self) -> (u32, ThreadId) {
        self.handled.recv_timeout(LIMIT).expect("an event is handled")
    }

    fn end(self) -> Vec<u32> {
        self.queue.handle(Event::End);
        assert_eq!(self.main.join().unwrap(), "ended");
        self.handled.try_iter().map(|(number, _)| number).collect()
    }
}

#[test]
fn idle_handler_serves_the_thread_that_brings_the_event() {
    let running = Running::start();
    running.queue.handle(Event::Number(1));
    assert_eq!(running.next(), (1, thread::current().id()));
    running.queue.handle(Event::Main(2));
    assert_eq!(running.next(), (2, running.main.thread().id()));
    assert_eq!(running.end(), NONE);
}

#[test]
fn event_during_another_one_waits_for_the_main_thread() {
    let running = Running::start();
    let (go, wait) = mpsc::channel();
    let other = thread::spawn({
        let queue = running.queue.clone();
        move || queue.handle(Event::Wait(1, wait))
    });
    assert_eq!(running.next().0, 1);
    // Neither blocks.
    running.queue.handle(Event::Number(2));
    running.queue.post(Event::Number(3));
    running.queue.handle(Event::Number(4));
    assert!(running.handled.try_recv().is_err());
    go.send(()).unwrap();
    let main = running.main.thread().id();
    assert_eq!(
        [1, 2, 3].map(|_| running.next()),
        [2, 3, 4].map(|number| (number, main))
    );
    other.join().unwrap();
    assert_eq!(running.end(), NONE);
}

#[test]
fn handler_that_posts_an_event_has_it_handled_afterwards() {
    let running = Running::start();
    running.queue.handle(Event::Post(1, 2));
    assert_eq!([1, 2].map(|_| running.next().0), [1, 2]);
    assert_eq!(running.end(), NONE);
}

#[test]
fn events_of_one_thread_are_handled_in_its_order() {
    const THREADS: u32 = 4;
    const EACH: u32 = 500;
    let running = Running::start();
    thread::scope(|scope| {
        for first in 0..THREADS {
            let queue = &running.queue;
            scope.spawn(move || {
                for number in 0..EACH {
                    let event = Event::Number(first * EACH + number);
                    match number % 3 {
                        0 => queue.post(event),
                        _ => queue.handle(event),
                    }
                }
            });
        }
    });
    let numbers = running.end();
    assert_eq!(numbers.len() as u32, THREADS * EACH);
    for first in 0..THREADS {
        let of_one = numbers.iter().filter(|number| **number / EACH == first);
        assert!(of_one.copied().eq(first * EACH..(first + 1) * EACH));
    }
}

#[test]
fn no_event_is_handled_after_the_last_one() {
    let running = Running::start();
    let queue = running.queue.clone();
    assert_eq!(running.end(), NONE);
    queue.handle(Event::Number(1));
    queue.post(Event::Number(2));
    assert_eq!(queue.inner().waiting.len(), 2);
}

#[test]
fn timers_come_in_the_order_of_their_times() {
    let running = Running::start();
    let start = Instant::now();
    for (number, ms) in [(3, 60), (2, 30), (1, 5), (4, 60)] {
        running
            .queue
            .post_after(Duration::from_millis(ms), Event::Number(number));
    }
    assert_eq!([(); 4].map(|()| running.next().0), [1, 2, 3, 4]);
    assert!(start.elapsed() >= Duration::from_millis(60));
    assert_eq!(running.end(), NONE);
}
