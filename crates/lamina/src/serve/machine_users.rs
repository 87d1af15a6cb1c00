//! Which disks a user may open: those of the machines that run as this user.

use export::access::UserAccess;
use rustix::process::geteuid;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// The rights of users, by the definitions of the machines of a datastore.
#[derive(Debug)]
pub struct MachineUsers {
    machines: PathBuf,
}

impl MachineUsers {
    /// The rights by the definitions of the machines in the datastore's folder.
    pub fn new(datastore: &Path) -> Self {
        Self { machines: datastore.join(vm::machines::FOLDER) }
    }
}

impl UserAccess for MachineUsers {
    /// Root and the user of the server may open everything: both could read the files of the datastore.
    fn only(&self, user: u32) -> Option<BTreeSet<String>> {
        if user == 0 || user == geteuid().as_raw() {
            return None;
        }
        let disks = vm::user::disks_of(&self.machines, user).unwrap_or_else(|error| {
            tracing::error!(user, %error, "the disks that the user may open are not known, so the user may open none");
            BTreeSet::new()
        });
        Some(disks)
    }
}
