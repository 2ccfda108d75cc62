//! How often a test repeats what it does: once in a while at each landing, as often as was promised in a campaign.

/// A landing repeats one of so many times.
const LANDING_PART: usize = 5;
/// Set by `make campaign`.
const CAMPAIGN: &str = "MIRRORBALL_CAMPAIGN";

/// Whether this run is a campaign.
pub fn in_campaign() -> bool {
    std::env::var_os(CAMPAIGN).is_some()
}

/// `full` in a campaign, a part of it, but at least one, in a landing's run.
pub fn repetitions(full: usize) -> usize {
    if in_campaign() {
        full
    } else {
        full.div_ceil(LANDING_PART)
    }
}

/// The same for seconds.
pub fn seconds(full: u64) -> u64 {
    if in_campaign() {
        full
    } else {
        full.div_ceil(LANDING_PART as u64)
    }
}
