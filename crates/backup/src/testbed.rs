//! What the tests share: a datastore with a disk whose content is known, and a manifest for the format page.

#![allow(clippy::unwrap_used)]

use crate::machine::{MachineDescription, MachineDisk, MachineFile};
use crate::manifest::{Description, Manifest, PackRecord, Parent};
use crate::{Chain, CreateOptions, Repository};
use backend::simulated::SimulatedDisk;
use disk::transfer::{Outgoing, SEGMENT, SnapshotIdentity};
use disk::{Datastore, InitOptions, NewDisk, NoProgress, OpenOptions, Provisioning, QueueChoice, SnapshotOptions};
use std::sync::Arc;
use testkit::Random;

pub const BLOCK: u64 = 4096;

/// The manifest that the format page shows.
pub fn manifest(capacity: u64) -> Manifest {
    let point = |last: u8, name: &str, created: u64| SnapshotIdentity {
        uuid: format!("0f0e0d0c-0b0a-4908-8706-0504030201{last:02}"),
        name: name.into(),
        created,
    };
    let parent = Parent {
        backup: Some("0f0e0d0c-0b0a-4908-8706-050403020104".into()),
        point: point(3, "sunday", 1_794_813_600),
    };
    Manifest {
        backup: Description {
            id: "0f0e0d0c-0b0a-4908-8706-050403020101".into(),
            disk: "größe".into(),
            capacity,
            provisioning: Provisioning::Thin,
            point: point(2, "monday", 1_794_900_000),
            parent: Some(parent),
            key: None,
            begun: 1_794_900_060,
            number: 7,
            program: "lamina 0.1.0".into(),
            machine: None,
        },
        finished: 1_794_900_075,
        data: 33_554_432,
        zeros: 8192,
        packs: vec![
            PackRecord { end: 2, length: 17_563_648, sum: 3_735_928_559 },
            PackRecord { end: 3, length: 1_048_576, sum: 195_948_557 },
        ],
        disks: Vec::new(),
    }
}

/// The manifest of a machine that the format page shows.
pub fn machine_manifest() -> Manifest {
    let mut manifest = manifest(541_484);
    let file = |name: &str, length| MachineFile { name: name.into(), length };
    manifest.backup = Description {
        id: "0f0e0d0c-0b0a-4908-8706-050403020107".into(),
        disk: "web".into(),
        parent: None,
        number: 9,
        machine: Some(MachineDescription {
            uuid: "1d9e3a7c-5b0e-4a44-9d0f-0f6f1c2f7a11".into(),
            consistency: "quiesced".into(),
            files: vec![file("machine.toml", 812), file("nvram", 540_672)],
        }),
        ..manifest.backup
    };
    manifest.data = 544_768;
    manifest.zeros = 0;
    manifest.packs = vec![PackRecord { end: 1, length: 3120, sum: 3_405_691_582 }];
    let disk = |disk: &str, last: u8| MachineDisk {
        disk: disk.into(),
        backup: format!("0f0e0d0c-0b0a-4908-8706-0504030201{last:02}"),
    };
    manifest.disks = vec![disk("größe", 1), disk("daten", 6)];
    manifest
}

/// Packs of little more than a segment, so that a small disk has several.
pub const SMALL_PACKS: CreateOptions<'_> = CreateOptions { level: 1, rate: 0, pack: 1, key: None };

/// A datastore with the disk `vm`.
pub struct Fixture {
    _folder: tempfile::TempDir,
    pub datastore: Arc<Datastore>,
    /// Content of the disk.
    pub content: Vec<u8>,
}

impl Fixture {
    /// A datastore without disks.
    pub fn empty(capacity: u64) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("store");
        Datastore::init(&path, InitOptions { journal_size: 8 << 20 }).unwrap();
        let options = OpenOptions {
            mode: backend::IoMode::Buffered,
            queue: QueueChoice::Auto,
            metadata_cache: 16 << 20,
            write_buffer: 8 << 20,
            read_cache: Some(1 << 20),
        };
        let datastore = Datastore::open(&path, options).unwrap();
        Self { _folder: folder, datastore, content: vec![0; capacity as usize] }
    }

    /// A datastore with a disk that has some random blocks in each segment.
    pub fn new(capacity: u64, seed: u64) -> Self {
        let mut fixture = Self::empty(capacity);
        fixture.datastore.create_disk("vm", &NewDisk::native(capacity, Provisioning::Thin), &NoProgress).unwrap();
        let mut random = Random::new(seed);
        for segment in 0..capacity.div_ceil(SEGMENT) {
            let length = SEGMENT.min(capacity - segment * SEGMENT);
            for _ in 0..6 {
                let blocks = 1 + random.below(12);
                let at = segment * SEGMENT + random.below(length / BLOCK) * BLOCK;
                let length = (blocks * BLOCK).min(capacity - at) as usize;
                fixture.write(at, &random.bytes(length));
            }
        }
        let last = capacity / 512 * 512 - 512;
        fixture.write(last, &[0xab; 512]);
        fixture
    }

    pub fn write(&mut self, at: u64, bytes: &[u8]) {
        let device = self.datastore.device("vm", false).unwrap();
        let data = backend::SharedSlice::copy_of(bytes);
        device.write(at, data, false).unwrap();
        self.content[at as usize..at as usize + bytes.len()].copy_from_slice(bytes);
    }

    pub fn discard(&mut self, at: u64, length: u64) {
        self.datastore.device("vm", false).unwrap().discard(at, length, false).unwrap();
        self.content[at as usize..(at + length) as usize].fill(0);
    }

    /// Takes a snapshot; returns its content.
    pub fn snapshot(&self, name: &str) -> Vec<u8> {
        self.datastore.create_snapshots(&[("vm".into(), name.into())], &SnapshotOptions::default()).unwrap();
        self.content.clone()
    }

    pub fn outgoing(&self, name: &str) -> Outgoing {
        self.datastore.outgoing("vm", name).unwrap()
    }

    /// The content of a disk or snapshot.
    pub fn content_of(&self, export: &str) -> Vec<u8> {
        let device = self.datastore.device(export, true).unwrap();
        let mut content = Vec::new();
        for at in (0..device.capacity()).step_by(1 << 20) {
            let length = (1 << 20).min(device.capacity() - at);
            content.extend(device.read(at, length as usize).unwrap());
        }
        content
    }
}

/// Everything that a chain contains.
pub fn content_of(chain: &mut Chain) -> Vec<u8> {
    let mut content = Vec::new();
    let mut buffer = vec![0; SEGMENT as usize];
    for number in 0..chain.segments() {
        let plan = chain.plan(number).unwrap();
        chain.read(&plan, &mut buffer).unwrap();
        content.extend_from_slice(&buffer);
    }
    content.truncate(chain.capacity() as usize);
    content
}

/// Changes a repository as if the attempt that made a backup had been killed after it renamed the manifest, and before
/// it flushed the folder.
pub fn kill_before_the_last_flush(disk: &SimulatedDisk, repository: &Repository, backup: &str) {
    let (directory, name) = (disk.directory(), format!("backup-{backup}"));
    let length = repository.objects().length(&name).unwrap().unwrap();
    let manifest = repository.objects().read(&name, 0..length).unwrap();
    directory.remove(&name).unwrap();
    directory.sync().unwrap();
    backend::replace::prepare(&*directory, "manifest", &manifest).unwrap();
    directory.rename("manifest", &name).unwrap();
}
