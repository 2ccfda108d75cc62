//! Risk: a device serves only the shard that it is in; an error, or a guest's action, reaches another VM.

mod devices;
mod errors;
mod hostile;

use std::time::Duration;

const SOON: Duration = Duration::from_secs(20);
