//! Signatures of requests: Signature Version 4, as Amazon documents it ("Authenticating Requests (AWS Signature Version
//! 4)" in the API reference of S3).
//!
//! The signature covers method, path, query, all headers that are passed, and the SHA-256 of the body. So the server
//! refuses a body that was damaged on its way.

use super::address::Credentials;
use crate::hex;
use jiff::Timestamp;
use ring::{digest, hmac};

/// The part of a request that is signed.
pub(super) struct Signed<'a> {
    pub method: &'a str,
    pub host: &'a str,
    /// The path, percent-encoded.
    pub path: &'a str,
    /// The parameters, percent-encoded, in ascending order.
    pub query: &'a str,
    pub body: &'a [u8],
}

fn sha256(bytes: &[u8]) -> String {
    hex::encode(digest::digest(&digest::SHA256, bytes).as_ref())
}

fn hmac(key: &[u8], text: &str) -> hmac::Tag {
    hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, key), text.as_bytes())
}

/// Encodes a text for a path or query; `kept` are characters that are not encoded besides the unreserved ones.
pub(super) fn encoded(text: &str, kept: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => out.push(char::from(byte)),
            _ if kept.as_bytes().contains(&byte) => out.push(char::from(byte)),
            _ => out += &format!("%{byte:02X}"),
        }
    }
    out
}

/// Adds the headers that authenticate a request. Names are in lower case.
pub(super) fn sign(
    request: &Signed<'_>,
    headers: &mut Vec<(&'static str, String)>,
    credentials: &Credentials,
    region: &str,
    now: Timestamp,
) {
    let time = now.strftime("%Y%m%dT%H%M%SZ").to_string();
    let date = &time[..8];
    let body = sha256(request.body);
    headers.push(("x-amz-content-sha256", body.clone()));
    headers.push(("x-amz-date", time.clone()));
    if let Some(token) = &credentials.token {
        headers.push(("x-amz-security-token", token.clone()));
    }
    let mut covered: Vec<(&str, &str)> = headers.iter().map(|(name, value)| (*name, value.trim())).collect();
    covered.push(("host", request.host));
    covered.sort_unstable();
    let names = covered.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(";");
    let lines: String = covered.iter().map(|(name, value)| format!("{name}:{value}\n")).collect();
    let path = if request.path.is_empty() { "/" } else { request.path };
    let canonical = format!("{}\n{path}\n{}\n{lines}\n{names}\n{body}", request.method, request.query);
    let scope = format!("{date}/{region}/s3/aws4_request");
    let text = format!("AWS4-HMAC-SHA256\n{time}\n{scope}\n{}", sha256(canonical.as_bytes()));
    let mut key = hmac(format!("AWS4{}", credentials.secret).as_bytes(), date);
    for part in [region, "s3", "aws4_request"] {
        key = hmac(key.as_ref(), part);
    }
    let signature = hex::encode(hmac(key.as_ref(), &text).as_ref());
    let id = &credentials.key_id;
    let value = format!("AWS4-HMAC-SHA256 Credential={id}/{scope}, SignedHeaders={names}, Signature={signature}");
    headers.push(("authorization", value));
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// The examples of "Examples: Signature Calculations in AWS Signature Version 4" in Amazon's API reference of S3.
    #[test]
    fn signatures_are_those_of_amazons_examples() {
        let credentials = Credentials {
            key_id: "AKIAIOSFODNN7EXAMPLE".into(),
            secret: "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY".into(),
            token: None,
        };
        let now: Timestamp = "2013-05-24T00:00:00Z".parse().unwrap();
        let put = [("date", "Fri, 24 May 2013 00:00:00 GMT"), ("x-amz-storage-class", "REDUCED_REDUNDANCY")];
        let text = "Welcome to Amazon S3.";
        for (method, path, query, own, body, signature) in [
            (
                "GET",
                "/test.txt".to_owned(),
                "",
                &[("range", "bytes=0-9")][..],
                "",
                "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41",
            ),
            (
                "PUT",
                encoded("/test$file.text", "/"),
                "",
                &put[..],
                text,
                "98ad721746da40c64f1a55b78f14c238d841ea1380cd77a1b5971af0ece108bd",
            ),
            (
                "GET",
                String::new(),
                "max-keys=2&prefix=J",
                &[],
                "",
                "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7",
            ),
        ] {
            let mut headers: Vec<(&'static str, String)> =
                own.iter().map(|(name, value)| (*name, (*value).to_owned())).collect();
            let host = "examplebucket.s3.amazonaws.com";
            let request = Signed { method, host, path: &path, query, body: body.as_bytes() };
            sign(&request, &mut headers, &credentials, "us-east-1", now);
            let (_, value) = headers.iter().find(|(name, _)| *name == "authorization").unwrap();
            assert!(value.ends_with(&format!("Signature={signature}")), "{method} {path}{query}: {value}");
        }
    }

    #[test]
    fn a_token_is_covered_by_the_signature() {
        let token = Some("t0ken".to_owned());
        let credentials = Credentials { key_id: "id".into(), secret: "secret".into(), token };
        let request = Signed { method: "GET", host: "host", path: "/x", query: "", body: b"" };
        let mut headers = Vec::new();
        sign(&request, &mut headers, &credentials, "r", Timestamp::UNIX_EPOCH);
        assert!(headers.contains(&("x-amz-security-token", "t0ken".to_owned())));
        assert!(headers.iter().any(|(_, value)| value.contains(";x-amz-security-token,")), "{headers:?}");
    }
}
