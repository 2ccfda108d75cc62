//! Risk: a device serves only the shard that it is in; an error, or what one guest does, is another's.

mod devices;
mod errors;
mod hostile;

use std::time::Duration;

const SOON: Duration = Duration::from_secs(20);
