//! Plans the machine that is created from a description.
//!
//! 1. A disk keeps its controller and its address on the controller. Where QEMU's controller has fewer addresses, the
//!    disk gets another address, which is noted.
//! 2. The disk that the machine boots from is the first disk of the definition.
//! 3. A card keeps its MAC address. The user chooses its network, because the networks of the source's host do not
//!    exist on this host.

use super::{Content, Effect, Foreign, ForeignSnapshot, Format, Note, Options};
use crate::definition::{
    Bus, Chipset, DISK_SLOTS, Definition, Disk, Firmware, IDE_SLOT, Link, NAME_MAX, Network, disk_name,
};
use crate::identity::Mac;
use crate::snapshots;
use error::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::path::PathBuf;

/// A disk to import.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlannedDisk {
    /// The disk's name in the datastore.
    pub name: String,
    /// The disk's name in the source.
    pub label: String,
    /// The disk's content.
    pub content: Content,
    /// The disk's capacity in bytes; `None` until [`super::run::check`] has found it out.
    pub capacity: Option<u64>,
    /// The capacity that the description states besides the image, for [`super::run::check`].
    #[serde(skip)]
    pub stated: Option<::ovf::Capacity>,
}

/// A snapshot to import.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlannedSnapshot {
    /// The snapshot's name.
    pub name: String,
    /// The snapshot's name in the source.
    pub label: String,
    /// When the snapshot was taken, in seconds since 1970.
    pub created: u64,
    /// The disks in the snapshot: indices of the machine's disks.
    pub disks: Vec<usize>,
}

/// The machine that is created from a description.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// The file with the description.
    pub source: PathBuf,
    /// The format of the description.
    pub format: Format,
    /// The definition of the machine.
    pub definition: Definition,
    /// The machine's disks, in the order of the definition.
    pub disks: Vec<PlannedDisk>,
    /// A file with the machine's UEFI variables.
    pub nvram: Option<PathBuf>,
    /// The machine's snapshots, parents before children.
    pub snapshots: Vec<PlannedSnapshot>,
    /// Differences from the source.
    pub notes: Vec<Note>,
    /// Addresses of cards that were made for this plan. Another plan of the same machine has others.
    pub new_addresses: Vec<Mac>,
}

impl Plan {
    /// The address of a card for the report of an import. `None` in a dry run for an address that was made for this
    /// plan: the import itself makes another one.
    pub fn reported_address(&self, card: &Network, dry_run: bool) -> Option<Mac> {
        Some(card.mac).filter(|mac| !dry_run || !self.new_addresses.contains(mac))
    }
}

/// Decides which machine is created from a description.
pub fn plan(mut foreign: Foreign, options: &Options) -> Result<Plan> {
    let source = foreign.source.clone();
    let name = options.name.clone().unwrap_or_else(|| machine_name(&foreign.name));
    let context = |error: Error| error.context(format_args!("'{}'", source.display()));
    let cpus = options.cpus.unwrap_or(foreign.cpus);
    let memory = options.memory.unwrap_or(foreign.memory);
    let mut definition = Definition::new(&name, cpus, memory).map_err(context)?;
    definition.uuid = foreign.uuid.unwrap_or(definition.uuid);
    definition.boot = foreign.boot.take();
    definition.platform = foreign.platform;
    if options.cpus.is_some() {
        definition.platform.cores = None;
    }
    if let Some(firmware) = options.firmware.filter(|firmware| *firmware != foreign.platform.firmware) {
        definition.platform.firmware = firmware;
        definition.platform.secure_boot = false;
        foreign.nvram = None;
    }
    let platform = &mut definition.platform;
    let ide = foreign.disks.iter().any(|disk| foreign.controllers[disk.controller].bus == Bus::Ide);
    platform.chipset = match (platform.secure_boot, ide && options.bus.is_none() || options.bus == Some(Bus::Ide)) {
        (true, _) => Chipset::Q35,
        (false, true) => Chipset::I440fx,
        (false, false) => platform.chipset,
    };
    boot_controller(&mut foreign, &definition, options);
    let mut disks = Vec::with_capacity(foreign.disks.len());
    let mut places = Places::default();
    for (index, disk) in std::mem::take(&mut foreign.disks).into_iter().enumerate() {
        let bus = options.bus.unwrap_or(foreign.controllers[disk.controller].bus);
        let bus = if bus == Bus::Ide && definition.platform.chipset == Chipset::Q35 { Bus::Sata } else { bus };
        let wanted = if bus == foreign.controllers[disk.controller].bus { Some(disk.unit) } else { None };
        let group = if options.bus.is_some() { 0 } else { disk.controller };
        let (slot, unit) = places.place(group, bus, wanted).map_err(context)?;
        if wanted.is_some_and(|wanted| wanted != u32::from(unit)) && bus != Bus::Virtio {
            let reason = format!("QEMU's controller has only {} addresses; the disk's address is {unit}", bus.units());
            foreign.note(&*disk.label, Effect::Changed, reason);
        }
        let name = disk_name(&name, index);
        definition.disks.push(Disk { name: name.clone(), slot, bus, unit });
        disks.push(PlannedDisk { name, label: disk.label, content: disk.content, capacity: None, stated: disk.stated });
    }
    let new_addresses = cards(&mut foreign, &mut definition, options).map_err(context)?;
    let snapshots = plan_snapshots(&mut foreign, &disks);
    definition.version = definition.needed_version();
    definition.check().map_err(context)?;
    Ok(Plan {
        source,
        format: foreign.format,
        definition,
        disks,
        nvram: foreign.nvram.filter(|_| options.firmware.is_none_or(|firmware| firmware == Firmware::Uefi)),
        snapshots,
        notes: foreign.notes,
        new_addresses,
    })
}

/// Replaces the controller of the boot disk by one from which UEFI can boot: the firmware of distributions has no
/// drivers for VMware's controllers.
fn boot_controller(foreign: &mut Foreign, definition: &Definition, options: &Options) {
    let Some(disk) = foreign.disks.first() else { return };
    let controller = &mut foreign.controllers[disk.controller];
    let known = !matches!(controller.bus, Bus::Pvscsi | Bus::Lsi | Bus::Lsisas);
    if definition.platform.firmware != Firmware::Uefi || known || options.bus.is_some() || definition.boot.is_some() {
        return;
    }
    let reason = format!(
        "UEFI has no driver for {0} in most distributions; a SATA controller takes its place and needs the driver \
         ahci in the guest. --bus {0} keeps {0}, for a build of UEFI that has the driver",
        controller.bus.name()
    );
    let label = controller.label.clone();
    controller.bus = Bus::Sata;
    foreign.note(label, Effect::Replaced, reason);
}

/// The controllers that were placed so far: slots, with their units in use.
#[derive(Default)]
struct Places {
    taken: Vec<Place>,
}

struct Place {
    group: usize,
    bus: Bus,
    slot: u8,
    units: BTreeSet<u8>,
}

impl Places {
    /// Chooses a slot and a unit for a disk of a controller of the source.
    fn place(&mut self, group: usize, bus: Bus, wanted: Option<u32>) -> Result<(u8, u8)> {
        let wanted = wanted.and_then(|unit| u8::try_from(unit).ok()).filter(|unit| *unit < bus.units());
        let own = |place: &&mut Place| place.bus == bus && (place.group == group || bus == Bus::Ide);
        for place in self.taken.iter_mut().filter(own) {
            let free = wanted.filter(|unit| !place.units.contains(unit));
            let free = free.or_else(|| (0..bus.units()).find(|unit| !place.units.contains(unit)));
            if let Some(unit) = free {
                place.units.insert(unit);
                return Ok((place.slot, unit));
            }
        }
        let slot = match bus {
            Bus::Ide if self.taken.iter().all(|place| place.bus != Bus::Ide) => Some(IDE_SLOT),
            Bus::Ide => None,
            _ => DISK_SLOTS.clone().find(|slot| self.taken.iter().all(|place| place.slot != *slot)),
        };
        let Some(slot) = slot else {
            let text = format!(
                "its disks need more than {} controllers; --bus virtio-scsi puts the disks on one controller",
                DISK_SLOTS.len()
            );
            return Err(Error::new(ErrorKind::Unsupported, text));
        };
        let unit = wanted.unwrap_or(0);
        self.taken.push(Place { group, bus, slot, units: BTreeSet::from([unit]) });
        Ok((slot, unit))
    }
}

/// Adds the network cards; returns the addresses that were made for them.
fn cards(foreign: &mut Foreign, definition: &mut Definition, options: &Options) -> Result<Vec<Mac>> {
    let mut used: BTreeSet<Mac> = BTreeSet::new();
    let mut made = Vec::new();
    for card in std::mem::take(&mut foreign.cards) {
        let mac = match card.mac {
            Some(mac) if used.insert(mac) => mac,
            given => {
                if let Some(mac) = given {
                    let reason = format!("two cards have the address {mac}; the second card gets a new one");
                    foreign.note(&*card.label, Effect::Changed, reason);
                }
                let mac = Mac::new()?;
                made.push(mac);
                mac
            }
        };
        let link = if card.connected { options.link.clone() } else { Link::None };
        if card.connected && !card.network.is_empty() {
            let here = match &link {
                Link::User | Link::Forward(_) => "QEMU's user network".to_owned(),
                Link::None => "no network".to_owned(),
                Link::Bridge(bridge) => format!("bridge {bridge}"),
                Link::Tap(tap) => format!("tap device {tap}"),
            };
            let reason = format!("it was on '{}', and is on {here} here: see --network", card.network);
            foreign.note(&*card.label, Effect::Changed, reason);
        }
        definition.add_network(mac, link)?;
        if let Some(last) = definition.networks.last_mut() {
            last.model = options.card.unwrap_or(card.model);
        }
    }
    Ok(made)
}

fn plan_snapshots(foreign: &mut Foreign, disks: &[PlannedDisk]) -> Vec<PlannedSnapshot> {
    let mut names = BTreeSet::new();
    let mut all = Vec::new();
    for ForeignSnapshot { name: label, created, disks: labels } in std::mem::take(&mut foreign.snapshots) {
        let own =
            disks.iter().enumerate().filter(|(_, disk)| labels.iter().any(|it| it.eq_ignore_ascii_case(&disk.label)));
        let own: Vec<usize> = own.map(|(index, _)| index).collect();
        if own.is_empty() {
            foreign.note(format!("snapshot '{label}'"), Effect::LeftOut, "it has none of the machine's disks");
            continue;
        }
        let name = snapshot_name(&label, &mut names);
        if name != label {
            foreign.note(format!("snapshot '{label}'"), Effect::Changed, format!("its name is '{name}' here"));
        }
        all.push(PlannedSnapshot { name, label, created, disks: own });
    }
    all
}

/// Derives a valid machine name from any name.
pub fn machine_name(text: &str) -> String {
    let mut name = plain(text, "-");
    name.truncate(NAME_MAX);
    let name = name.trim_matches('-');
    if name.is_empty() { "machine".to_owned() } else { name.to_owned() }
}

/// Derives a valid snapshot name from any name, different from those in `names`.
fn snapshot_name(text: &str, names: &mut BTreeSet<String>) -> String {
    let base = plain(text, "-_.");
    let base = base.trim_start_matches(['-', '.']).trim_end_matches('-');
    let base = if base.is_empty() { "snapshot" } else { base };
    let mut number = 1;
    loop {
        let ending = if number == 1 { String::new() } else { format!("-{number}") };
        let mut name = base.to_owned();
        name.truncate(snapshots::NAME_MAX - ending.len());
        name.push_str(&ending);
        if names.insert(name.clone()) {
            return name;
        }
        number += 1;
    }
}

/// Keeps ASCII letters, digits and the characters in `also`; each run of other characters becomes one hyphen.
fn plain(text: &str, also: &str) -> String {
    let mut name = String::new();
    for c in text.trim().chars() {
        match c.is_ascii_alphanumeric() || also.contains(c) {
            true => name.push(c),
            false if name.ends_with('-') => {}
            false => name.push('-'),
        }
    }
    name
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn disks_keep_their_addresses_where_qemu_has_them() {
        let mut places = Places::default();
        for (group, bus, wanted, expected) in [
            (0, Bus::Pvscsi, Some(0), (8, 0)),
            (0, Bus::Pvscsi, Some(15), (8, 15)),
            (1, Bus::Pvscsi, Some(0), (9, 0)),
            (2, Bus::Lsi, Some(8), (10, 0)),
            (2, Bus::Lsi, Some(0), (10, 1)),
            (3, Bus::Ide, Some(2), (IDE_SLOT, 2)),
            (4, Bus::Sata, None, (11, 0)),
            (4, Bus::Sata, Some(30), (11, 1)),
            (5, Bus::Virtio, Some(0), (12, 0)),
            (5, Bus::Virtio, Some(0), (13, 0)),
            (6, Bus::Nvme, Some(1), (14, 1)),
            (7, Bus::Lsisas, Some(7), (15, 7)),
        ] {
            assert_eq!(places.place(group, bus, wanted).unwrap(), expected, "{group} {bus:?} {wanted:?}");
        }
        assert_eq!(places.place(9, Bus::Sata, Some(0)).unwrap_err().kind(), ErrorKind::Unsupported);
        assert_eq!(places.place(3, Bus::Ide, Some(2)).unwrap(), (IDE_SLOT, 0));
    }

    #[test]
    fn names_become_valid() {
        for (from, to) in [("Web Server 01", "Web-Server-01"), ("a_b (old)", "a-b-old"), ("ü", "machine"), ("-x-", "x")]
        {
            assert_eq!(machine_name(from), to);
            crate::definition::check_name(to).unwrap();
        }
        assert_eq!(machine_name(&"x".repeat(100)).len(), NAME_MAX);
        let mut names = BTreeSet::new();
        for (from, to) in
            [("before the update", "before-the-update"), ("a/b", "a-b"), ("a b", "a-b-2"), ("", "snapshot")]
        {
            assert_eq!(snapshot_name(from, &mut names), to);
            snapshots::check_name(to).unwrap();
        }
    }
}
