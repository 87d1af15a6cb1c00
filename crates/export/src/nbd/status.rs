//! Metadata contexts: the ones that are offered, their names, and block status replies.
//!
//! - `base:allocation`: data, zeros that take space, holes.
//! - `lamina:dirty:SNAPSHOT`: ranges that may differ between the snapshot and the export; also offered as
//!   `qemu:dirty-bitmap:SNAPSHOT`, the name under which backup clients look for changed blocks.
//!
//! A context of a snapshot belongs to the snapshot that had the name when the client chose the context: if that
//! snapshot is deleted, queries fail, also if another snapshot has its name.
//!
//! Whatever the device returns, a reply begins at the start of the requested range, does not exceed the range, and has
//! at least one extent, none of them empty. So a client that walks an export always makes progress.

use super::limits::{CONTEXTS_MAX, STATUS_EXTENTS_MAX};
use super::options::ContextRequest;
use super::protocol::{Put, allocation, dirty};
use disk::device::{Allocation, BaseIdentity, Device};
use error::{Error, ErrorKind};

/// The standard context.
pub const ALLOCATION: &str = "base:allocation";

/// Prefixes of the names of contexts, which a snapshot's name follows; lamina's own prefix is the first.
pub const DIRTY_PREFIXES: [&str; 2] = ["lamina:dirty:", "qemu:dirty-bitmap:"];

/// What a context reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Topic {
    /// Data, zeros or holes.
    Allocation,
    /// What changed since a snapshot.
    ChangedSince {
        /// The name of the snapshot.
        base: String,
        /// The snapshot that had this name when the client chose the context.
        identity: BaseIdentity,
    },
}

/// A context that a client has chosen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Context {
    /// The context's number in replies.
    pub id: u32,
    /// The name by which the client chose the context.
    pub name: String,
    /// What the context reports.
    pub topic: Topic,
}

/// A run of bytes with one status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Length in bytes.
    pub length: u64,
    /// Status flags.
    pub flags: u32,
}

/// The contexts that a listing returns for `queries`. Without queries, the listing contains all contexts. A query that
/// ends with the colon before the last part of a name selects all contexts with this prefix.
pub fn list(request: &ContextRequest<'_>, bases: &[String]) -> Vec<String> {
    let wanted = |name: &str, prefix: &str| {
        let namespace = &prefix[..=prefix.find(':').unwrap_or(prefix.len() - 1)];
        request.count == 0 || request.queries.iter().any(|q| *q == name || *q == prefix || *q == namespace)
    };
    let mut names = Vec::new();
    if wanted(ALLOCATION, "base:") {
        names.push(ALLOCATION.to_owned());
    }
    for prefix in DIRTY_PREFIXES {
        names.extend(bases.iter().map(|base| format!("{prefix}{base}")).filter(|name| wanted(name, prefix)));
    }
    names
}

/// The contexts of `device` that `queries` select by exact name, each once, with those of the snapshots `bases`. `None`
/// if they exceed the limit.
pub fn choose(request: &ContextRequest<'_>, device: &dyn Device, bases: &[String]) -> Option<Vec<Context>> {
    let mut chosen: Vec<Context> = Vec::new();
    for query in &request.queries {
        let topic = if *query == ALLOCATION {
            Topic::Allocation
        } else {
            let base = DIRTY_PREFIXES.iter().find_map(|prefix| query.strip_prefix(prefix));
            let base = base.filter(|base| bases.iter().any(|known| known == base));
            match base.and_then(|base| Some((base, device.base_identity(base)?))) {
                Some((base, identity)) => Topic::ChangedSince { base: base.to_owned(), identity },
                None => continue,
            }
        };
        if chosen.iter().any(|context| context.name == *query) {
            continue;
        }
        if chosen.len() == CONTEXTS_MAX {
            return None;
        }
        let id = chosen.len() as u32 + 1;
        chosen.push(Context { id, name: (*query).to_owned(), topic });
    }
    Some(chosen)
}

/// The extents of a range that is not empty and lies within the capacity.
pub fn extents(
    device: &dyn Device,
    topic: &Topic,
    offset: u64,
    length: u64,
    only_one: bool,
) -> error::Result<Vec<Extent>> {
    let limit = if only_one { 1 } else { STATUS_EXTENTS_MAX };
    Ok(match topic {
        Topic::Allocation => {
            let found = device.status(offset, length, limit)?;
            let found = found.into_iter().map(|extent| Extent {
                length: extent.length,
                flags: match extent.allocation {
                    Allocation::Data => 0,
                    Allocation::Zero => allocation::ZERO,
                    Allocation::Hole => allocation::HOLE | allocation::ZERO,
                },
            });
            tidy(found, length, limit, 0)
        }
        Topic::ChangedSince { base, identity } => {
            // The snapshot may have been deleted and another one taken under its name, before the query or during it.
            let is_base = || device.base_identity(base) == Some(*identity);
            let before = is_base();
            let found = device.changed_since(base, offset, length, limit)?;
            if !before || !is_base() {
                let text = format!("{}: '{base}' is not the snapshot that the client chose", device.name());
                return Err(Error::new(ErrorKind::NotFound, text));
            }
            let found = found
                .into_iter()
                .map(|extent| Extent { length: extent.length, flags: if extent.dirty { dirty::DIRTY } else { 0 } });
            tidy(found, length, limit, dirty::DIRTY)
        }
    })
}

/// Joins adjacent extents with equal flags, and cuts at `length` and at `limit`; `unknown` are the flags of a range
/// without information.
fn tidy(found: impl Iterator<Item = Extent>, length: u64, limit: usize, unknown: u32) -> Vec<Extent> {
    let mut extents: Vec<Extent> = Vec::new();
    let mut left = length;
    for extent in found {
        let part = extent.length.min(left);
        if part == 0 {
            continue;
        }
        let full = extents.len() == limit;
        match extents.last_mut() {
            Some(last) if last.flags == extent.flags => last.length += part,
            _ if full => break,
            _ => extents.push(Extent { length: part, flags: extent.flags }),
        }
        left -= part;
    }
    if extents.is_empty() {
        extents.push(Extent { length, flags: unknown });
    }
    extents
}

/// The payload of a block status chunk. In a compact chunk the lengths fit into 32 bits, because a compact request has
/// a 32-bit length.
pub fn payload(id: u32, extents: &[Extent], extended: bool) -> Vec<u8> {
    let mut out = Vec::with_capacity(8 + extents.len() * 16);
    out.put_u32(id);
    if extended {
        out.put_u32(extents.len() as u32);
    }
    for extent in extents {
        if extended {
            out.put_u64(extent.length);
            out.put_u64(u64::from(extent.flags));
        } else {
            out.put_u32(u32::try_from(extent.length).unwrap_or(u32::MAX));
            out.put_u32(extent.flags);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn block_status_makes_progress_with_any_extents_from_the_device() {
        let mut seed = 1u64;
        let mut random = |limit: u64| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 33) % limit
        };
        for _ in 0..20_000 {
            let length = 1 + random(1000);
            let limit = 1 + random(5) as usize;
            let found: Vec<Extent> =
                (0..random(8)).map(|_| Extent { length: random(400), flags: random(3) as u32 }).collect();
            let told = tidy(found.iter().copied(), length, limit, 7);
            assert!(!told.is_empty() && told.len() <= limit, "{found:?}: {told:?}");
            assert!(told.iter().all(|extent| extent.length > 0), "{found:?}: {told:?}");
            assert!(told.windows(2).all(|two| two[0].flags != two[1].flags), "{found:?}: {told:?}");
            assert!(told.iter().map(|extent| extent.length).sum::<u64>() <= length, "{found:?}: {told:?}");
            // The flags of every byte must be those that the device returned for it.
            let spread = |extents: &[Extent]| -> Vec<u32> {
                extents.iter().flat_map(|extent| std::iter::repeat_n(extent.flags, extent.length as usize)).collect()
            };
            let (said, told) = (spread(&found), spread(&told));
            assert!(said.is_empty() || said.starts_with(&told), "{found:?}");
        }
    }
}
