//! Where a bucket is, and with which credentials it is accessed.
//!
//! 1. Any text parses to an address whose names can be part of a URL without ambiguity, or to an error.
//! 2. A secret is never part of a message, also not of the debugging form of a value.

use error::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

/// The scheme of a repository in a bucket.
pub const SCHEME: &str = "s3://";
/// Longest prefix in bytes: a key has at most 1024 bytes, and the names of objects need less than 100.
const PREFIX_MAX: usize = 900;
/// The region if the user names none. Servers other than Amazon's use it too unless another one was configured.
const REGION_DEFAULT: &str = "us-east-1";

/// Credentials for requests.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Credentials {
    /// Identity of the access key.
    pub key_id: String,
    /// The secret of the access key.
    pub secret: String,
    /// The token of temporary credentials.
    #[serde(default)]
    pub token: Option<String>,
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials").field("key_id", &self.key_id).finish_non_exhaustive()
    }
}

/// The value of a variable, which is not set if it is empty.
pub(super) fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

impl Credentials {
    /// The credentials in the environment of this process, in the variables of Amazon's tools.
    pub fn from_environment() -> Option<Self> {
        let (key_id, secret) = (variable("AWS_ACCESS_KEY_ID")?, variable("AWS_SECRET_ACCESS_KEY")?);
        Some(Self { key_id, secret, token: variable("AWS_SESSION_TOKEN") })
    }
}

/// A place in a bucket of an S3-compatible server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BucketAddress {
    /// The bucket.
    pub bucket: String,
    /// The beginning of the keys of all objects, without a slash at its ends; empty for the whole bucket.
    pub prefix: String,
    /// URL of the server; `None` for Amazon's.
    #[serde(default)]
    pub endpoint: Option<String>,
    /// The region.
    pub region: String,
}

impl fmt::Display for BucketAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{SCHEME}{}", self.bucket)?;
        if self.prefix.is_empty() { Ok(()) } else { write!(f, "/{}", self.prefix) }
    }
}

impl FromStr for BucketAddress {
    type Err = String;

    /// Parses `s3://BUCKET/PREFIX`; server and region are the default ones.
    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let rest =
            text.strip_prefix(SCHEME).ok_or_else(|| format!("'{}' does not begin with {SCHEME}", shown(text)))?;
        let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        let address = Self {
            bucket: bucket.to_owned(),
            prefix: prefix.trim_end_matches('/').to_owned(),
            endpoint: None,
            region: REGION_DEFAULT.to_owned(),
        };
        address.refuse().map_or(Ok(address), Err)
    }
}

/// A text of the user for a message, without the credentials that it may have before an `@`.
fn shown(text: &str) -> String {
    match text.rsplit_once('@') {
        Some((_, rest)) => format!("***@{}", rest.escape_debug()),
        None => text.escape_debug().to_string(),
    }
}

impl BucketAddress {
    /// Why the names of the address cannot be used.
    fn refuse(&self) -> Option<String> {
        let Self { bucket, prefix, region, .. } = self;
        let plain = |character: char| character.is_ascii_alphanumeric() || "-._".contains(character);
        if !(3..=63).contains(&bucket.len()) || !bucket.chars().all(plain) || bucket.starts_with('.') {
            // A secret before an @ may have slashes itself.
            let whole = format!("{bucket}/{prefix}");
            return Some(format!(
                "'{}' is not the name of a bucket: write s3://BUCKET/PREFIX; names have 3 to 63 letters, digits, dots \
                 and hyphens",
                shown(if whole.contains('@') { &whole } else { bucket })
            ));
        }
        let wrong = |part: &str| matches!(part, "" | "." | "..");
        let controls = prefix.chars().any(char::is_control);
        if prefix.len() > PREFIX_MAX || controls || (!prefix.is_empty() && prefix.split('/').any(wrong)) {
            return Some(format!(
                "'{}' cannot be the prefix of a repository: it has at most {PREFIX_MAX} bytes, and names between its \
                 slashes, which are not '.' or '..'",
                prefix.escape_debug()
            ));
        }
        let region_fits = !region.is_empty() && region.len() <= 64 && region.chars().all(plain);
        (!region_fits).then(|| format!("'{}' is not the name of a region", region.escape_debug()))
    }

    /// The address with the server and region of the environment; `endpoint` precedes the environment.
    ///
    /// # Errors
    /// `Invalid` if no request can be sent there. So an address with a secret in it is sent to no other process.
    pub fn completed(mut self, endpoint: Option<&str>) -> Result<Self> {
        let named = || variable("AWS_ENDPOINT_URL_S3").or_else(|| variable("AWS_ENDPOINT_URL"));
        self.endpoint = endpoint.map(str::to_owned).or_else(named);
        if let Some(region) = variable("AWS_REGION").or_else(|| variable("AWS_DEFAULT_REGION")) {
            self.region = region;
        }
        self.base()?;
        Ok(self)
    }

    /// Where requests are sent. `Invalid` if a part of the address cannot be used.
    pub(super) fn base(&self) -> Result<Base> {
        let invalid = |text: String| Error::new(ErrorKind::Invalid, text);
        if let Some(text) = self.refuse() {
            return Err(invalid(text));
        }
        let Some(endpoint) = &self.endpoint else {
            let (bucket, region) = (&self.bucket, &self.region);
            let domain = if region.starts_with("cn-") { "amazonaws.com.cn" } else { "amazonaws.com" };
            // The certificate of Amazon's server is not valid for a name with further dots.
            let (host, path) = match bucket.contains(['.', '_']) || bucket.bytes().any(|b| b.is_ascii_uppercase()) {
                true => (format!("s3.{region}.{domain}"), format!("/{bucket}")),
                false => (format!("{bucket}.s3.{region}.{domain}"), String::new()),
            };
            return Ok(Base { secure: true, host, path });
        };
        let wrong = || {
            let text = "is not the URL of a server: write https://HOST or http://HOST:PORT";
            invalid(format!("'{}' {text}", shown(endpoint)))
        };
        let (scheme, rest) = endpoint.split_once("://").ok_or_else(wrong)?;
        let secure = match scheme {
            "https" => true,
            "http" => false,
            _ => return Err(wrong()),
        };
        let (host, path) = rest.split_once('/').unwrap_or((rest, ""));
        let fits = |character: char| character.is_ascii_alphanumeric() || "-._:[]".contains(character);
        let path_fits = |character: char| character.is_ascii_alphanumeric() || "-._~/".contains(character);
        if host.is_empty() || !host.chars().all(fits) || !path.chars().all(path_fits) {
            return Err(wrong());
        }
        // The signature covers the header `Host`, which has no port if it is the default one.
        let host = host.strip_suffix(if secure { ":443" } else { ":80" }).unwrap_or(host).to_owned();
        let path = match path.trim_matches('/') {
            "" => format!("/{}", self.bucket),
            path => format!("/{path}/{}", self.bucket),
        };
        Ok(Base { secure, host, path })
    }
}

/// Where requests are sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Base {
    /// Whether TLS is used.
    pub secure: bool,
    /// Host, with a port that is not the default one.
    pub host: String,
    /// Path of the bucket, without a slash at its end.
    pub path: String,
}

impl Base {
    /// Whether the server is on this host, so that no proxy can reach it.
    pub fn is_on_this_host(&self) -> bool {
        let host = match self.host.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
            Some((host, _)) => host,
            None => self.host.split(':').next().unwrap_or_default(),
        };
        host == "localhost" || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
    }

    /// The server, for messages.
    pub fn origin(&self) -> String {
        format!("{}://{}", if self.secure { "https" } else { "http" }, self.host)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn parse(text: &str) -> BucketAddress {
        text.parse().unwrap()
    }

    #[test]
    fn addresses_have_a_bucket_and_a_prefix() {
        let address = parse("s3://backups/lab/vms/");
        assert_eq!((address.bucket.as_str(), address.prefix.as_str()), ("backups", "lab/vms"));
        assert_eq!(address.to_string(), "s3://backups/lab/vms");
        assert_eq!(parse("s3://backups").to_string(), "s3://backups");
        assert_eq!(parse("s3://backups/").to_string(), "s3://backups");
        let long = format!("s3://backups/{}", "x".repeat(PREFIX_MAX + 1));
        for text in
            ["s3://", "s3://ab", "s3://a b c", "s3://b@host/x", "s3://bucket//x", "s3://bucket/a/../b", "s3:b", &long]
        {
            assert!(text.parse::<BucketAddress>().is_err(), "{text}");
        }
    }

    #[test]
    fn requests_are_sent_to_the_named_server_or_to_amazons() {
        let base = |text: &str, endpoint: Option<&str>| {
            let mut address = parse(text);
            address.region = "eu-west-1".into();
            address.endpoint = endpoint.map(str::to_owned);
            address.base().map(|base| (base.origin(), base.path))
        };
        let pair = |origin: &str, path: &str| (origin.to_owned(), path.to_owned());
        assert_eq!(base("s3://lab", None).unwrap(), pair("https://lab.s3.eu-west-1.amazonaws.com", ""));
        assert_eq!(base("s3://a.lab", None).unwrap(), pair("https://s3.eu-west-1.amazonaws.com", "/a.lab"));
        for (endpoint, origin, path) in [
            ("http://127.0.0.1:9000", "http://127.0.0.1:9000", "/lab"),
            ("http://[::1]:80/", "http://[::1]", "/lab"),
            ("https://minio.example:443/s3", "https://minio.example", "/s3/lab"),
        ] {
            assert_eq!(base("s3://lab/x", Some(endpoint)).unwrap(), pair(origin, path));
            let address = BucketAddress { endpoint: Some(endpoint.to_owned()), ..parse("s3://lab") };
            assert_eq!(address.base().unwrap().is_on_this_host(), !endpoint.contains("minio"), "{endpoint}");
        }
        for endpoint in ["minio.example", "ftp://x", "https://", "https://user:p@x", "https://x/?a", "http://x y"] {
            assert_eq!(base("s3://lab", Some(endpoint)).unwrap_err().kind(), ErrorKind::Invalid, "{endpoint}");
        }
    }

    #[test]
    fn secrets_in_addresses_are_not_in_messages() {
        for text in ["s3://KEY:hid@lab/x", "s3://KEY:hid/hid@lab", "s3://KEY:hid@hid/hid@lab", "S3://KEY:hid@lab"] {
            let message = text.parse::<BucketAddress>().unwrap_err();
            assert!(message.contains("***@lab") && !message.contains("hid"), "{message}");
        }
        for endpoint in ["https://user:hid@minio.example", "http://user:hi/d@minio.example", "user:hid@minio.example"] {
            let error = parse("s3://lab/x").completed(Some(endpoint)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid);
            assert!(error.to_string().contains("'***@minio.example'"), "{error}");
        }
    }

    #[test]
    fn secrets_are_not_in_the_debugging_form() {
        let token = Some("token-text".to_owned());
        let credentials = Credentials { key_id: "id-text".into(), secret: "secret-text".into(), token };
        let text = format!("{credentials:?}");
        assert!(text.contains("id-text") && !text.contains("secret-text") && !text.contains("token-text"), "{text}");
    }
}
