//! Long stories by seed: hundreds of items both ways, a third of all packets lost, doubled or late.

use protocol::chance::Chance;

use crate::link::{Header, Link};

const STORIES: u64 = 2000;
const ITEMS: u32 = 200;
const TIMEOUT_NS: u64 = 300;

/// Until all is known to be taken; how many steps that took at most is asserted.
fn tell(seed: u64) -> Result<(), String> {
    let mut chance = Chance::new(seed);
    let mut ends = [Link::new(TIMEOUT_NS, 0), Link::new(TIMEOUT_NS, 0)];
    let mut sent = [0; 2];
    let mut taken = [vec![false; 200], vec![false; 200]];
    // When, to whom, what.
    let mut way: Vec<(u64, usize, Header, Option<u32>)> = Vec::new();
    for now_ns in (0..).step_by(10) {
        if now_ns > 1_000_000 {
            return Err("it does not come to an end".into());
        }
        let mut out = Vec::new();
        for end in [0, 1] {
            let link = &mut ends[end];
            if sent[end] < ITEMS && chance.below(2) == 0 {
                let has_room = link.has_room();
                match link.send(sent[end], now_ns) {
                    Ok(header) if has_room => {
                        out.push((1 - end, header, Some(sent[end])));
                        sent[end] += 1;
                    }
                    Err(item) if !has_room && item == sent[end] => {}
                    _ => return Err("room was not what it was said to be".into()),
                }
            }
            if chance.below(4) == 0 {
                link.tick(now_ns, |header, item| out.push((1 - end, header, item.copied())));
            }
        }
        for (to, header, item) in out {
            let copies = [0, 1, 1, 1, 1, 2][chance.below(6)];
            for _ in 0..copies {
                let delay_ns = u64::try_from(chance.below(400)).expect("small");
                way.push((now_ns + delay_ns, to, header, item));
            }
        }
        let due = way.extract_if(.., |(at_ns, ..)| *at_ns <= now_ns);
        for (_, to, header, item) in due {
            let is_new = ends[to]
                .receive(header, now_ns)
                .map_err(|error| error.to_string())?;
            if is_new {
                let item = usize::try_from(item.ok_or("an item that is none")?).expect("small");
                if std::mem::replace(&mut taken[to][item], true) {
                    return Err(format!("item {item} was taken twice"));
                }
            }
        }
        let is_over = sent == [ITEMS; 2] && ends.iter().all(|link| link.due_ns().is_none());
        if is_over {
            let are_all = taken.iter().flatten().all(|is_taken| *is_taken);
            return if are_all {
                Ok(())
            } else {
                Err("acknowledged, and not taken".into())
            };
        }
    }
    unreachable!("time goes on")
}

#[test]
fn items_over_a_bad_way_come_once() {
    for seed in 0..STORIES {
        if let Err(wrong) = tell(seed) {
            panic!("seed {seed}: {wrong}");
        }
    }
}
