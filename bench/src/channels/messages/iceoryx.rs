//! `iceoryx2` between processes: publish-subscribe without copies, polled, and its events, which block.

use std::process::Stdio;

use bench::Outcome;
use bench::tables::{each_ns, per_second};
use iceoryx2::port::listener::Listener;
use iceoryx2::port::notifier::Notifier;
use iceoryx2::port::publisher::Publisher;
use iceoryx2::port::subscriber::Subscriber;
use iceoryx2::prelude::*;

use super::{LINES, MESSAGES, TRIPS, TRIPS_SLOW};
use crate::patience::{LIMIT, poll};
use crate::pinned::one;
use crate::process::Other;

type Payload = [u64; 8];
type Node = iceoryx2::node::Node<ipc::Service>;
type Writer = Publisher<ipc::Service, Payload, ()>;
type Reader = Subscriber<ipc::Service, Payload, ()>;

fn node() -> Outcome<Node> {
    let node = NodeBuilder::new().signal_handling_mode(SignalHandlingMode::Disabled);
    Ok(node.create::<ipc::Service>()?)
}

/// One direction between the processes that know the name: a queue of [`LINES`], which drops nothing.
fn writer(node: &Node, name: &str) -> Outcome<Writer> {
    let service = service(node, name)?;
    let publisher = service
        .publisher_builder()
        .backpressure_strategy(BackpressureStrategy::RetryUntilDelivered);
    Ok(publisher.create()?)
}

fn reader(node: &Node, name: &str) -> Outcome<Reader> {
    Ok(service(node, name)?.subscriber_builder().create()?)
}

type Way = iceoryx2::service::port_factory::publish_subscribe::PortFactory<ipc::Service, Payload, ()>;

fn service(node: &Node, name: &str) -> Outcome<Way> {
    let service = node
        .service_builder(&name.try_into()?)
        .publish_subscribe::<Payload>();
    let service = service
        .enable_safe_overflow(false)
        .subscriber_max_buffer_size(LINES);
    Ok(service
        .history_size(0)
        .max_publishers(1)
        .max_subscribers(1)
        .open_or_create()?)
}

/// Sends a message. Returns the number of receivers: none as long as no process reads.
fn send(writer: &Writer, number: u64) -> Outcome<usize> {
    Ok(writer.loan_uninit()?.write_payload([number; 8]).send()?)
}

fn receive(reader: &Reader) -> Outcome<u64> {
    poll(|| {
        reader
            .receive()
            .map(|sample| sample.map(|sample| sample[0]))
            .transpose()
    })?
    .map_err(Into::into)
}

/// The last message of a conversation.
const END: u64 = u64::MAX;

pub fn round_trip() -> Outcome<f64> {
    with_other("iceoryx-echo", |[there, back], other| {
        let node = node()?;
        let (reader, writer) = (reader(&node, &back)?, writer(&node, &there)?);
        connected(|| send(&writer, 0))?;
        receive(&reader)?;
        let measured = each_ns(TRIPS, |number| {
            send(&writer, number)?;
            receive(&reader).map(|_| ())
        })?;
        send(&writer, END)?;
        other.finish()?;
        Ok(measured)
    })
}

/// Makes the service that both processes use, in the one that comes first. The ports belong to the thread
/// that has made them, and their messages are lost with them: the other process must have ended before they
/// do.
fn with_other(role: &str, here: impl FnOnce([String; 2], Other) -> Outcome<f64> + Send) -> Outcome<f64> {
    let names = ["there", "back"].map(|way| format!("mirrorball-bench-{}-{role}-{way}", std::process::id()));
    let other = Other::start(role, &names, Stdio::null())?;
    one(|| here(names, other))
}

/// Sends until a process receives it.
fn connected(mut send: impl FnMut() -> Outcome<usize>) -> Outcome<()> {
    poll(|| match send() {
        Ok(0) => None,
        sent => Some(sent.map(|_| ())),
    })?
}

pub fn one_way() -> Outcome<f64> {
    with_other("iceoryx-flood", |[there, back], other| {
        let node = node()?;
        let (reader, writer) = (reader(&node, &back)?, writer(&node, &there)?);
        receive(&reader)?;
        connected(|| send(&writer, 0))?;
        let measured = per_second(MESSAGES, || receive(&reader).map(|_| ()))?;
        send(&writer, END)?;
        other.finish()?;
        Ok(measured)
    })
}

fn two(words: &[String]) -> Outcome<&[String; 2]> {
    words.try_into().map_err(|_| "two names are wanted".into())
}

/// The other process of [`round_trip`].
pub fn echo_role(words: &[String]) -> Outcome<()> {
    let [there, back] = two(words)?;
    let node = node()?;
    let (reader, writer) = (reader(&node, there)?, writer(&node, back)?);
    loop {
        let number = receive(&reader)?;
        if number == END {
            return Ok(());
        }
        send(&writer, number)?;
    }
}

/// The other process of [`one_way`].
pub fn flood_role(words: &[String]) -> Outcome<()> {
    let [there, back] = two(words)?;
    let node = node()?;
    let (reader, writer) = (reader(&node, there)?, writer(&node, back)?);
    connected(|| send(&writer, 0))?;
    // Nothing is dropped any more once the other side has received one.
    receive(&reader)?;
    (0..MESSAGES).try_for_each(|number| send(&writer, number).map(|_| ()))?;
    // The other side has taken all of them.
    receive(&reader).map(|_| ())
}

fn notifier(node: &Node, name: &str) -> Outcome<Notifier<ipc::Service>> {
    let event = node.service_builder(&name.try_into()?).event().open_or_create()?;
    Ok(event.notifier_builder().create()?)
}

fn listener(node: &Node, name: &str) -> Outcome<Listener<ipc::Service>> {
    let event = node.service_builder(&name.try_into()?).event().open_or_create()?;
    Ok(event.listener_builder().create()?)
}

/// Blocks until there is an event, and returns the last one's number.
fn listen(listener: &Listener<ipc::Service>) -> Outcome<usize> {
    let mut last = None;
    listener.timed_wait(|event| last = Some(event.id.as_value()), LIMIT)?;
    last.ok_or_else(|| "no event comes".into())
}

/// The number of the event that is an end; all others are 0.
const EVENT_END: usize = 1;

pub fn events() -> Outcome<f64> {
    with_other("iceoryx-events", |[there, back], other| {
        let node = node()?;
        let (listener, notifier) = (listener(&node, &back)?, notifier(&node, &there)?);
        let notify = |number| Ok(notifier.notify_with_custom_event_id(EventId::new(number))?);
        connected(|| notify(0))?;
        listen(&listener)?;
        let measured = each_ns(TRIPS_SLOW, |_| {
            notify(0)?;
            listen(&listener).map(|_| ())
        })?;
        notify(EVENT_END)?;
        other.finish()?;
        Ok(measured)
    })
}

/// The other process of [`events`].
pub fn events_role(words: &[String]) -> Outcome<()> {
    let [there, back] = two(words)?;
    let node = node()?;
    let (listener, notifier) = (listener(&node, there)?, notifier(&node, back)?);
    while listen(&listener)? != EVENT_END {
        notifier.notify()?;
    }
    Ok(())
}
