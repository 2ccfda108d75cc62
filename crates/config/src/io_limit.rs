//! Limits of the I/O of a VM's disks per second.

use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::fault::{Fault, fault};
use crate::{Size, SizeError};

/// Minimum limit in bytes per second; less would delay a single request by seconds.
const BYTES_MIN: u64 = 64 << 10;
/// Minimum limit in requests per second.
const REQUESTS_MIN: u64 = 10;

/// Limits of I/O for each host device that holds disks of the VM; no limit where absent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct IoLimitSpec {
    /// Bytes read per second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub read_bytes: Option<Size>,
    /// Bytes written per second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub write_bytes: Option<Size>,
    /// Read requests per second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reads: Option<u64>,
    /// Write requests per second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub writes: Option<u64>,
}

impl IoLimitSpec {
    /// Checks the limits independently of other keys.
    pub(crate) fn check(&self) -> Result<(), Fault> {
        if *self == Self::default() {
            return Err(fault(
                &["io_limit"],
                "a limit of I/O that limits nothing",
                "add `read_bytes`, `write_bytes`, `reads` or `writes`, or leave it out",
            ));
        }
        for (key, size) in [("read_bytes", self.read_bytes), ("write_bytes", self.write_bytes)] {
            if size.is_some_and(|size| size.0 < BYTES_MIN) {
                return Err(fault(
                    &["io_limit", key],
                    "too little for a disk",
                    "write 64K or more, as 50M",
                ));
            }
        }
        for (key, requests) in [("reads", self.reads), ("writes", self.writes)] {
            if requests.is_some_and(|requests| requests < REQUESTS_MIN) {
                return Err(fault(
                    &["io_limit", key],
                    "too little for a disk",
                    "write 10 or more, as 500",
                ));
            }
        }
        Ok(())
    }
}

/// A text that is not the value of a flag for limits of I/O.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IoLimitError {
    /// The size of a limit in bytes.
    #[error(transparent)]
    Size(#[from] SizeError),
    /// A number of requests.
    #[error("{0:?} is no number of requests each second")]
    Requests(String),
    /// Another key, or none.
    #[error(
        "{0:?} is no limit of I/O: write read_bytes=SIZE, write_bytes=SIZE, reads=NUMBER or writes=NUMBER"
    )]
    Limit(String),
}

/// Parses the value of a flag: `read_bytes=100M,writes=500`.
impl FromStr for IoLimitSpec {
    type Err = IoLimitError;
    fn from_str(text: &str) -> Result<Self, IoLimitError> {
        let mut limit = Self::default();
        for part in text.split(',') {
            let number = |value: &str| {
                let parsed = value.parse::<u64>();
                parsed.map_err(|_| IoLimitError::Requests(value.to_owned()))
            };
            match part.split_once('=') {
                Some(("read_bytes", size)) => limit.read_bytes = Some(size.parse()?),
                Some(("write_bytes", size)) => limit.write_bytes = Some(size.parse()?),
                Some(("reads", requests)) => limit.reads = Some(number(requests)?),
                Some(("writes", requests)) => limit.writes = Some(number(requests)?),
                _ => return Err(IoLimitError::Limit(part.to_owned())),
            }
        }
        Ok(limit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checked(text: &str) -> Result<IoLimitSpec, Vec<String>> {
        let limit: IoLimitSpec = text.parse().unwrap();
        limit.check().map(|()| limit).map_err(|fault| fault.path)
    }

    #[test]
    fn a_flag_has_the_same_keys_as_the_file() {
        let limit = checked("read_bytes=100M,write_bytes=64K,reads=10,writes=500").unwrap();
        let file = "image = \"x\"\n[io_limit]\nread_bytes = \"100M\"\nwrite_bytes = \"64K\"\nreads = 10\n\
            writes = 500\n";
        assert_eq!(crate::parse("vm.toml", file).unwrap().io_limit, Some(limit));
        for (text, why) in [
            ("reads=many", "\"many\" is no number"),
            ("read_bytes=100", "has no unit"),
            ("reads", "\"reads\" is no limit"),
            ("bytes=1M", "\"bytes=1M\" is no limit"),
            ("", "\"\" is no limit"),
        ] {
            let error = text.parse::<IoLimitSpec>().unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
    }

    #[test]
    fn limits_of_nothing_and_limits_that_stop_a_disk_are_refused() {
        let nothing = IoLimitSpec::default().check().unwrap_err();
        assert_eq!(nothing.path, ["io_limit"]);
        for (text, key) in [
            ("read_bytes=63K", "read_bytes"),
            ("reads=500,write_bytes=0K", "write_bytes"),
            ("reads=9", "reads"),
            ("writes=0", "writes"),
        ] {
            assert_eq!(checked(text), Err(vec!["io_limit".to_owned(), key.to_owned()]));
        }
    }
}
