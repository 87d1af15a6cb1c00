//! The seed of cloud-init: a small read-only disk with its configuration (the data source NoCloud). cloud-init finds
//! the disk by its label, `CIDATA`.
//!
//! | file | content |
//! |---|---|
//! | `meta-data` | the instance, which is the machine's UUID; the host name; SSH keys |
//! | `user-data` | what the user has given |
//! | `vendor-data` | a script that gives a copy of a guest a machine id and client ids of DHCP of its own |
//!
//! 1. The image is made at each start of a process, in its run folder. So a clone has its own instance, and cloud-init
//!    makes new host keys for it.
//! 2. The image follows from the definition alone, and its size never changes: a guest that continues from a saved
//!    state finds the disk as it was.

mod fat;

use crate::definition::{Chipset, Definition};
use crate::personality;
use crate::qemu::boot;
use backend::private;
use error::{IoContext, Result};
use serde_json::json;
use std::path::Path;

/// PCI slot of the disk on q35 and on i440fx: higher than the slots of the other disks, so that the guest numbers this
/// disk last. On i440fx, it is the slot of the last port.
const SLOTS: [u8; 2] = [25, 31];
/// What cloud-init does once in every instance, before its other scripts. Every copy of a guest is a new instance.
const VENDOR: &str = "\
#!/bin/sh
# A copy of a machine has the machine id of its source, until this script has run.
set -- /var/lib/cloud/instances/*
[ $# -gt 1 ] || exit 0
rm -f /etc/machine-id /var/lib/dbus/machine-id
systemd-machine-id-setup
[ ! -d /var/lib/dbus ] || ln -s /etc/machine-id /var/lib/dbus/machine-id
# The client id of DHCP follows from the machine id, and the source has the lease of the former one.
LEASES
systemctl -q try-restart systemd-networkd.service NetworkManager.service || true
";

/// Writes the image of a machine that has a seed.
pub(crate) fn write(definition: &Definition, path: &Path) -> Result<()> {
    let Some(seed) = &definition.seed else { return Ok(()) };
    let meta = json!({
        "instance-id": definition.uuid,
        "local-hostname": seed.hostname.as_ref().unwrap_or(&definition.name),
        "public-keys": seed.ssh_keys,
    });
    // JSON is valid YAML.
    let meta = format!("{meta:#}\n");
    let user = seed.user_data.as_deref().unwrap_or("#cloud-config\n");
    let vendor = VENDOR.replace("LEASES", personality::LEASES);
    let files = [("meta-data", meta.as_str()), ("user-data", user), ("vendor-data", vendor.as_str())];
    let number = u32::from_le_bytes(std::array::from_fn(|at| definition.uuid.as_bytes()[at]));
    let image = fat::image("CIDATA", number, &files)?;
    private::write(path, &image).during(|| format!("writing '{}'", path.display()))
}

/// The options for the disk, each with its value.
pub(crate) fn arguments(definition: &Definition, path: &Path) -> Vec<(&'static str, String)> {
    if definition.seed.is_none() {
        return Vec::new();
    }
    let slot = match definition.platform.chipset {
        Chipset::Q35 => SLOTS[0],
        Chipset::I440fx => SLOTS[1],
    };
    let node = boot::image("seed", path);
    let device = format!("virtio-blk-pci,id=seed-disk,drive=seed,addr={slot:x}.0,serial=cidata");
    vec![("-blockdev", node.to_string()), ("-device", device)]
}
