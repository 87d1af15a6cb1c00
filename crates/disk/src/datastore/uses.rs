//! Which operations run on which disk: a migration and another operation on the same disk exclude each other.
//!
//! An operation that changes a disk or its snapshots holds a shared use of the disk's name until it has ended; a
//! migration holds an exclusive one. An operation that conflicts with a use is refused with the reason; it does not
//! wait. When a disk is renamed, its uses are moved to the new name. All uses of a disk are refused after it was shut,
//! because it is then not known which copy is the current disk.

use error::{Error, ErrorKind, Result};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;

/// A use that has not ended.
struct Use {
    number: u64,
    disk: String,
    /// What an exclusive operation does to the disk, as a participle; `None` for a shared use.
    alone: Option<&'static str>,
    /// Whether no client can open the disk.
    without_clients: bool,
}

#[derive(Default)]
struct AllUses {
    last: u64,
    held: Vec<Use>,
    /// Disks that were shut ([`Uses::shut`]), and why.
    shut: BTreeMap<String, String>,
}

impl AllUses {
    fn of<'a>(&'a self, disk: &'a str) -> impl Iterator<Item = &'a Use> {
        self.held.iter().filter(move |other| other.disk == disk)
    }

    fn check_not_shut(&self, disk: &str) -> Result<()> {
        match self.shut.get(disk) {
            Some(why) => Err(Error::new(ErrorKind::Corrupt, format!("disk '{disk}' is not opened: {why}"))),
            None => Ok(()),
        }
    }

    fn add(&mut self, disk: &str, alone: Option<&'static str>, without_clients: bool) -> u64 {
        self.last += 1;
        self.held.push(Use { number: self.last, disk: disk.to_owned(), alone, without_clients });
        self.last
    }
}

/// The uses of all disks.
#[derive(Default)]
pub(crate) struct Uses {
    all: Mutex<AllUses>,
}

/// A use of a disk, which ends when this value is dropped.
pub(crate) struct InUse {
    uses: Arc<Uses>,
    number: u64,
}

impl Uses {
    /// Acquires a shared use of a disk: `Busy` while another operation has exclusive use.
    pub fn share(self: &Arc<Self>, name: &str) -> Result<InUse> {
        let mut all = self.all.lock();
        all.check_not_shut(name)?;
        if let Some(what) = all.of(name).find_map(|other| other.alone) {
            let text = format!("disk '{name}' is being {what}: wait until this has ended, or stop it");
            return Err(Error::new(ErrorKind::Busy, text));
        }
        Ok(InUse { number: all.add(name, None, false), uses: Arc::clone(self) })
    }

    /// Acquires exclusive use of a disk, to be `what` (a participle): `Busy` while any other operation uses the disk.
    pub fn alone(self: &Arc<Self>, name: &str, what: &'static str) -> Result<InUse> {
        self.exclude(name, what, false)
    }

    /// As [`Uses::alone`]; until the use ends, clients cannot open the disk either. Clients that have it open are not
    /// affected: the caller checks that there are none.
    pub fn alone_without_clients(self: &Arc<Self>, name: &str, what: &'static str) -> Result<InUse> {
        self.exclude(name, what, true)
    }

    /// `Busy` while an operation does not allow clients to open the disk.
    pub fn check_open_to_clients(&self, name: &str) -> Result<()> {
        let all = self.all.lock();
        match all.of(name).find(|other| other.without_clients).and_then(|other| other.alone) {
            Some(what) => {
                let text = format!("disk '{name}' is being {what}: open it when this has ended, or stop it");
                Err(Error::new(ErrorKind::Busy, text))
            }
            None => Ok(()),
        }
    }

    fn exclude(self: &Arc<Self>, name: &str, what: &'static str, without_clients: bool) -> Result<InUse> {
        let mut all = self.all.lock();
        all.check_not_shut(name)?;
        if let Some(other) = all.of(name).next() {
            let text = match other.alone {
                Some(other) => format!("disk '{name}' is being {other} already"),
                None => format!("disk '{name}' cannot be {what} now: another operation on it is under way"),
            };
            return Err(Error::new(ErrorKind::Busy, text));
        }
        Ok(InUse { number: all.add(name, Some(what), without_clients), uses: Arc::clone(self) })
    }

    /// Whether [`Uses::share`] would succeed now.
    pub fn may_be_shared(&self, name: &str) -> bool {
        let all = self.all.lock();
        all.check_not_shut(name).is_ok() && all.of(name).all(|other| other.alone.is_none())
    }

    /// Refuses all uses of a disk until the datastore is opened again, with the reason.
    pub fn shut(&self, name: &str, why: String) {
        self.all.lock().shut.insert(name.to_owned(), why);
    }

    /// `Corrupt`, with the reason, if the disk is shut.
    pub fn check_not_shut(&self, name: &str) -> Result<()> {
        self.all.lock().check_not_shut(name)
    }

    /// Moves the uses of a renamed disk to its new name. The caller has a shared use of both names, so no operation can
    /// acquire exclusive use of either name meanwhile.
    pub fn renamed(&self, from: &str, to: &str) {
        let mut all = self.all.lock();
        all.held.iter_mut().filter(|held| held.disk == from).for_each(|held| held.disk = to.to_owned());
    }
}

impl InUse {
    /// Keeps the use until the datastore is closed.
    pub fn keep(self) {
        std::mem::forget(self);
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        self.uses.all.lock().held.retain(|held| held.number != self.number);
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
        assert!(!uses.may_be_shared("x") && uses.may_be_shared("y"));
        assert!(uses.alone("x", "migrated").is_err());
        uses.share("y").unwrap();
        drop(alone);
        assert!(uses.all.lock().held.is_empty());
    }

    #[test]
    fn clients_cannot_open_a_disk_during_an_operation_without_clients() {
        let uses = Arc::new(Uses::default());
        let alone = uses.alone("x", "migrated").unwrap();
        uses.check_open_to_clients("x").unwrap();
        drop(alone);
        let alone = uses.alone_without_clients("x", "reclaimed").unwrap();
        let error = uses.check_open_to_clients("x").unwrap_err();
        assert!(error.kind() == ErrorKind::Busy && error.to_string().contains("reclaimed"));
        assert!(uses.share("x").is_err());
        uses.check_open_to_clients("y").unwrap();
        drop(alone);
        uses.check_open_to_clients("x").unwrap();
    }

    #[test]
    fn a_use_follows_its_disk_to_a_new_name() {
        let uses = Arc::new(Uses::default());
        let long = uses.share("before").unwrap();
        {
            let _both = (uses.share("before").unwrap(), uses.share("after").unwrap());
            uses.renamed("before", "after");
        }
        assert_eq!(uses.alone("after", "migrated").err().unwrap().kind(), ErrorKind::Busy);
        // After the rename, another disk may have the old name.
        uses.alone("before", "migrated").unwrap();
        drop(long);
        uses.alone("after", "migrated").unwrap();
    }
}
