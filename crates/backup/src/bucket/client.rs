//! Requests to a bucket: signing, sending, repeating after failures that may pass, and the errors of the server.
//!
//! 1. A request is repeated only after a failure of the network or of the server, with growing delays, and a limited
//!    number of times. All requests may be repeated; a caller of a conditional request must expect that an earlier
//!    attempt has succeeded.
//! 2. Every attempt ends within [`Timing::request`].
//! 3. Redirects are not followed: credentials are used only for the server that the user named.
//! 4. An answer with content says its length, is that long, and not longer than the caller allows.

use super::address::{Base, BucketAddress, Credentials, variable};
use super::sign::{Signed, encoded, sign};
use backend::clock;
use error::{Error, ErrorKind, IoContext, Result};
use jiff::Timestamp;
use rustls::crypto::ring::default_provider;
use std::io::Read;
use std::sync::Arc;
use std::time::Duration;
use ureq::tls::{Certificate, PemItem, RootCerts, TlsConfig, parse_pem};
use ureq::{Agent, Body, Proxy, ProxyProtocol, http};

/// Longest answer that describes an error.
const PROBLEM_MAX: u64 = 64 << 10;
/// Most characters of a text of the server in a message.
const TEXT_MAX: usize = 300;
/// Longest time for a connection, and longest time in which a connection transfers nothing.
const CONNECT_MAX: Duration = Duration::from_secs(15);

/// Times of requests and of the lock.
#[derive(Clone, Copy, Debug)]
pub(super) struct Timing {
    /// How often a request is sent at most.
    pub attempts: u32,
    /// Delay before the second attempt; each further delay is twice as long.
    pub delay: Duration,
    /// Longest delay.
    pub delay_max: Duration,
    /// Longest time for one attempt.
    pub request: Duration,
    /// Longest time for a request that is sent once.
    pub brief: Duration,
    /// Longest time in which a connection transfers nothing.
    pub idle: Duration,
    /// How often the holder of the lock renews it.
    pub renew: Duration,
    /// How long the holder may change the repository after it has sent a renewal.
    pub valid: Duration,
    /// When a lock that is not renewed expires. It exceeds `valid` by more than `request`, so that a change that was
    /// sent while the lock was valid has ended before the lock expires.
    pub expires: Duration,
}

impl Timing {
    /// The times of the product. A pack of 48 MiB is sent within `request` at 1.4 Mbit/s.
    pub const USUAL: Self = Self {
        attempts: 6,
        delay: Duration::from_millis(250),
        delay_max: Duration::from_secs(8),
        request: Duration::from_secs(300),
        brief: Duration::from_secs(10),
        idle: Duration::from_secs(60),
        renew: Duration::from_secs(60),
        valid: Duration::from_secs(240),
        expires: Duration::from_secs(600),
    };
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Method {
    Get,
    Head,
    Put,
    Delete,
}

impl Method {
    fn name(self) -> &'static str {
        match self {
            Self::Get => "GET",
            Self::Head => "HEAD",
            Self::Put => "PUT",
            Self::Delete => "DELETE",
        }
    }
}

/// A request.
pub(super) struct Asked<'a> {
    pub method: Method,
    /// The object; `None` for the bucket itself.
    pub key: Option<&'a str>,
    /// Parameters, in ascending order.
    pub query: &'a [(&'a str, &'a str)],
    /// Headers, with names in lower case.
    pub headers: Vec<(&'static str, String)>,
    pub body: &'a [u8],
    /// Most bytes of a successful answer.
    pub answer_max: u64,
    /// Whether the request is sent once, and for a short time.
    pub brief: bool,
}

impl<'a> Asked<'a> {
    pub fn new(method: Method, key: &'a str) -> Self {
        let (headers, answer_max) = (Vec::new(), PROBLEM_MAX);
        Self { method, key: Some(key), query: &[], headers, body: &[], answer_max, brief: false }
    }
}

/// The answer of the server to a request that is not repeated: success, or a refusal.
#[derive(Debug)]
pub(super) struct Answer {
    pub status: u16,
    headers: http::HeaderMap,
    pub body: Vec<u8>,
}

impl Answer {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }

    pub fn succeeded(&self) -> bool {
        (200..300).contains(&self.status)
    }

    fn problem(&self) -> Problem {
        let parsed = ovf::xml::parse(&self.body, "the answer").ok().filter(|root| root.name == "Error");
        let text = |name: &str| parsed.as_ref().and_then(|root| root.text_of(name)).map(shown).unwrap_or_default();
        let region = self.header("x-amz-bucket-region").map(shown).unwrap_or_else(|| text("Region"));
        Problem { code: text("Code"), message: text("Message"), region }
    }

    /// The code of an error of the server; empty if it has sent none.
    pub fn code(&self) -> String {
        self.problem().code
    }
}

/// The description of an error by the server.
struct Problem {
    code: String,
    message: String,
    region: String,
}

/// A text of the server for a message.
fn shown(text: &str) -> String {
    text.chars().take(TEXT_MAX).collect::<String>().escape_debug().to_string()
}

/// Why an attempt has no answer.
enum Failure {
    /// The same request may succeed later.
    Passing(String),
    /// The same request fails again.
    Lasting(String),
}

impl From<ureq::Error> for Failure {
    fn from(error: ureq::Error) -> Self {
        match error {
            ureq::Error::Io(error) => error.into(),
            ureq::Error::Timeout(_) => Self::Passing("it did not answer in time".into()),
            ureq::Error::HostNotFound => Self::Passing("its name cannot be resolved".into()),
            ureq::Error::ConnectionFailed => Self::Passing("no connection".into()),
            ureq::Error::Protocol(error) => Self::Passing(shown(&error.to_string())),
            error => Self::Lasting(shown(&error.to_string())),
        }
    }
}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Self {
        // An error of TLS, as of a certificate that is not trusted, is wrapped in an error of the connection.
        match error.get_ref().is_some_and(|inner| inner.is::<rustls::Error>()) {
            true => Self::Lasting(shown(&error.to_string())),
            false => Self::Passing(shown(&error.to_string())),
        }
    }
}

/// A bucket of a server.
pub(super) struct Client {
    agent: Agent,
    base: Base,
    region: String,
    credentials: Option<Credentials>,
    pub timing: Timing,
    /// The repository, for messages.
    pub place: String,
}

/// The certificates of authorities: of the file that `AWS_CA_BUNDLE` names, or those of the system.
fn authorities() -> Result<Vec<Certificate<'static>>> {
    let invalid = |text: String| Error::new(ErrorKind::Invalid, text);
    let Some(path) = std::env::var_os("AWS_CA_BUNDLE").filter(|path| !path.is_empty()) else {
        let found = rustls_native_certs::load_native_certs();
        if found.certs.is_empty() {
            let text = "this system has no certificates of authorities: install ca-certificates, or set AWS_CA_BUNDLE";
            return Err(invalid(text.into()));
        }
        return Ok(found.certs.iter().map(|one| Certificate::from_der(one.as_ref()).to_owned()).collect());
    };
    let path = std::path::Path::new(&path);
    let bytes = std::fs::read(path).during(|| format!("reading '{}' of AWS_CA_BUNDLE", path.display()))?;
    let items: Vec<_> = parse_pem(&bytes)
        .filter_map(|item| match item {
            Ok(PemItem::Certificate(one)) => Some(one),
            _ => None,
        })
        .collect();
    if items.is_empty() {
        return Err(invalid(format!("'{}' of AWS_CA_BUNDLE has no certificates", path.display())));
    }
    Ok(items)
}

/// The proxy for a server: the first one of the environment that can be used. `Invalid` if there are only others,
/// because requests would bypass them.
fn proxy(base: &Base, variable: &dyn Fn(&str) -> Option<String>) -> Result<Option<Proxy>> {
    let either = |name: &str| variable(name).or_else(|| variable(&name.to_lowercase()));
    let excepted = either("NO_PROXY").unwrap_or_default();
    let exceptions = excepted.split(',').map(str::trim).filter(|host| !host.is_empty());
    let exceptions = exceptions.fold(Proxy::builder(ProxyProtocol::Http), |all, host| all.no_proxy(host)).build();
    let origin = base.origin().parse::<http::Uri>();
    if exceptions.is_ok_and(|exceptions| origin.is_ok_and(|origin| exceptions.is_no_proxy(&origin))) {
        return Ok(None);
    }
    let mut unusable = None;
    for name in ["ALL_PROXY", "HTTPS_PROXY", "HTTP_PROXY"] {
        let Some(url) = either(name) else { continue };
        match Proxy::new(&url) {
            Ok(proxy) if matches!(proxy.protocol(), ProxyProtocol::Http | ProxyProtocol::Https) => {
                return Ok(Some(proxy));
            }
            _ => unusable = unusable.or(Some(name)),
        }
    }
    // The value may have a password.
    let text = |name: &str| {
        format!(
            "the proxy of {name} cannot be used for a bucket: set HTTPS_PROXY to the URL of a proxy that begins with \
             http:// or https://, or name the bucket's host in NO_PROXY"
        )
    };
    unusable.map_or(Ok(None), |name| Err(Error::new(ErrorKind::Invalid, text(name))))
}

impl Client {
    pub fn new(address: &BucketAddress, credentials: Option<Credentials>, timing: Timing) -> Result<Self> {
        let base = address.base()?;
        let mut config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .user_agent(concat!("lamina/", env!("CARGO_PKG_VERSION")))
            .timeout_connect(Some(timing.request.min(CONNECT_MAX)))
            .timeout_per_read(Some(timing.idle))
            .timeout_per_write(Some(timing.idle));
        let proxy = if base.is_on_this_host() { None } else { proxy(&base, &variable)? };
        // There may be a proxy for servers without TLS that has TLS itself.
        if base.secure || proxy.as_ref().is_some_and(|proxy| proxy.protocol() == ProxyProtocol::Https) {
            let tls = TlsConfig::builder()
                .unversioned_rustls_crypto_provider(Arc::new(default_provider()))
                .root_certs(RootCerts::from(authorities()?));
            config = config.tls_config(tls.build());
        }
        let agent = config.proxy(proxy).build().new_agent();
        Ok(Self { agent, base, region: address.region.clone(), credentials, timing, place: address.to_string() })
    }

    /// Sends a request until the server succeeds or refuses it. `doing` is the operation, for messages.
    pub fn send(&self, asked: &Asked<'_>, doing: &str) -> Result<Answer> {
        self.send_while(asked, doing, &|| Ok(()))
    }

    /// As [`Client::send`]; every attempt begins only if `allowed` succeeds.
    pub fn send_while(&self, asked: &Asked<'_>, doing: &str, allowed: &dyn Fn() -> Result<()>) -> Result<Answer> {
        let attempts = if asked.brief { 1 } else { self.timing.attempts };
        let mut attempt = 1;
        loop {
            allowed()?;
            let why = match self.once(asked) {
                Ok(answer) if !passes(&answer) => return Ok(answer),
                Ok(answer) if attempt >= attempts => return Err(self.refusal(&answer, doing)),
                Ok(answer) => format!("HTTP status {} {}", answer.status, answer.code()),
                Err(Failure::Passing(why)) if attempt < attempts => why,
                Err(Failure::Passing(why)) => {
                    let origin = self.base.origin();
                    let text = format!("{doing} failed {attempt} times: the server {origin}: {why}");
                    return Err(Error::new(ErrorKind::Io, text));
                }
                Err(Failure::Lasting(why)) => {
                    let text = format!("{doing} failed: the server {}: {why}", self.base.origin());
                    return Err(Error::new(ErrorKind::Io, text));
                }
            };
            tracing::debug!(attempt, "{doing} is tried again: {why}");
            std::thread::sleep(self.delay(attempt));
            attempt += 1;
        }
    }

    /// The delay after an attempt. A random part of it keeps clients apart that failed at the same time.
    fn delay(&self, attempt: u32) -> Duration {
        let full = self.timing.delay.saturating_mul(1 << (attempt - 1).min(16)).min(self.timing.delay_max);
        let random = backend::random::bytes::<1>().map_or(0, |[byte]| byte);
        full.mul_f64(0.5 + f64::from(random) / 512.0)
    }

    fn once(&self, asked: &Asked<'_>) -> std::result::Result<Answer, Failure> {
        let mut path = self.base.path.clone();
        if let Some(key) = asked.key {
            path = format!("{path}/{}", encoded(key, "/"));
        }
        let pairs = asked.query.iter().map(|(name, value)| format!("{}={}", encoded(name, ""), encoded(value, "")));
        let query = pairs.collect::<Vec<_>>().join("&");
        let mut headers = asked.headers.clone();
        if let Some(credentials) = &self.credentials {
            let method = asked.method.name();
            let signed = Signed { method, host: &self.base.host, path: &path, query: &query, body: asked.body };
            let now = i64::try_from(clock::seconds()).ok().and_then(|now| Timestamp::from_second(now).ok());
            sign(&signed, &mut headers, credentials, &self.region, now.unwrap_or(Timestamp::UNIX_EPOCH));
        }
        let mut url = format!("{}{}", self.base.origin(), if path.is_empty() { "/" } else { &path });
        if !query.is_empty() {
            url = format!("{url}?{query}");
        }
        let limit = Some(if asked.brief { self.timing.brief } else { self.timing.request });
        let answer = match asked.method {
            Method::Put => {
                let begun = self.agent.put(url).config().timeout_global(limit).build();
                headers.iter().fold(begun, |request, (name, value)| request.header(*name, value)).send(asked.body)?
            }
            method => {
                let begun = match method {
                    Method::Head => self.agent.head(url),
                    Method::Delete => self.agent.delete(url),
                    _ => self.agent.get(url),
                };
                let begun = begun.config().timeout_global(limit).build();
                headers.iter().fold(begun, |request, (name, value)| request.header(*name, value)).call()?
            }
        };
        collect(asked.method, answer, asked.answer_max)
    }

    /// The error for an answer that is not a success.
    pub fn refusal(&self, answer: &Answer, doing: &str) -> Error {
        let Problem { code, message, region } = answer.problem();
        let mut said = if code.is_empty() { format!("HTTP status {}", answer.status) } else { code.clone() };
        if !message.is_empty() {
            said = format!("{said}: {message}");
        }
        let elsewhere = !region.is_empty() && region != self.region;
        let (kind, why) = match (answer.status, code.as_str()) {
            (_, "NoSuchBucket") => {
                (ErrorKind::NotFound, "there is no such bucket: create it, or correct its name".into())
            }
            (301 | 307 | 400, _) if elsewhere => {
                (ErrorKind::Invalid, format!("the bucket is in the region '{region}': set AWS_REGION={region}"))
            }
            (301 | 307, _) => {
                let text = "the bucket is at another server or in another region: set AWS_REGION, or --s3-endpoint";
                (ErrorKind::Invalid, text.into())
            }
            (404, _) => (ErrorKind::NotFound, "there is no such object".into()),
            (_, "RequestTimeTooSkewed") => (ErrorKind::Io, "the clock of this host is wrong".into()),
            (401 | 403, _) if self.credentials.is_none() => {
                let text = "access is denied, and there are no credentials: set AWS_ACCESS_KEY_ID and \
                            AWS_SECRET_ACCESS_KEY";
                (ErrorKind::Io, text.into())
            }
            (401 | 403, _) => {
                let text = "access is denied: check the credentials, and that they may list, read, write and delete \
                            objects there";
                (ErrorKind::Io, text.into())
            }
            (501, _) => (ErrorKind::Unsupported, "the server does not support it".into()),
            _ => (ErrorKind::Io, "the server refuses it".into()),
        };
        let origin = self.base.origin();
        Error::new(kind, format!("{doing} at {origin} failed: {why} ({said})"))
    }
}

/// Whether the same request may succeed later.
fn passes(answer: &Answer) -> bool {
    match answer.status {
        501 => false,
        408 | 429 | 500..=599 => true,
        400 => answer.code() == "RequestTimeout",
        409 => matches!(answer.code().as_str(), "ConditionalRequestConflict" | "OperationAborted"),
        _ => false,
    }
}

/// Reads an answer.
fn collect(method: Method, answer: http::Response<Body>, answer_max: u64) -> std::result::Result<Answer, Failure> {
    let (head, mut body) = answer.into_parts();
    let status = head.status.as_u16();
    let text = |name: &str| head.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let is_delimited = !text("content-length").is_empty() || text("transfer-encoding").contains("chunked");
    if method == Method::Get && (200..300).contains(&status) && !is_delimited {
        // The end of the connection would be taken for the end of the content.
        return Err(Failure::Passing("its answer has no length".into()));
    }
    let most = if (200..300).contains(&status) { answer_max } else { PROBLEM_MAX };
    let mut bytes = Vec::new();
    body.as_reader().take(most + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > most {
        match (200..300).contains(&status) {
            true => return Err(Failure::Lasting(format!("an answer has more than {most} bytes"))),
            false => bytes.truncate(most as usize),
        }
    }
    Ok(Answer { status, headers: head.headers, body: bytes })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn proxies_that_cannot_be_used_are_not_bypassed() {
        let address: BucketAddress = "s3://lab".parse().unwrap();
        let base = BucketAddress { endpoint: Some("https://minio.example:9000".into()), ..address }.base().unwrap();
        let proxy = |set: &[(&str, &str)]| {
            let set: Vec<(String, String)> =
                set.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
            let variable = |name: &str| set.iter().find(|(set, _)| set == name).map(|(_, value)| value.clone());
            proxy(&base, &variable).map(|proxy| proxy.map(|proxy| proxy.uri().to_string()))
        };
        let (socks, http) = ("socks5://user:hid@p.example", "http://p.example:3128/");
        assert_eq!(proxy(&[]).unwrap(), None);
        assert_eq!(proxy(&[("HTTP_PROXY", http)]).unwrap().as_deref(), Some(http));
        assert_eq!(proxy(&[("ALL_PROXY", socks), ("https_proxy", http)]).unwrap().as_deref(), Some(http));
        assert_eq!(proxy(&[("HTTP_PROXY", "http://q"), ("HTTPS_PROXY", http)]).unwrap().as_deref(), Some(http));
        for unusable in [socks, "ftp://p", ""] {
            let error = proxy(&[("all_proxy", unusable)]).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid);
            assert!(error.to_string().contains("ALL_PROXY") && !error.to_string().contains("hid"), "{error}");
        }
        for excepted in ["minio.example", "other, .example", "*"] {
            assert_eq!(proxy(&[("ALL_PROXY", socks), ("NO_PROXY", excepted)]).unwrap(), None, "{excepted}");
            assert_eq!(proxy(&[("ALL_PROXY", http), ("no_proxy", excepted)]).unwrap(), None, "{excepted}");
        }
        assert!(proxy(&[("ALL_PROXY", http), ("NO_PROXY", "other")]).unwrap().is_some());
    }
}
