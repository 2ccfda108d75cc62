//! Every order of what a few cells do, by model checking, and long stories by chance.

mod every_order;

#[test]
fn stories_end_well() {
    let (mut won, mut lost) = (0, 0);
    for seed in 0..30_000 {
        let outcome = super::stories::tell(seed).unwrap_or_else(|what| panic!("{what}"));
        won += u64::from(outcome.won);
        lost += u64::from(outcome.lost);
    }
    // Stories in which nothing happens prove nothing.
    assert!(won > 100_000 && lost > 100_000, "{won} won, {lost} lost");
}
