//! The versions of the protocols that this program speaks with programs which are replaced at other times.

use registry::cluster::interface::Protocols;

/// The protocols that this program speaks.
pub fn protocols() -> Protocols {
    Protocols {
        release: env!("CARGO_PKG_VERSION").to_owned(),
        cells: super::link::VERSIONS,
        records: crate::left::VERSIONS,
        shards: shard_api::version::VERSIONS,
    }
}
