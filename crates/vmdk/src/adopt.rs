//! Adopting: images made by another program become a disk, with the whole tree of their snapshots.
//!
//! The chain below the named image is opened by following the parent hints. If the folder has a list of snapshots
//! (`.vmsd`), the images that the list names are opened too, each with its chain. Chains that end in the base of the
//! named image are other branches of the same disk. The list is checked against the images: an entry is ignored if its
//! image is missing, or belongs to another disk of the machine.
//!
//! 1. Adopting changes nothing outside the record's folder.
//! 2. Three kinds of images are never written: images in other folders than that of the named image, the image of a
//!    snapshot (another image may have it as its parent), and every image unless the caller has requested write access.

use crate::create::{adapter_of, check_name, fresh_record};
use crate::disk::{Disk, Options};
use crate::images::format_name;
use crate::record::{Fate, ImageOwnership, NODES_MAX, Node, Pending, Record, SnapshotRecord};
use crate::vmsd::{self, Vmsd};
use crate::{DeltaFormat, Error, ErrorKind, Result};
use backend::{Access, IoMode};
use error::IoContext;
use error::text::is_hidden;
use layer::image::{Folder, Image, ImageKind, OpenOptions, Place, open_chain};
use layer::sesparse::DirtyJournal;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// The most lists of snapshots that are read in a folder.
const LISTS_MAX: usize = 16;

/// How adopted images are used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Adopt {
    /// The disk is read and written.
    Head {
        /// If true, writes are made in the named image itself, and snapshots in its folder may be merged. If false, no
        /// adopted image is ever changed: writes are made in a new delta of this disk.
        writable: bool,
    },
    /// The disk is only read.
    ReadOnly,
}

/// The part of the image tree that was found already.
struct Tree<'a> {
    options: OpenOptions,
    home: &'a Folder,
    named: Folder,
    writable: bool,
    nodes: Vec<Node>,
    known: HashMap<String, u32>,
}

impl Disk {
    /// Makes a disk of existing images. `what` is the image that the machine writes: its newest delta.
    pub fn adopt(home: Folder, name: &str, what: &Place, how: Adopt, options: &Options) -> Result<Arc<Self>> {
        check_name("disk", name)?;
        let writable = matches!(how, Adopt::Head { writable: true });
        let probing = OpenOptions {
            mode: options.mode,
            levels_max: chain::limits::LEVELS_MAX,
            force: options.force_parent,
            journal: match options.replay_journal {
                true => DirtyJournal::Replay,
                false => DirtyJournal::Refuse,
            },
            random: Arc::clone(&options.random),
            ..OpenOptions::default()
        };
        let mut tree = Tree {
            options: probing,
            home: &home,
            named: what.folder.clone(),
            writable,
            nodes: Vec::new(),
            known: HashMap::new(),
        };
        let named = OpenOptions { format: options.adopted, ..tree.options.clone() };
        let images = open_chain(what.clone(), &named)?.into_images();
        let top = tree.take(&images)?;
        let (Some(head), Some(base)) = (images.first(), images.last()) else {
            return Err(Error::new(ErrorKind::Corrupt, "a chain without images"));
        };
        let capacity = head.layer().capacity();
        let kind = ImageKind::of(base).map_or_else(|| base.layer().format().to_owned(), |kind| kind.name().to_owned());
        let delta = delta_of(&images).map_or_else(|| DeltaFormat::usual(capacity), |delta| delta.holding(capacity));
        let mut record = fresh_record(name, &kind, delta, adapter_of(base), options);
        let base_label = base.place().label();
        drop(images);
        tree.snapshots(&what.folder, &base_label, &mut record)?;
        record.nodes = tree.nodes;
        record.head = top;
        record.permitted = options.permitted.iter().filter_map(|path| path.to_str().map(str::to_owned)).collect();
        let names = crate::images::list(&**home.directory())?;
        // An existing list is not replaced, because it may contain more than this disk, such as other disks of the
        // machine.
        record.vmsd = !names.contains(&format!("{}.vmsd", record.stem));
        record.read_only = how == Adopt::ReadOnly;
        let stands = record.snapshot_of(top).is_some() || !record.children(top).is_empty();
        let own_delta = how == Adopt::Head { writable: false } || (writable && stands);
        record.pending = Some(Pending { fate: Some(Fate::Creating), ..Pending::new("adopt") });
        if record.read_only && !record.children(top).is_empty() {
            let text = format!("'{}' has children: adopt the newest image of the disk", what.label());
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        let disk = Self::begin_new(home.clone(), record, options)?;
        let made = (|| {
            if own_delta {
                return disk.begin_above(top, delta, capacity, "adopt");
            }
            let mut after = disk.record();
            after.pending = None;
            disk.commit(after)
        })();
        disk.end_new(made)?;
        disk.write_list();
        Ok(Arc::new(disk))
    }
}

/// If the image records another parent CID than that of the image below, the CID of the image below. This is possible
/// only if the opening was forced.
fn changed_parent(image: &Image, below: &Image) -> Option<u32> {
    let (wanted, found) = (image.parent()?.content?, below.descriptor()?.content);
    (found != wanted).then(|| found.number())
}

impl Tree<'_> {
    /// Adds a chain, newest first, to the tree. Returns the number of its top.
    fn take(&mut self, images: &[Image]) -> Result<u32> {
        let mut parent = None;
        for (index, image) in images.iter().enumerate().rev() {
            let below = images.get(index + 1);
            let label = image.place().label();
            if let Some(id) = self.known.get(&label) {
                parent = Some(*id);
                continue;
            }
            if self.nodes.len() >= NODES_MAX {
                return Err(Error::new(ErrorKind::Unsupported, format!("'{label}' exceeds the limit of images")));
            }
            let id = self.nodes.len() as u32 + 1;
            let folder = &image.place().folder;
            let beside = folder.path() == self.named.path();
            let reference = match folder.path() {
                path if path == self.home.path() => None,
                Some(path) => {
                    let text = || format!("the path '{}' is not UTF-8", path.display());
                    let path = path.to_str().ok_or_else(|| Error::new(ErrorKind::Invalid, text()))?;
                    Some(path.to_owned())
                }
                None => None,
            };
            self.nodes.push(Node {
                id,
                parent,
                folder: reference,
                descriptor: image.place().name.clone(),
                format: format_name(image),
                standing: if self.writable && beside { ImageOwnership::Adopted } else { ImageOwnership::Foreign },
                accepted: below.and_then(|below| changed_parent(image, below)),
                replay: self.options.journal == DirtyJournal::Replay && image.layer().format() == "sesparse",
            });
            self.known.insert(label, id);
            parent = Some(id);
        }
        parent.ok_or_else(|| Error::new(ErrorKind::Corrupt, "a chain without images"))
    }

    /// Adds the snapshots of this disk that the lists in a folder name.
    fn snapshots(&mut self, folder: &Folder, base: &str, record: &mut Record) -> Result<()> {
        let names = crate::images::list(&**folder.directory())?;
        let lists = names.iter().filter(|name| name.to_ascii_lowercase().ends_with(".vmsd")).take(LISTS_MAX);
        for name in lists {
            let place = Place { folder: folder.clone(), name: name.clone() };
            let list = match read_list(&place) {
                Ok(list) => list,
                Err(error) => {
                    tracing::warn!(%error, list = name, "a list of snapshots is ignored");
                    continue;
                }
            };
            let before = record.snapshots.len();
            self.take_list(folder, base, &list, record);
            if record.snapshots.len() > before {
                record.last_uid = record.last_uid.max(list.last_uid);
                return Ok(());
            }
        }
        Ok(())
    }

    fn take_list(&mut self, folder: &Folder, base: &str, list: &Vmsd, record: &mut Record) {
        let mut names: HashSet<String> = HashSet::new();
        // The bases of other disks of the machine, so that each of these disks is opened only once.
        let mut strange: HashSet<String> = HashSet::new();
        for snapshot in &list.snapshots {
            let found = snapshot.disks.iter().find_map(|disk| self.find(folder, base, &disk.file, &mut strange));
            let Some((node, capacity)) = found else { continue };
            let name = unique(&snapshot.name, snapshot.uid, &mut names);
            let listed = (name != snapshot.name).then(|| snapshot.name.clone());
            if let Some(listed) = &listed {
                tracing::warn!("the snapshot that its list calls '{}' is called '{name}' here", listed.escape_debug());
            }
            record.last_uid = record.last_uid.max(snapshot.uid);
            record.snapshots.push(SnapshotRecord {
                name,
                listed,
                uid: snapshot.uid,
                node,
                created: snapshot.created,
                capacity,
                description: snapshot.description.clone(),
            });
        }
    }

    /// The image that a list names, if it belongs to this disk.
    fn find(&mut self, folder: &Folder, base: &str, file: &str, strange: &mut HashSet<String>) -> Option<(u32, u64)> {
        let place = folder.resolve(file).ok()?;
        let label = place.label();
        if strange.contains(&label) {
            return None;
        }
        if let Some(id) = self.known.get(&label) {
            let image = Image::open(place, &self.options).ok()?;
            return Some((*id, image.layer().capacity()));
        }
        let images = match open_chain(place, &self.options) {
            Ok(chain) => chain.into_images(),
            Err(error) => {
                tracing::warn!(%error, "an image that a list of snapshots names is ignored");
                strange.insert(label);
                return None;
            }
        };
        if images.last().is_none_or(|image| image.place().label() != base) {
            strange.insert(label);
            return None;
        }
        let capacity = images.first()?.layer().capacity();
        Some((self.take(&images).ok()?, capacity))
    }
}

pub(crate) fn read_list(place: &Place) -> Result<Vmsd> {
    let file = place.open(IoMode::Buffered, Access::Read)?;
    let length = file.len().during(|| format!("determining the length of '{}'", place.label()))?;
    if length > vmsd::TEXT_MAX as u64 {
        return Err(Error::new(ErrorKind::Corrupt, format!("'{}' has {length} bytes: too many", place.label())));
    }
    let mut bytes = vec![0; length as usize];
    file.read_at(&mut bytes, 0).during(|| format!("reading '{}'", place.label()))?;
    Vmsd::parse(&bytes).map_err(|error| error.context(format!("'{}'", place.label())))
}

/// A valid snapshot name that this disk has not used yet: VMware permits any name, and the same name several times.
pub(crate) fn unique(name: &str, uid: u32, names: &mut HashSet<String>) -> String {
    const LENGTH_MAX: usize = 160;
    let refused = |c: char| c.is_control() || c.is_whitespace() || is_hidden(c) || "@/\\?#%&\"'`$*<>|;:".contains(c);
    let plain = |c: char| if refused(c) { '-' } else { c };
    let mut cut: String = name.trim().chars().map(plain).collect();
    while cut.len() > LENGTH_MAX {
        cut.pop();
    }
    let cut = cut.trim_start_matches(['-', '.']);
    let cut = if cut.is_empty() { format!("snapshot-{uid}") } else { cut.to_owned() };
    let mut found = cut.clone();
    let mut number = 2;
    while !names.insert(found.clone()) {
        found = format!("{cut}-{number}");
        number += 1;
    }
    found
}

/// The format of the newest delta.
fn delta_of(images: &[Image]) -> Option<DeltaFormat> {
    images.iter().find_map(|image| match ImageKind::of(image) {
        Some(ImageKind::VmfsSparse) => Some(DeltaFormat::VmfsSparse),
        Some(ImageKind::SeSparse) => Some(DeltaFormat::SeSparse),
        Some(ImageKind::VsanSparse) => Some(DeltaFormat::VsanSparse),
        _ => None,
    })
}
