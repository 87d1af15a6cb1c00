//! What a client says in its options: parsing of option data, and nothing else.
//!
//! Every length in the data comes from outside. Parsers return [`Malformed`] for data that are too short, too long or
//! not what the option takes; what they return refers to no more than the data held.

use super::limits::{INFO_REQUESTS_MAX, QUERIES_MAX, STRING_BYTES_MAX};
use super::protocol::Fields;

/// Why option data make no sense, in words for the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Malformed(pub &'static str);

/// Data of `INFO` and `GO`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InfoRequest<'a> {
    /// Export asked for; empty for the default one.
    pub name: &'a str,
    /// Kinds of information asked for.
    pub wanted: Vec<u16>,
}

/// Data of `LIST_META_CONTEXT` and `SET_META_CONTEXT`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContextRequest<'a> {
    /// Export asked about.
    pub name: &'a str,
    /// Queries; one that is not text matches nothing and is left out.
    pub queries: Vec<&'a str>,
    /// Queries in the request, those left out included.
    pub count: usize,
}

/// A name as the protocol allows it: text, no NUL, not too long.
pub fn export_name(bytes: &[u8]) -> Result<&str, Malformed> {
    if bytes.len() > STRING_BYTES_MAX {
        return Err(Malformed("the export name is longer than 4096 bytes"));
    }
    let name = std::str::from_utf8(bytes).map_err(|_| Malformed("the export name is not UTF-8"))?;
    if name.contains('\0') { Err(Malformed("the export name holds a NUL character")) } else { Ok(name) }
}

/// Parses the data of `INFO` and `GO`.
pub fn info_request(data: &[u8]) -> Result<InfoRequest<'_>, Malformed> {
    const SHORT: Malformed = Malformed("the option ends before its export name or information requests do");
    let mut fields = Fields(data);
    let name = export_name(fields.string().ok_or(SHORT)?)?;
    let count = usize::from(fields.u16().ok_or(SHORT)?);
    if count > INFO_REQUESTS_MAX {
        return Err(Malformed("too many information requests"));
    }
    let mut wanted = Vec::with_capacity(count);
    for _ in 0..count {
        wanted.push(fields.u16().ok_or(SHORT)?);
    }
    if !fields.0.is_empty() {
        return Err(Malformed("the option goes on after its information requests"));
    }
    Ok(InfoRequest { name, wanted })
}

/// Parses the data of `LIST_META_CONTEXT` and `SET_META_CONTEXT`.
pub fn context_request(data: &[u8]) -> Result<ContextRequest<'_>, Malformed> {
    const SHORT: Malformed = Malformed("the option ends before its export name or queries do");
    let mut fields = Fields(data);
    let name = export_name(fields.string().ok_or(SHORT)?)?;
    let count = usize::try_from(fields.u32().ok_or(SHORT)?).map_err(|_| SHORT)?;
    if count > QUERIES_MAX {
        return Err(Malformed("too many metadata context queries"));
    }
    let mut queries = Vec::with_capacity(count);
    for _ in 0..count {
        let query = fields.string().ok_or(SHORT)?;
        if query.len() > STRING_BYTES_MAX {
            return Err(Malformed("a metadata context query is longer than 4096 bytes"));
        }
        queries.extend(std::str::from_utf8(query).ok());
    }
    if !fields.0.is_empty() {
        return Err(Malformed("the option goes on after its queries"));
    }
    Ok(ContextRequest { name, queries, count })
}
