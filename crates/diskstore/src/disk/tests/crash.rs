//! What a completed flush made durable survives the death of the process at any moment.

use std::io::{BufRead, BufReader, Write};
use std::process::Stdio;
use std::time::Duration;

use super::super::{IoQueue, Operation, Submission};
use super::*;

const DISK_BYTES: u64 = 8 << 20;
const ROUNDS: u32 = 12;

/// Writes round after round, each with its number, and prints a number when its round is flushed.
#[test]
fn writer_process() {
    let Some(value) = subprocess_value() else { return };
    let (first, path) = value.split_once(' ').unwrap();
    let mut wanted = request(Path::new(path), "writer");
    (wanted.mode, wanted.persistent) = (Mode::Exclusive, true);
    let mut queue = IoQueue::new(store(&wanted), 8);
    for round in first.parse::<u32>().unwrap().. {
        for block in 0..24_u32 {
            let place = place(round, block);
            let mut data = round.to_le_bytes().repeat(1024);
            let from = segments(&mut data, 4096);
            finish(&mut queue, Operation::Write { offset: place, from });
        }
        let freed = place(round, 100);
        finish(
            &mut queue,
            Operation::Discard {
                offset: freed,
                bytes: 4096,
            },
        );
        finish(&mut queue, Operation::Flush);
        println!("flushed {round}");
        std::io::stdout().flush().unwrap();
    }
}

/// Where a round's block goes. Block 100, which is discarded, has places of its own.
fn place(round: u32, block: u32) -> u64 {
    let blocks = DISK_BYTES / 4096;
    if block == 100 {
        return (blocks - 1 - u64::from(round) % 16) * 4096;
    }
    (u64::from(round) * 24 + u64::from(block)) * 7919 % (blocks - 16) * 4096
}

fn finish(queue: &mut IoQueue, operation: Operation) {
    match queue.submit(operation, 1) {
        Submission::Done(result) => result.unwrap(),
        Submission::Pending => {
            queue.send().unwrap();
            loop {
                if let Some((_, result)) = queue.completed() {
                    return result.unwrap();
                }
                std::thread::yield_now();
            }
        }
    }
}

#[test]
fn flushed_writes_survive_kill_at_any_moment() {
    for format in FORMATS {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk");
        let name = if format == Format::Raw { "raw" } else { "qcow2" };
        qemu_img(&["create", "-q", "-f", name, text(&path), &DISK_BYTES.to_string()]);
        let mut newest = std::collections::HashMap::new();
        let mut next_round = 1;
        for kill in 0..ROUNDS {
            let mut writer = in_subprocess(
                "disk::tests::crash::writer_process",
                &format!("{next_round} {}", text(&path)),
            )
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
            let output = BufReader::new(writer.stdout.take().unwrap());
            let killer = std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(150 + u64::from(kill) * 17));
                writer.kill().unwrap();
                writer.wait().unwrap();
            });
            for line in output.lines().map_while(Result::ok) {
                let Some(round) = line
                    .rsplit_once("flushed ")
                    .and_then(|(_, round)| round.parse().ok())
                else {
                    continue;
                };
                for block in 0..24 {
                    newest.insert(place(round, block), round);
                }
                next_round = round + 1;
            }
            killer.join().unwrap();
            let mut wanted = request(&path, "reader");
            wanted.read_only = true;
            let disk = store(&wanted);
            for (place, round) in &newest {
                let bytes = read(&*disk, *place, 4096);
                let found = u32::from_le_bytes(bytes[..4].try_into().unwrap());
                // The round after the last flushed one may or may not be there.
                assert!(
                    found == *round || found == next_round,
                    "{format:?}, kill {kill}: at {place} round {found} instead of {round}"
                );
            }
            // Leaked clusters cost space only; anything else is an error (exit status 2).
            if format == Format::Qcow2 {
                let check = Command::new("qemu-img")
                    .args(["check", "-q", text(&path)])
                    .output()
                    .unwrap();
                let code = check.status.code();
                assert!(
                    matches!(code, Some(0 | 3)),
                    "{}",
                    String::from_utf8_lossy(&check.stdout)
                );
            }
        }
        assert!(next_round > ROUNDS, "the writer hardly ran: {next_round} rounds");
    }
}
