//! Which operations run on which disk: a migration excludes other operations on its disk, and they exclude it.
//!
//! An operation that changes a disk or its snapshots holds a shared use of the disk's name until it has ended; a
//! migration holds an exclusive one. An operation that conflicts with a use is refused with the reason; it does not
//! wait.

use error::{Error, ErrorKind, Result};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;

#[derive(Clone, Copy)]
enum Use {
    /// The number of operations that share the disk.
    Shared(u64),
    /// What the exclusive operation does to the disk, as a participle.
    Alone(&'static str),
}

/// The uses of all disks.
#[derive(Default)]
pub(crate) struct Uses {
    all: Mutex<BTreeMap<String, Use>>,
}

/// A use of a disk, which ends when this value is dropped.
pub(crate) struct InUse {
    uses: Arc<Uses>,
    name: String,
}

impl Uses {
    /// Takes a shared use of a disk: `Busy` while another operation has exclusive use.
    pub fn share(self: &Arc<Self>, name: &str) -> Result<InUse> {
        let mut all = self.all.lock();
        match all.entry(name.to_owned()).or_insert(Use::Shared(0)) {
            Use::Shared(count) => *count += 1,
            Use::Alone(what) => {
                let text = format!("disk '{name}' is being {what}: wait until this has ended, or stop it");
                return Err(Error::new(ErrorKind::Busy, text));
            }
        }
        Ok(InUse { uses: Arc::clone(self), name: name.to_owned() })
    }

    /// Takes exclusive use of a disk, to be `what` (a participle): `Busy` while any other operation uses it.
    pub fn alone(self: &Arc<Self>, name: &str, what: &'static str) -> Result<InUse> {
        let mut all = self.all.lock();
        match all.get(name) {
            None => {}
            Some(Use::Alone(other)) => {
                return Err(Error::new(ErrorKind::Busy, format!("disk '{name}' is being {other} already")));
            }
            Some(Use::Shared(_)) => {
                let text = format!("disk '{name}' cannot be {what} now: another operation on it is under way");
                return Err(Error::new(ErrorKind::Busy, text));
            }
        }
        all.insert(name.to_owned(), Use::Alone(what));
        Ok(InUse { uses: Arc::clone(self), name: name.to_owned() })
    }
}

impl InUse {
    /// Keeps the use until the datastore is opened again.
    pub fn keep(self) {
        std::mem::forget(self);
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        let mut all = self.uses.all.lock();
        match all.get_mut(&self.name) {
            Some(Use::Shared(count)) if *count > 1 => *count -= 1,
            _ => drop(all.remove(&self.name)),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn exclusive_use_excludes_all_other_uses() {
        let uses = Arc::new(Uses::default());
        let (a, b) = (uses.share("x").unwrap(), uses.share("x").unwrap());
        assert_eq!(uses.alone("x", "migrated").err().unwrap().kind(), ErrorKind::Busy);
        drop(a);
        assert!(uses.alone("x", "migrated").is_err());
        drop(b);
        let alone = uses.alone("x", "migrated").unwrap();
        assert!(uses.share("x").err().unwrap().to_string().contains("migrated"));
        assert!(uses.alone("x", "migrated").is_err());
        uses.share("y").unwrap();
        drop(alone);
        assert!(uses.all.lock().is_empty());
    }
}
