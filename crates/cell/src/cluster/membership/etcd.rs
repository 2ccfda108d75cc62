//! What membership needs of etcd, by its HTTP interface (`/v3`, JSON).

use std::collections::BTreeMap;
use std::io;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

/// How long an answer may take.
const PATIENCE: Duration = Duration::from_secs(1);

/// An etcd.
#[derive(Debug)]
pub struct Etcd {
    urls: Vec<String>,
    agent: ureq::Agent,
}

/// Something that ends unless it is kept.
#[derive(Clone, Debug)]
pub struct Lease(String);

/// A key and its new value.
#[derive(Debug)]
pub struct Put<'a> {
    /// The key.
    pub key: &'a str,
    /// Its value.
    pub value: &'a str,
    /// Ends with it.
    pub lease: Option<&'a Lease>,
}

impl Etcd {
    /// One whose members answer at these URLs.
    pub fn new(urls: &[String]) -> Self {
        let config = ureq::Agent::config_builder().timeout_global(Some(PATIENCE));
        Self {
            urls: urls.to_vec(),
            agent: config.build().into(),
        }
    }

    /// A lease that lasts for this long after each [`Etcd::keep`].
    pub fn lease(&self, seconds: u64) -> io::Result<Lease> {
        let answer = self.ask("lease/grant", &json!({ "TTL": seconds.to_string() }))?;
        let id = answer["ID"].as_str().ok_or_else(strange)?;
        Ok(Lease(id.to_owned()))
    }

    /// Keeps a lease; false if it has ended.
    pub fn keep(&self, lease: &Lease) -> io::Result<bool> {
        let answer = self.ask("lease/keepalive", &json!({ "ID": lease.0 }))?;
        Ok(number(&answer["result"]["TTL"]) > 0)
    }

    /// All keys that begin with `prefix`, without it, and their values.
    pub fn list(&self, prefix: &str) -> io::Result<BTreeMap<String, String>> {
        let mut end = prefix.as_bytes().to_vec();
        *end.last_mut().ok_or_else(strange)? += 1;
        let asked = json!({ "key": STANDARD.encode(prefix), "range_end": STANDARD.encode(end) });
        let answer = self.ask("kv/range", &asked)?;
        let entries = answer["kvs"].as_array().into_iter().flatten();
        entries
            .map(|entry| {
                let key = text(&entry["key"])?;
                let key = key.strip_prefix(prefix).ok_or_else(strange)?;
                Ok((key.to_owned(), text(&entry["value"])?))
            })
            .collect()
    }

    /// A key's value.
    pub fn get(&self, key: &str) -> io::Result<Option<String>> {
        let answer = self.ask("kv/range", &json!({ "key": STANDARD.encode(key) }))?;
        let entry = &answer["kvs"][0]["value"];
        if entry.is_null() {
            return Ok(None);
        }
        text(entry).map(Some)
    }

    /// Writes `puts` if `key` still has this value, or still has none; whether it had.
    pub fn put_if(&self, key: &str, value: Option<&str>, puts: &[Put<'_>]) -> io::Result<bool> {
        let puts = puts.iter().map(|put| {
            let mut written = json!({ "key": STANDARD.encode(put.key), "value": STANDARD.encode(put.value) });
            if let Some(lease) = put.lease {
                written["lease"] = lease.0.clone().into();
            }
            json!({ "requestPut": written })
        });
        let compare = match value {
            Some(value) => has(key, value),
            None => {
                json!({ "key": STANDARD.encode(key), "target": "VERSION", "result": "EQUAL", "version": "0" })
            }
        };
        self.commit(&json!([compare]), &puts.collect())
    }

    /// Removes `key` if it and `other` still have these values; whether they had.
    pub fn remove_if(&self, (key, value): (&str, &str), other: (&str, &str)) -> io::Result<bool> {
        let remove = json!([{ "requestDeleteRange": { "key": STANDARD.encode(key) } }]);
        self.commit(&json!([has(key, value), has(other.0, other.1)]), &remove)
    }

    fn commit(&self, compare: &Value, success: &Value) -> io::Result<bool> {
        let answer = self.ask("kv/txn", &json!({ "compare": compare, "success": success }))?;
        Ok(answer["succeeded"] == true)
    }

    /// Asks the members in turn until one answers.
    fn ask(&self, what: &str, body: &Value) -> io::Result<Value> {
        let mut last = io::Error::from(io::ErrorKind::NotConnected);
        for url in &self.urls {
            let answer = self.agent.post(format!("{url}/v3/{what}")).send_json(body);
            match answer.and_then(|mut answer| answer.body_mut().read_json::<Value>()) {
                Ok(answer) => return Ok(answer),
                Err(error) => last = io::Error::other(format!("etcd at {url}: {error}")),
            }
        }
        Err(last)
    }
}

/// That a key has a value.
fn has(key: &str, value: &str) -> Value {
    json!({
        "key": STANDARD.encode(key), "target": "VALUE", "result": "EQUAL", "value": STANDARD.encode(value)
    })
}

/// 64-bit numbers are strings in its JSON.
fn number(value: &Value) -> u64 {
    value.as_str().and_then(|text| text.parse().ok()).unwrap_or(0)
}

fn text(value: &Value) -> io::Result<String> {
    let bytes = STANDARD
        .decode(value.as_str().unwrap_or_default())
        .map_err(io::Error::other)?;
    String::from_utf8(bytes).map_err(io::Error::other)
}

fn strange() -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidData,
        "etcd answered something else than it was asked",
    )
}
