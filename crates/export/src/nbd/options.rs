//! Parsing of option data.
//!
//! Every length in the data is untrusted. Parsers return [`Malformed`] for data that are too short, too long or not
//! allowed for the option; their results borrow from the data.

use super::limits::{INFO_REQUESTS_MAX, QUERIES_MAX, STRING_BYTES_MAX};
use super::protocol::Fields;

/// The reason why option data are malformed, as a message for the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Malformed(pub &'static str);

/// Data of `INFO` and `GO`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InfoRequest<'a> {
    /// Name of the requested export; empty for the default export.
    pub name: &'a str,
    /// Requested kinds of information.
    pub wanted: Vec<u16>,
}

/// Data of `LIST_META_CONTEXT` and `SET_META_CONTEXT`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContextRequest<'a> {
    /// Requested export.
    pub name: &'a str,
    /// Queries; those that are not UTF-8 match nothing and are left out.
    pub queries: Vec<&'a str>,
    /// Number of queries in the request, including those left out.
    pub count: usize,
}

/// Checks that the protocol allows a name: UTF-8, no NUL, not too long.
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
        return Err(Malformed("the option has bytes after its information requests"));
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
        return Err(Malformed("the option has bytes after its queries"));
    }
    Ok(ContextRequest { name, queries, count })
}
