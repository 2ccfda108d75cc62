//! One object, a few cells, a network that loses, doubles and reorders, moves and a death: every order of a small world
//! (`every_order`), and long stories in larger ones ([`super::stories`]).

mod every_order;

const STORIES: u64 = 30_000;

#[test]
fn in_the_end_every_message_is_taken_or_its_object_gone() {
    let (mut kept, mut lost) = (0, 0);
    for seed in 0..STORIES {
        match super::stories::tell(seed).unwrap_or_else(|what| panic!("{what}")) {
            super::stories::Outcome::Kept => kept += 1,
            super::stories::Outcome::Lost => lost += 1,
        }
    }
    assert!(
        kept > STORIES / 4 && lost > STORIES / 20,
        "{kept} kept, {lost} lost"
    );
}
