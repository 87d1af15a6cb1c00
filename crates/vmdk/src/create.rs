//! Creating a disk: its parameters, its name, its base image and its first record.

use crate::disk::{Disk, Options};
use crate::owner::Owner;
use crate::record::{Fate, FileRecord, ImageOwnership, Node, Pending, Record, Tunables};
use crate::stored;
use crate::{DeltaFormat, Error, ErrorKind, Result};
use backend::clock;
use layer::descriptor::Adapter;
use layer::descriptor::storage::NEW_SUFFIX;
use layer::image::{Entropy, Folder, Image, ImageKind, NewImage, create};
use std::sync::Arc;
use work::Progress;

/// Longest name of a disk or snapshot, in bytes.
const NAME_MAX: usize = 200;

/// Parameters of a new disk.
#[derive(Clone, Debug)]
pub struct NewDisk {
    /// The name of the disk, from which the names of its files are derived.
    pub name: String,
    /// Capacity in bytes.
    pub capacity: u64,
    /// The format of the base.
    pub kind: ImageKind,
    /// The format of deltas; `None` for the format that vSphere uses.
    pub delta: Option<DeltaFormat>,
    /// The adapter for which the geometry is computed.
    pub adapter: Adapter,
}

impl NewDisk {
    /// Parameters with the default adapter.
    pub fn new(name: &str, capacity: u64, kind: ImageKind, delta: Option<DeltaFormat>) -> Self {
        Self { name: name.to_owned(), capacity, kind, delta, adapter: Adapter::default() }
    }
}

impl Disk {
    /// Creates a disk in a folder of its own. Durable on return; nothing is left after an error.
    pub fn create(home: Folder, new: &NewDisk, options: &Options, progress: &dyn Progress) -> Result<Arc<Self>> {
        check_name("disk", &new.name)?;
        let (name, format) = match new.kind {
            ImageKind::Raw => (format!("{}.img", new.name), Some("raw".to_owned())),
            _ => (format!("{}.vmdk", new.name), None),
        };
        let delta = new.delta.unwrap_or_else(|| DeltaFormat::usual(new.capacity));
        let mut fresh = fresh_record(&new.name, new.kind.name(), delta, new.adapter, options);
        let usual = NewImage::new(&name, new.capacity, new.kind);
        let piece = options.piece.unwrap_or(usual.piece);
        let image = NewImage { adapter: new.adapter, mode: options.mode, piece, ..usual };
        let random = &mut || (options.random)();
        let extents = image.descriptor(random)?.map(|descriptor| descriptor.extents).unwrap_or_default();
        let extents = extents.into_iter().filter_map(|extent| extent.file);
        let names = [name.clone(), format!("{name}{NEW_SUFFIX}")].into_iter().chain(extents);
        let made = names.map(|name| FileRecord { folder: None, name }).collect();
        fresh.pending = Some(Pending { made, fate: Some(Fate::Creating), ..Pending::new("create") });
        let disk = Self::begin_new(home, fresh, options)?;
        let made = create(&disk.home, &image, random, progress);
        disk.end_new(made.and_then(|_| {
            let mut next = disk.record();
            next.nodes.push(Node {
                id: 1,
                parent: None,
                folder: None,
                descriptor: name.clone(),
                format,
                standing: ImageOwnership::Made,
                accepted: None,
                replay: false,
            });
            next.head = 1;
            next.pending = None;
            disk.commit(next)
        }))?;
        Ok(Arc::new(disk))
    }

    /// Begins the creation of a disk: writes its record, which states that the disk is being created.
    pub(crate) fn begin_new(home: Folder, record: Record, options: &Options) -> Result<Self> {
        let owner = Owner::lock(&home)?;
        let directory = &**home.directory();
        match stored::load(directory) {
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            _ => {
                let text = format!("the folder of disk '{}' has a disk already", record.name);
                return Err(Error::new(ErrorKind::Exists, text));
            }
        }
        if let Some(pending) = &record.pending {
            let names = crate::images::list(directory)?;
            if let Some(there) = pending.made.iter().find(|file| file.folder.is_none() && names.contains(&file.name)) {
                let text = format!("there is a file '{}' already", there.name);
                return Err(Error::new(ErrorKind::Exists, text));
            }
        }
        let disk = Self::assemble(home, record.clone(), options, owner);
        disk.commit(record)?;
        Ok(disk)
    }

    /// Ends the creation of a disk; a failed creation is undone.
    pub(crate) fn end_new(&self, outcome: Result<()>) -> Result<()> {
        let Err(error) = outcome else { return Ok(()) };
        if !self.state.lock().failed {
            // The next opening removes the files that remain.
            if let Err(second) = self.forget() {
                tracing::warn!(%second, "files of an unfinished disk could not be removed");
            }
        }
        Err(error)
    }
}

/// The record of a new disk without images.
pub(crate) fn fresh_record(name: &str, kind: &str, delta: DeltaFormat, adapter: Adapter, options: &Options) -> Record {
    Record {
        name: name.to_owned(),
        uuid: new_uuid(&options.random),
        created: clock::seconds(),
        stem: name.to_owned(),
        kind: kind.to_owned(),
        delta,
        adapter: adapter.name().to_owned(),
        read_only: false,
        vmsd: true,
        head: 0,
        nodes: Vec::new(),
        snapshots: Vec::new(),
        last_uid: 0,
        tunables: Tunables::default(),
        overlay: None,
        origin: None,
        clones: Vec::new(),
        permitted: Vec::new(),
        pending: None,
    }
}

/// A random UUID (RFC 9562, version 4).
fn new_uuid(random: &Entropy) -> String {
    let number = u128::from(random()) << 64 | u128::from(random());
    uuid::Builder::from_random_bytes(number.to_be_bytes()).into_uuid().to_string()
}

/// Checks the name of a disk or snapshot, which is used in file names and, quoted, in VMware's lists.
pub(crate) fn check_name(what: &str, name: &str) -> Result<()> {
    let refused = |c: char| c.is_control() || matches!(c, '/' | '\\' | '"' | '@');
    if name.is_empty() || name.len() > NAME_MAX || name.starts_with(['.', '-']) || name.contains(refused) {
        let text = format!(
            "'{}' cannot name a {what}: 1 to {NAME_MAX} bytes, no slash, backslash, quote, @ or control character, no \
             dot or dash in front",
            name.escape_debug()
        );
        return Err(Error::new(ErrorKind::Invalid, text));
    }
    Ok(())
}

/// The adapter type in the descriptor of a base image.
pub(crate) fn adapter_of(image: &Image) -> Adapter {
    let descriptor = image.descriptor();
    let name = descriptor.as_ref().and_then(|descriptor| descriptor.database.get("ddb.adapterType"));
    name.and_then(Adapter::named).unwrap_or_default()
}
