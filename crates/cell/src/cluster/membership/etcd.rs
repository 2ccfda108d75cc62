//! The requests of the membership to etcd, by its HTTP interface (`/v3`, JSON).

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use data_encoding::BASE64;
use serde_json::{Value, json};
use ureq::tls::{Certificate, ClientCert, PrivateKey, RootCerts, TlsConfig};
use urpc::tls::KeyFiles;

/// Time limit for an answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);

/// A client of an etcd.
#[derive(Debug)]
pub struct Etcd {
    urls: Vec<String>,
    agent: ureq::Agent,
}

/// A lease of etcd, which ends unless it is kept.
#[derive(Clone, Debug)]
pub struct Lease(String);

/// A key and its new value.
#[derive(Debug)]
pub struct Put<'a> {
    /// Key, as etcd stores it.
    pub key: &'a str,
    /// Value that replaces any former one.
    pub value: &'a str,
    /// The lease with which the key ends.
    pub lease: Option<&'a Lease>,
}

impl Etcd {
    /// A client of the etcd whose members answer at these URLs. Where they have TLS, both sides prove
    /// themselves by these keys and their authority.
    ///
    /// # Errors
    /// If the keys can't be read.
    pub fn new(urls: &[String], keys: &KeyFiles) -> io::Result<Self> {
        let config = ureq::Agent::config_builder().timeout_global(Some(ANSWER_TIMEOUT));
        let config = match urls.iter().any(|url| url.starts_with("https:")) {
            true => config.tls_config(tls(keys)?),
            false => config,
        };
        Ok(Self {
            urls: urls.to_vec(),
            agent: config.build().into(),
        })
    }

    /// Requests a lease that lasts for this long after each [`Etcd::keep`].
    pub fn lease(&self, seconds: u64) -> io::Result<Lease> {
        let answer = self.ask("lease/grant", &json!({ "TTL": seconds.to_string() }))?;
        let id = answer["ID"].as_str().ok_or_else(strange)?;
        Ok(Lease(id.to_owned()))
    }

    /// Keeps a lease; false if it has ended.
    pub fn keep(&self, lease: &Lease) -> io::Result<bool> {
        let answer = self.ask("lease/keepalive", &json!({ "ID": lease.0 }))?;
        // An error of its server comes as an answer, too.
        if answer["result"].is_null() {
            return Err(strange());
        }
        Ok(number(&answer["result"]["TTL"]) > 0)
    }

    /// All keys that begin with `prefix`, without it, and their values; and the number of changes so far.
    pub fn list(&self, prefix: &str) -> io::Result<(BTreeMap<String, String>, u64)> {
        let (begin, end) = range(prefix)?;
        let answer = self.ask("kv/range", &json!({ "key": begin, "range_end": end }))?;
        listed(&answer, prefix)
    }

    /// A key's value.
    pub fn get(&self, key: &str) -> io::Result<Option<String>> {
        let answer = self.ask("kv/range", &json!({ "key": BASE64.encode(key.as_bytes()) }))?;
        let entry = &answer["kvs"][0]["value"];
        if entry.is_null() {
            return Ok(None);
        }
        text(entry).map(Some)
    }

    /// Writes `puts` if `key` still has this value, or still has none; returns whether it did.
    pub fn put_if(&self, key: &str, value: Option<&str>, puts: &[Put<'_>]) -> io::Result<bool> {
        let compare = match value {
            Some(value) => has(key, value),
            None => is_absent(key),
        };
        self.commit(&json!([compare]), &written(puts))
    }

    /// Writes `puts` if no key that begins with `prefix` has been written since this number of changes;
    /// returns whether it did.
    pub fn put_if_unchanged(&self, prefix: &str, revision: u64, puts: &[Put<'_>]) -> io::Result<bool> {
        let (begin, end) = range(prefix)?;
        let compare = json!([{
            "key": begin, "range_end": end, "target": "MOD", "result": "LESS",
            "mod_revision": (revision + 1).to_string()
        }]);
        self.commit(&compare, &written(puts))
    }

    /// Removes `key` and writes `mark` if `key` and `other` still have these values; returns whether it did.
    pub fn remove_if(
        &self,
        (key, value): (&str, &str),
        other: (&str, &str),
        mark: &Put<'_>,
    ) -> io::Result<bool> {
        let mut success = written(std::slice::from_ref(mark));
        success.push(json!({ "requestDeleteRange": { "key": BASE64.encode(key.as_bytes()) } }));
        self.commit(&json!([has(key, value), has(other.0, other.1)]), &success)
    }

    /// Writes `mark` if there is no `key` and the others have these values; returns whether it did.
    pub fn mark_if_absent(&self, key: &str, others: &[(&str, &str)], mark: &Put<'_>) -> io::Result<bool> {
        let others = others.iter().map(|(key, value)| has(key, value));
        let compare: Vec<Value> = std::iter::once(is_absent(key)).chain(others).collect();
        self.commit(&compare.into(), &written(std::slice::from_ref(mark)))
    }

    /// Removes `key` and writes `puts`, whatever was there.
    pub fn replace(&self, key: &str, puts: &[Put<'_>]) -> io::Result<()> {
        let mut success = written(puts);
        success.push(json!({ "requestDeleteRange": { "key": BASE64.encode(key.as_bytes()) } }));
        self.commit(&json!([]), &success).map(drop)
    }

    fn commit(&self, compare: &Value, success: &[Value]) -> io::Result<bool> {
        let answer = self.ask("kv/txn", &json!({ "compare": compare, "success": success }))?;
        Ok(answer["succeeded"] == true)
    }

    /// Sends a request to the members in turn until one answers.
    pub(super) fn ask(&self, what: &str, body: &Value) -> io::Result<Value> {
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

/// TLS settings by which etcd and this side prove themselves.
fn tls(keys: &KeyFiles) -> io::Result<TlsConfig> {
    let read = |path: &Path| {
        std::fs::read(path)
            .map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", path.display())))
    };
    let certificate = |path: &Path| {
        Certificate::from_pem(&read(path)?)
            .map_err(|error| io::Error::other(format!("{}: {error}", path.display())))
    };
    let key = PrivateKey::from_pem(&read(&keys.key)?)
        .map_err(|error| io::Error::other(format!("{}: {error}", keys.key.display())))?;
    let own = ClientCert::new_with_certs(&[certificate(&keys.certificate)?], key);
    Ok(TlsConfig::builder()
        .root_certs(RootCerts::Specific(Arc::new(vec![certificate(&keys.authority)?])))
        .client_cert(Some(own))
        .unversioned_rustls_crypto_provider(urpc::tls::provider())
        .build())
}

/// The keys that begin with `prefix`.
fn range(prefix: &str) -> io::Result<(String, String)> {
    let mut end = prefix.as_bytes().to_vec();
    *end.last_mut().ok_or_else(strange)? += 1;
    Ok((BASE64.encode(prefix.as_bytes()), BASE64.encode(&end)))
}

fn written(puts: &[Put<'_>]) -> Vec<Value> {
    let write = |put: &Put<'_>| {
        let mut written =
            json!({ "key": BASE64.encode(put.key.as_bytes()), "value": BASE64.encode(put.value.as_bytes()) });
        if let Some(lease) = put.lease {
            written["lease"] = lease.0.clone().into();
        }
        json!({ "requestPut": written })
    };
    puts.iter().map(write).collect()
}

/// The condition that there is no such key.
fn is_absent(key: &str) -> Value {
    json!({ "key": BASE64.encode(key.as_bytes()), "target": "VERSION", "result": "EQUAL", "version": "0" })
}

/// The condition that a key has a value.
fn has(key: &str, value: &str) -> Value {
    let (key, value) = (BASE64.encode(key.as_bytes()), BASE64.encode(value.as_bytes()));
    json!({ "key": key, "target": "VALUE", "result": "EQUAL", "value": value })
}

/// The keys of an answer, without their prefix, with their values; and the number of changes so far.
pub(super) fn listed(answer: &Value, prefix: &str) -> io::Result<(BTreeMap<String, String>, u64)> {
    let entries = answer["kvs"].as_array().into_iter().flatten();
    let entries = entries.map(|entry| {
        let key = text(&entry["key"])?;
        let key = key.strip_prefix(prefix).ok_or_else(strange)?;
        Ok((key.to_owned(), text(&entry["value"])?))
    });
    Ok((
        entries.collect::<io::Result<_>>()?,
        number(&answer["header"]["revision"]),
    ))
}

/// Parses a 64-bit number, which is a string in etcd's JSON.
fn number(value: &Value) -> u64 {
    value.as_str().and_then(|text| text.parse().ok()).unwrap_or(0)
}

fn text(value: &Value) -> io::Result<String> {
    let bytes = BASE64
        .decode(value.as_str().unwrap_or_default().as_bytes())
        .map_err(io::Error::other)?;
    String::from_utf8(bytes).map_err(io::Error::other)
}

fn strange() -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidData,
        "etcd's answer does not fit the request",
    )
}
