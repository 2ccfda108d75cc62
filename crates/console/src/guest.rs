//! Operations inside a guest that may block: its console, programs, files, and its end.
//!
//! A request applies to the VM that had the name when the rights were checked. A later VM of the same name
//! has another number (`Record::cid`), and the request does not reach it.

mod exec;
mod files;
mod logs;
mod wait;

use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use axum::http::{StatusCode, Uri};
use operations::guest::{AgentWait, connect_booting};
use operations::{Failure, Kind};
use registry::vms::{self, Record};
use serde::de::DeserializeOwned;

pub(crate) use exec::{__path_exec, exec};
pub(crate) use files::{__path_get_file, __path_put_file, get_file, put_file};
pub(crate) use logs::{__path_logs, logs};
pub(crate) use wait::{__path_wait, wait};

use crate::api::{Context, Result, folder};
use crate::caller::Caller;
use crate::problem::Problem;

/// Maximum time limit of a request, in seconds.
const LIMIT_MAX_S: u64 = 3600;

/// The running VM that a request names.
#[derive(Clone, Debug)]
struct Target {
    name: String,
    folder: PathBuf,
    record: Record,
}

impl Target {
    /// Finds a VM.
    fn find(name: &str) -> Result<Self> {
        let folder = folder(name)?;
        let record = vms::read(&folder).map_err(Problem::internal)?;
        Ok(Self {
            name: name.to_owned(),
            folder,
            record,
        })
    }

    /// Finds a VM whose guest the caller may use.
    fn of_caller(name: &str, caller: Caller, context: &Context) -> Result<Self> {
        let target = Self::find(name)?;
        caller.may_use_guest(&context.rights, &target.record)?;
        Ok(target)
    }

    /// Whether the VM still has this name.
    fn is_there(&self) -> bool {
        vms::read(&self.folder).is_ok_and(|now| now.cid == self.record.cid)
    }

    fn gone(&self) -> Problem {
        Problem::new(StatusCode::CONFLICT, format!("{}: the VM has ended", self.name))
    }

    /// Connects to the VM's agent while `goes_on` returns true.
    fn agent(&self, goes_on: &dyn Fn() -> bool) -> Result<UnixStream> {
        let waiting = AgentWait {
            limit: None,
            on_booting: &|_| {},
            goes_on: &|| goes_on() && self.is_there(),
        };
        let agent = connect_booting(&self.name, &self.folder, &waiting);
        // Another VM may have taken the name since the rights were checked.
        if !self.is_there() {
            return Err(self.gone());
        }
        agent.map_err(Problem::from)
    }
}

/// Returns the deadline of a request that may take `limit_s` seconds.
fn deadline(limit_s: u64) -> Result<Instant> {
    if limit_s > LIMIT_MAX_S {
        return Err(Problem::bad_request(format!(
            "limit_s is {limit_s}: {LIMIT_MAX_S} at most"
        )));
    }
    Ok(Instant::now() + Duration::from_secs(limit_s))
}

/// Parses the parameters after the `?`, each of which may occur once.
pub(crate) fn query<T: DeserializeOwned>(uri: &Uri) -> Result<T> {
    let mut words = serde_json::Map::new();
    for (key, value) in form_urlencoded::parse(uri.query().unwrap_or_default().as_bytes()) {
        if words.insert(key.to_string(), value.into()).is_some() {
            return Err(Problem::bad_request(format!(
                "{key:?} is there twice; write it once"
            )));
        }
    }
    serde_json::from_value(words.into()).map_err(|error| Problem::bad_request(format!("the query: {error}")))
}

impl From<Failure> for Problem {
    fn from(failure: Failure) -> Self {
        let status = match failure.kind {
            Kind::Unknown => StatusCode::NOT_FOUND,
            Kind::Refused => StatusCode::CONFLICT,
            Kind::Late => StatusCode::GATEWAY_TIMEOUT,
            Kind::Host => StatusCode::INTERNAL_SERVER_ERROR,
        };
        Self::new(status, failure.line())
    }
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Words {
        path: String,
    }

    #[test]
    fn words_of_a_query_are_decoded_and_unknown_or_double_ones_refused() {
        let words = |text: &str| query::<Words>(&text.parse().unwrap());
        assert_eq!(words("/x?path=%2Fa%20b+c").unwrap().path, "/a b c");
        for (text, why) in [
            ("/x", "missing field `path`"),
            ("/x?path=a&path=b", "twice"),
            ("/x?path=a&other=b", "unknown field `other`"),
        ] {
            let problem = words(text).unwrap_err();
            assert!(
                problem.detail.contains(why) && problem.status == 400,
                "{problem:?}"
            );
        }
    }
}
