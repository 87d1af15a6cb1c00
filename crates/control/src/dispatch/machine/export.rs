//! Writing a machine into an OVA archive, for other programs.

use super::Work;
use crate::dispatch::dispatch;
use crate::message::{MachineReply, Reply, Request};
use disk::convert::{ArchiveCard, ArchiveController, ArchiveExport, ArchiveMachine};
use error::{Error, ErrorKind, Result};
use std::path::PathBuf;
use vm::clone::Source;
use vm::definition::{Bus, Card, Definition, Firmware, Link};
use vm::import::{Effect, Note};

impl Work<'_> {
    /// Writes the archive. A running machine changes its disks, so only its snapshots can be exported.
    pub fn export(&self, source: &Source, path: PathBuf, rate: u64) -> Result<MachineReply> {
        let (host, name) = (&self.host, source.machine.clone());
        // The lock is held until the archive is written, so that the machine does not start meanwhile.
        let change = if source.snapshot.is_none() { Some(host.change(&name)?) } else { None };
        let runs = change.as_ref().is_some_and(|change| !matches!(change.machine().process(), Ok(None)));
        let definition = source.definition(host)?;
        let disks = match &source.snapshot {
            Some(_) => source.point(host)?.disks.into_iter().map(|one| format!("{}@{}", one.disk, one.name)).collect(),
            None if runs => {
                let text = format!("machine '{name}' runs: stop it, or export a snapshot of it, {name}@SNAPSHOT");
                return Err(Error::new(ErrorKind::WrongState, text));
            }
            None => definition.disk_names(),
        };
        let mut notes = Vec::new();
        let machine = described(&definition, &mut notes);
        let export = ArchiveExport { path: path.clone(), machine, disks, rate };
        match dispatch(self.target, Request::ExportArchive(Box::new(export)), self.watch)? {
            Reply::Converted(made) => {
                Ok(MachineReply::Exported { machine: name, archive: path, capacity: made.capacity, notes })
            }
            other => Err(super::disks::unexpected(&other)),
        }
    }
}

/// The machine as an OVF descriptor for VMware describes it; `notes` receives the differences.
fn described(definition: &Definition, notes: &mut Vec<Note>) -> ArchiveMachine {
    let mut note = |item: &str, effect: Effect, reason: &str| {
        notes.push(Note { item: item.to_owned(), effect, reason: reason.to_owned() });
    };
    let first = definition.disks.first().map_or(Bus::Sata, |disk| disk.bus);
    let controller = match first {
        Bus::Virtio | Bus::VirtioScsi => {
            note(
                "disks",
                Effect::Replaced,
                "VMware has no virtio; the disks are on SATA, and the guest needs the driver ahci",
            );
            ArchiveController::Sata
        }
        Bus::Pvscsi => ArchiveController::ParaVirtual,
        Bus::Lsi => {
            note("disks", Effect::Replaced, "VMware has no LSI 53C895A; the disks are on its LSI Logic controller");
            ArchiveController::LsiLogic
        }
        Bus::Lsisas => ArchiveController::LsiSas,
        Bus::Ide => ArchiveController::Ide,
        Bus::Sata => ArchiveController::Sata,
        Bus::Nvme => ArchiveController::Nvme,
    };
    if definition.disks.iter().any(|disk| disk.bus != first) {
        note("disks", Effect::Changed, "all disks are on controllers of the kind of the first disk's controller");
    }
    if definition.boot.is_some() {
        note("boot", Effect::LeftOut, "VMware loads no kernel without a boot loader");
    }
    if !definition.arguments.is_empty() {
        note("QEMU arguments", Effect::LeftOut, "VMware has no such options");
    }
    if !definition.cdroms.is_empty() {
        note("CD-ROM drives", Effect::LeftOut, "the archive has only the disks");
    }
    let uefi = definition.platform.firmware == Firmware::Uefi;
    if uefi {
        note("nvram", Effect::LeftOut, "VMware's file of firmware variables has another format");
    }
    let mut cards = Vec::new();
    for card in &definition.networks {
        let adapter = match card.model {
            Card::Vmxnet3 => "VmxNet3",
            Card::E1000 => "E1000",
            Card::E1000e => "E1000e",
            Card::Pcnet => "PCNet32",
            Card::Virtio | Card::Rtl8139 => {
                note(
                    &card.mac.to_string(),
                    Effect::Replaced,
                    "VMware has no such card; the exported machine has an E1000e",
                );
                "E1000e"
            }
        };
        let network = match &card.link {
            Link::Bridge(name) | Link::Tap(name) => name.clone(),
            Link::User | Link::Forward(_) | Link::None => "VM Network".to_owned(),
        };
        cards.push(ArchiveCard { adapter: adapter.to_owned(), network, mac: card.mac.to_string() });
    }
    ArchiveMachine {
        name: definition.name.clone(),
        cpus: definition.cpus,
        memory: definition.memory,
        controller,
        cards,
        uefi,
        secure_boot: definition.platform.secure_boot,
    }
}
