//! Export of a machine: its disks and a description of it in one OVA archive.
//!
//! The archive has a temporary name until all of it is durable. After an error or an interruption no file remains.

use super::archive::{BUFFER, HARDWARE, NewFile, Output, SYSTEM, archive_options, embedded, stem, take_all};
use super::copy::{Pieces, Sink, Source, copy};
use super::{Converted, TargetFormat, disk_source, target};
use crate::Datastore;
use error::{Error, ErrorKind, IoContext, Result};
use layer::SECTOR;
use layer::descriptor::storage;
use layer::ova::{Controller, Machine, Network, OvaWriter, PlannedDisk};
use serde::{Deserialize, Serialize};
use std::io::{BufWriter, Seek, Write};
use std::path::PathBuf;
use std::sync::Arc;
use work::{Progress, Throttled, WorkPart, WorkPlace};

/// The controller of all disks in the description.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ArchiveController {
    /// LSI Logic SCSI.
    LsiLogic,
    /// LSI Logic SAS.
    LsiSas,
    /// VMware's paravirtual SCSI.
    ParaVirtual,
    /// SATA.
    Sata,
    /// IDE.
    Ide,
    /// NVMe.
    Nvme,
}

/// A network card in the description.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ArchiveCard {
    /// The card's kind, by VMware's name.
    pub adapter: String,
    /// The card's network.
    pub network: String,
    /// The card's MAC address.
    pub mac: String,
}

/// The machine in the description.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ArchiveMachine {
    /// The machine's name.
    pub name: String,
    /// Virtual processors.
    pub cpus: u32,
    /// Memory in bytes.
    pub memory: u64,
    /// The controller of all disks of the machine.
    pub controller: ArchiveController,
    /// The machine's network cards.
    pub cards: Vec<ArchiveCard>,
    /// Whether the machine has UEFI.
    pub uefi: bool,
    /// Whether UEFI starts signed boot loaders only.
    pub secure_boot: bool,
}

/// An archive to write.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ArchiveExport {
    /// The archive, `NAME.ova`, which must not exist.
    pub path: PathBuf,
    /// The machine to be exported.
    pub machine: ArchiveMachine,
    /// The machine's disks: `DISK` or `DISK@SNAPSHOT`.
    pub disks: Vec<String>,
    /// Limit in bytes per second; 0 for none.
    pub rate: u64,
}

impl ArchiveExport {
    /// Writes the archive.
    pub fn run(&self, datastore: &Datastore, progress: &dyn Progress) -> Result<Converted> {
        let names = || self.disks.iter().map(|name| crate::names::split(name).0);
        let _uses = names().map(|disk| datastore.uses.share(disk)).collect::<Result<Vec<_>>>()?;
        let (folder, name) = target::folder_of(&self.path)?;
        let Some(stem) = stem(&name).map(str::to_owned) else {
            let text = format!("'{}' is not the name of an archive: use NAME.ova", name.escape_debug());
            return Err(Error::new(ErrorKind::Invalid, text));
        };
        storage::sweep_one(&**folder.directory(), &name)?;
        let sources = self.disks.iter().map(|disk| disk_source(datastore, disk)).collect::<Result<Vec<_>>>()?;
        let mut planned = Vec::with_capacity(sources.len());
        for (number, source) in (1..).zip(&sources) {
            let (file, capacity) = (format!("{stem}-disk{number}.vmdk"), source.capacity().next_multiple_of(SECTOR));
            let descriptor = embedded(&file, capacity)?;
            planned.push(PlannedDisk { file, capacity, descriptor });
        }
        let capacity = planned.iter().map(|disk| disk.capacity).sum();
        let new = NewFile { folder, name };
        let (file, _lock) = new.create()?;
        let out = BufWriter::with_capacity(BUFFER, Output { file: Arc::clone(&file), position: 0 });
        let copied =
            OvaWriter::new(out, &stem, self.machine.described(), planned, archive_options()).and_then(|writer| {
                let throttled = Throttled { progress, rate: self.rate };
                write(writer, sources, capacity, &throttled)
            });
        match copied {
            Ok(copied) => {
                new.finish(&*file)?;
                let target = self.path.display().to_string();
                let (format, files) = (TargetFormat::Ova, vec![self.path.clone()]);
                Ok(Converted { target, format, capacity, copied, files, warnings: Vec::new(), lost: Vec::new() })
            }
            Err(error) => {
                new.abandon();
                Err(error)
            }
        }
    }
}

fn write<W: Write + Seek + Send>(
    mut writer: OvaWriter<W>,
    sources: Vec<Box<dyn Source + '_>>,
    total: u64,
    progress: &dyn Progress,
) -> Result<u64> {
    let (mut before, mut copied) = (0, 0);
    for source in sources {
        let capacity = source.capacity();
        let part = WorkPart { whole: progress, place: WorkPlace::Behind { before, total } };
        copied += copy(source, Box::new(MemberSink(&mut writer)), &part)?;
        before += capacity;
    }
    writer.finish()?.flush().during(|| "writing the archive".into())?;
    Ok(copied)
}

impl ArchiveMachine {
    fn described(&self) -> Machine {
        let card = |card: &ArchiveCard| Network {
            name: card.network.clone(),
            adapter: card.adapter.clone(),
            mac: Some(card.mac.clone()),
        };
        let mut settings = Vec::new();
        if self.uefi {
            settings.push(("firmware".to_owned(), "efi".to_owned()));
            settings.push(("uefi.secureBoot.enabled".to_owned(), self.secure_boot.to_string()));
        }
        Machine {
            name: self.name.clone(),
            processors: self.cpus,
            memory_mib: self.memory >> 20,
            hardware: HARDWARE.to_owned(),
            system: SYSTEM,
            controller: match self.controller {
                ArchiveController::LsiLogic => Controller::LsiLogic,
                ArchiveController::LsiSas => Controller::LsiSas,
                ArchiveController::ParaVirtual => Controller::ParaVirtual,
                ArchiveController::Sata => Controller::Sata,
                ArchiveController::Ide => Controller::Ide,
                ArchiveController::Nvme => Controller::Nvme,
            },
            networks: self.cards.iter().map(card).collect(),
            settings,
        }
    }
}

/// The sink for one disk of an archive.
struct MemberSink<'a, W: Write + Seek>(&'a mut OvaWriter<W>);

impl<W: Write + Seek + Send> Sink for MemberSink<'_, W> {
    fn unit(&self) -> u64 {
        // The grain size of streamOptimized disks.
        64 << 10
    }

    fn fill(&mut self, pieces: &mut Pieces<'_>) -> Result<()> {
        self.0.add_disk(|disk| take_all(disk, pieces))
    }

    fn finish(self: Box<Self>, _: &dyn Progress) -> Result<()> {
        Ok(())
    }

    fn abandon(self: Box<Self>) {}
}
