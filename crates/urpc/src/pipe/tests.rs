//! Tests of pipes between threads of one process; under `--cfg loom` in every order that the memory model
//! allows.

use std::sync::Arc;

use super::*;

/// Returns both ends of a pipe of `N` words.
fn pair<const N: usize>() -> (Writer<Arc<Pipe>>, Reader<Arc<Pipe>>) {
    let pipe: Arc<Pipe> = Arc::new(Pipe {
        head: Position::default(),
        tail: Position::default(),
        reader: Side::default(),
        writer: Side::default(),
        words: core::array::from_fn::<AtomicU64, N, _>(|_| AtomicU64::default()),
    });
    (Writer::new(pipe.clone()), Reader::new(pipe))
}

/// Writes two parts at once; returns the number of written bytes.
fn write(writer: &mut Writer<Arc<Pipe>>, first: &[u8], second: &[u8]) -> Result<usize, Corrupt> {
    // SAFETY: borrowed as long as the call.
    unsafe { writer.write([first, second]) }
}

/// Reads into two buffers of these sizes, and returns the bytes.
fn read(reader: &mut Reader<Arc<Pipe>>, sizes: [usize; 2]) -> Result<Vec<u8>, Corrupt> {
    let [mut first, mut second] = sizes.map(|size| vec![0xee; size]);
    // SAFETY: borrowed as long as the call.
    let count = unsafe { reader.read([&raw mut first[..], &raw mut second[..]]) }?;
    first.extend(second);
    assert!(
        first[count..].iter().all(|byte| *byte == 0xee),
        "a byte was written beyond the received ones"
    );
    first.truncate(count);
    Ok(first)
}

#[cfg(loom)]
mod every_order {
    use loom::thread;

    use super::*;

    fn word(number: u8) -> [u8; WORD_BYTES] {
        [number; WORD_BYTES]
    }

    /// Also when the pipe wraps and both parts are used.
    #[test]
    fn bytes_arrive_whole_once_and_in_order() {
        loom::model(|| {
            let (mut writer, mut reader) = pair::<2>();
            let writing = thread::spawn(move || {
                assert_eq!(write(&mut writer, &word(1), &word(2)), Ok(2 * WORD_BYTES));
                while write(&mut writer, &word(3), &[]).expect("honest") == 0 {
                    thread::yield_now();
                }
            });
            let mut came = Vec::new();
            while came.len() < 3 * WORD_BYTES {
                let more = read(&mut reader, [WORD_BYTES, WORD_BYTES]).expect("honest");
                if more.is_empty() {
                    thread::yield_now();
                }
                came.extend(more);
            }
            assert_eq!(came, [word(1), word(2), word(3)].concat());
            writing.join().expect("no panic");
        });
    }

    /// A reader that decided to sleep is woken, at whatever time the bytes arrived.
    #[test]
    fn reader_never_misses_a_wakeup() {
        loom::model(|| {
            let (mut writer, mut reader) = pair::<2>();
            let writing = thread::spawn(move || {
                assert_eq!(write(&mut writer, &word(1), &[]), Ok(WORD_BYTES));
                writer.must_wake()
            });
            let sleeps = reader.prepare_to_sleep().expect("honest");
            let woken = writing.join().expect("no panic");
            assert!(!sleeps || woken, "the reader would sleep forever");
            assert_eq!(read(&mut reader, [WORD_BYTES, 0]), Ok(word(1).to_vec()));
        });
    }

    /// The same for a writer that waits for room.
    #[test]
    fn sender_never_misses_a_wakeup() {
        loom::model(|| {
            let (mut writer, mut reader) = pair::<2>();
            assert_eq!(write(&mut writer, &word(1), &word(2)), Ok(2 * WORD_BYTES));
            let reading = thread::spawn(move || {
                assert_eq!(read(&mut reader, [WORD_BYTES, 0]), Ok(word(1).to_vec()));
                reader.must_wake()
            });
            let waits = writer.prepare_to_wait().expect("honest");
            let woken = reading.join().expect("no panic");
            assert!(!waits || woken, "the writer would wait forever");
            assert_eq!(write(&mut writer, &word(3), &[]), Ok(WORD_BYTES));
        });
    }

    /// A reader publishes all room before it sleeps, although it took less than half a pipe since the last
    /// time.
    #[test]
    fn reader_publishes_its_tail_before_blocking() {
        loom::model(|| {
            let (mut writer, mut reader) = pair::<4>();
            assert_eq!(write(&mut writer, &word(1), &[]), Ok(WORD_BYTES));
            let reading = thread::spawn(move || {
                assert_eq!(read(&mut reader, [WORD_BYTES, 0]), Ok(word(1).to_vec()));
                let sleeps = reader.prepare_to_sleep().expect("honest");
                (sleeps, reader.must_wake())
            });
            let three = [word(2), word(3), word(4)].concat();
            assert_eq!(write(&mut writer, &three, &[]), Ok(3 * WORD_BYTES));
            let wakes = writer.must_wake();
            let waits = writer.prepare_to_wait().expect("honest");
            let (sleeps, woken) = reading.join().expect("no panic");
            assert!(!sleeps || wakes, "the reader would sleep forever");
            assert!(!waits || woken, "the writer would wait forever");
        });
    }
}

#[cfg(not(loom))]
mod one_order {
    use std::collections::VecDeque;
    use std::thread;

    use page::PAGE_LEN;
    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Debug)]
    enum Step {
        Write(usize, usize),
        Read(usize, usize),
        Sleep,
        Wait,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            (0..6_usize, 0..12_usize).prop_map(|(first, second)| Step::Write(first, second)),
            (0..6_usize, 0..12_usize).prop_map(|(first, second)| Step::Read(first, second)),
            Just(Step::Sleep),
            Just(Step::Wait),
        ]
    }

    proptest! {
        /// Compared with a queue of the standard library.
        #[test]
        fn pipe_is_a_bounded_queue_of_bytes(steps in prop::collection::vec(step(), 1..300)) {
            let (mut writer, mut reader) = pair::<8>();
            let mut queue = VecDeque::new();
            let mut next = 0_u8;
            let mut bytes = |words: usize| -> Vec<u8> {
                (0..words * WORD_BYTES).map(|_| { next = next.wrapping_add(1); next }).collect()
            };
            for step in steps {
                match step {
                    Step::Write(first, second) => {
                        let (first, second) = (bytes(first), bytes(second));
                        let count = write(&mut writer, &first, &second).unwrap();
                        let all = first.len() + second.len();
                        // The reader publishes room in halves.
                        let is_full = queue.len() + count > 4 * WORD_BYTES;
                        prop_assert!(count == all || is_full, "{} of {}", count, all);
                        queue.extend(first.into_iter().chain(second).take(count));
                        prop_assert!(queue.len() <= 8 * WORD_BYTES);
                    }
                    Step::Read(first, second) => {
                        let came = read(&mut reader, [first * WORD_BYTES, second * WORD_BYTES]).unwrap();
                        let count = queue.len().min((first + second) * WORD_BYTES);
                        let expected: Vec<u8> = queue.drain(..count).collect();
                        prop_assert_eq!(came, expected);
                    }
                    Step::Sleep => {
                        prop_assert_eq!(reader.prepare_to_sleep().unwrap(), queue.is_empty());
                        reader.unblocked();
                    }
                    Step::Wait => {
                        if writer.prepare_to_wait().unwrap() {
                            prop_assert!(queue.len() > 4 * WORD_BYTES);
                        }
                        writer.unblocked();
                    }
                }
            }
        }
    }

    #[test]
    fn hundred_thousand_pages_cross_two_threads() {
        const COUNT: u64 = 100_000;
        let (mut writer, mut reader) = pair::<2048>();
        let writing = thread::spawn(move || {
            for number in 0..COUNT {
                let frame = [number.to_le_bytes(), (!number).to_le_bytes()].concat();
                let page = number.to_le_bytes().repeat(PAGE_LEN / 8);
                let mut rest = [frame, page].concat();
                while !rest.is_empty() {
                    let count = write(&mut writer, &rest, &[]).unwrap();
                    rest.drain(..count);
                    if count == 0 {
                        thread::yield_now();
                    }
                }
            }
        });
        for number in 0..COUNT {
            let mut came = Vec::new();
            while came.len() < 16 + PAGE_LEN {
                let left = 16 + PAGE_LEN - came.len();
                let first = left.min(16);
                let more = read(&mut reader, [first, left - first]).unwrap();
                if more.is_empty() {
                    thread::yield_now();
                }
                came.extend(more);
            }
            assert_eq!(came[..8], number.to_le_bytes());
            assert_eq!(came[8..16], (!number).to_le_bytes());
            let is_whole = came[16..].chunks(8).all(|word| word == number.to_le_bytes());
            assert!(is_whole, "page {number}");
        }
        writing.join().unwrap();
        assert_eq!(read(&mut reader, [8, 8]), Ok(Vec::new()));
    }

    #[test]
    fn invalid_writer_position_is_an_error() {
        for claim in [9, u64::MAX, 1 << 63] {
            let (writer, mut reader) = pair::<8>();
            writer.pipe().head.publish(claim);
            assert_eq!(read(&mut reader, [64, 64]), Err(Corrupt), "claims {claim}");
            assert_eq!(reader.prepare_to_sleep(), Err(Corrupt));
        }
        let (mut writer, mut reader) = pair::<8>();
        assert_eq!(write(&mut writer, &[1; 16], &[2; 8]), Ok(24));
        assert_eq!(read(&mut reader, [16, 8]).unwrap().len(), 24);
        writer.pipe().head.publish(2);
        assert_eq!(read(&mut reader, [64, 0]), Err(Corrupt));
    }

    #[test]
    fn invalid_reader_position_is_an_error() {
        for claim in [9, u64::MAX] {
            let (mut writer, reader) = pair::<8>();
            assert_eq!(write(&mut writer, &[1; 64], &[]), Ok(64));
            reader.pipe().tail.publish(claim);
            assert_eq!(write(&mut writer, &[1; 8], &[]), Err(Corrupt), "claims {claim}");
            assert_eq!(writer.prepare_to_wait(), Err(Corrupt));
        }
        let (mut writer, reader) = pair::<8>();
        assert_eq!(write(&mut writer, &[1; 64], &[]), Ok(64));
        reader.pipe().tail.publish(4);
        assert_eq!(write(&mut writer, &[1; 64], &[]), Ok(32));
        reader.pipe().tail.publish(3);
        assert_eq!(write(&mut writer, &[1; 64], &[]), Err(Corrupt));
    }

    #[test]
    #[should_panic(expected = "no words")]
    fn partial_words_are_refused() {
        let (mut writer, _reader) = pair::<8>();
        let _ = write(&mut writer, &[1; 12], &[]);
    }
}
