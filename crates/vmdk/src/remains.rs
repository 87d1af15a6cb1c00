//! What is left of a disk: its images are read without opening the disk, so that damage of some files does not keep the
//! others from being read.
//!
//! 1. Nothing in the folder is changed: no interrupted operation is finished, and no lock is taken. The caller ensures
//!    that no process has the disk open.
//! 2. The record decides, if it is whole. Otherwise the images are found by their descriptors, which name their
//!    parents, and the snapshots by VMware's list.
//! 3. An image that is missing, that cannot be opened, or that is not the one above which its child was made, is lost:
//!    reading the ranges that depend on it fails.

use crate::adopt::{read_list, unique};
use crate::disk::Options;
use crate::images::{format_of, list, load_descriptor};
use crate::record::{Fate, Node, Pending, Record};
use crate::stored;
use crate::{Error, ErrorKind, Result};
use layer::image::{Folder, Image, OpenOptions, Place, is_loss, open_chain};
use layer::sesparse::DirtyJournal;
use std::collections::{BTreeSet, HashSet};
use std::path::Path;

/// Endings of the names of extents. These files are not examined, because a guest can write any text into its disk.
const EXTENTS: [&str; 4] = ["-flat.vmdk", "-delta.vmdk", "-sesparse.vmdk", "-vsan.vmdk"];

/// The disk of a folder, as far as its files describe it.
pub struct Remains {
    home: Folder,
    name: String,
    options: Options,
    found: Found,
    notes: Vec<String>,
}

/// How the images were found.
enum Found {
    Record(Box<Record>),
    /// Snapshots, and the head, with the names of their images' files.
    Files(Vec<(Option<String>, String)>),
}

impl Remains {
    /// Examines a folder, in which a disk is called `name` if its record is lost; `None` if nothing of a disk is there.
    pub fn look(home: Folder, name: &str, options: &Options) -> Result<Option<Self>> {
        let options = options.clone();
        let mut notes = Vec::new();
        let why = match stored::load(&**home.directory()) {
            Ok(record) => {
                let name = record.name.clone();
                match record.pending.as_ref().map(|pending| (pending.fate, &pending.operation)) {
                    Some((Some(Fate::Deleting), _)) => notes.push(format!("disk '{name}' was being deleted")),
                    Some((Some(Fate::Creating), _)) => {
                        notes.push(format!("the creation of disk '{name}' had not ended"))
                    }
                    Some((None, operation)) => {
                        notes.push(format!("disk '{name}': an interrupted operation was not finished ({operation})"));
                    }
                    None => {}
                }
                return Ok(Some(Self { home, name, options, found: Found::Record(Box::new(record)), notes }));
            }
            Err(error) if is_loss(&error) => error,
            Err(error) => return Err(error),
        };
        let files = find_states(&home, &mut notes)?;
        if files.is_empty() && notes.is_empty() {
            return Ok(None);
        }
        notes.insert(
            0,
            format!("the record of disk '{name}' is lost, its images are found by their descriptors: {why}"),
        );
        Ok(Some(Self { home, name: name.to_owned(), options, found: Found::Files(files), notes }))
    }

    /// Name of the disk.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether name and snapshots come from an undamaged record.
    pub fn is_proven(&self) -> bool {
        matches!(self.found, Found::Record(_))
    }

    /// The record, if it is undamaged.
    pub fn record(&self) -> Option<&Record> {
        match &self.found {
            Found::Record(record) => Some(record),
            Found::Files(_) => None,
        }
    }

    /// Problems of the disk as a whole.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// The states of the disk: names of snapshots, and `None` for the head.
    pub fn states(&self) -> Vec<Option<String>> {
        match &self.found {
            Found::Record(record) => {
                let snapshots = record.snapshots.iter().map(|snapshot| Some(snapshot.name.clone()));
                std::iter::once(None).chain(snapshots).collect()
            }
            Found::Files(files) => files.iter().map(|(snapshot, _)| snapshot.clone()).collect(),
        }
    }

    /// Opens the images of a state for reading, newest first. Images that are lost are represented by images that
    /// cannot be read.
    ///
    /// # Errors
    /// `NotFound` if the disk has no such state. Every other error means that the newest image cannot be opened.
    pub fn open(&self, snapshot: Option<&str>) -> Result<Vec<Image>> {
        match &self.found {
            Found::Record(record) => {
                let id = match snapshot {
                    Some(name) => record.snapshot(name)?.node,
                    None => record.head,
                };
                self.open_line(record, id)
            }
            Found::Files(files) => {
                let file = files.iter().find(|(name, _)| name.as_deref() == snapshot).ok_or_else(|| {
                    let text = format!("the images of disk '{}' show no such state", self.name);
                    Error::new(ErrorKind::NotFound, text)
                })?;
                let place = Place { folder: self.home.clone(), name: file.1.clone() };
                Ok(open_chain(place, &self.opening(None)?)?.into_images())
            }
        }
    }

    /// Opens the images from `id` down to the base, or to one that is lost.
    fn open_line(&self, record: &Record, id: u32) -> Result<Vec<Image>> {
        let mut images: Vec<Image> = Vec::new();
        let mut child = None;
        for id in record.line(id)? {
            let node = record.node(id)?;
            let opened = self.place(record, node).and_then(|place| Image::open(place, &self.opening(Some(node))?));
            let checked = match (opened, images.last(), child) {
                (Ok(image), Some(above), Some(child)) => {
                    self.check_parent(record, (child, above), (node, &image)).map(|()| image)
                }
                (opened, _, _) => opened,
            };
            match (checked, images.last()) {
                (Err(error), Some(above)) if is_loss(&error) => {
                    let place = Place { folder: self.home.clone(), name: node.descriptor.clone() };
                    let place = self.place(record, node).unwrap_or(place);
                    let lost = Image::lost(place, above, &error);
                    images.push(lost);
                    // Nothing below a lost image can be read.
                    break;
                }
                (image, _) => images.push(image?),
            }
            child = Some(node);
        }
        Ok(images)
    }

    fn place(&self, record: &Record, node: &Node) -> Result<Place> {
        let folder = match (&node.folder, &self.options.folders) {
            (None, _) => self.home.clone(),
            (Some(folder), Some(find)) => find(folder)?,
            (Some(folder), None) => {
                let permitted = record.permitted.iter().map(Into::into).collect::<Vec<_>>();
                Folder::local(Path::new(folder), &permitted)?
            }
        };
        Ok(Place { folder, name: node.descriptor.clone() })
    }

    fn opening(&self, node: Option<&Node>) -> Result<OpenOptions> {
        let replay = self.options.replay_journal || node.is_some_and(|node| node.replay);
        Ok(OpenOptions {
            format: node.map(format_of).transpose()?.flatten(),
            levels_max: chain::limits::LEVELS_MAX,
            force: self.options.force_parent,
            journal: if replay { DirtyJournal::Replay } else { DirtyJournal::Refuse },
            salvage: true,
            ..OpenOptions::default()
        })
    }

    /// Refuses a parent with another CID than its child records, unless the record explains the difference.
    fn check_parent(
        &self,
        record: &Record,
        (child, above): (&Node, &Image),
        (node, image): (&Node, &Image),
    ) -> Result<()> {
        let wanted = above.parent().and_then(|reference| reference.content);
        let (Some(wanted), Some(found)) = (wanted, image.descriptor()) else { return Ok(()) };
        let accepted = child.accepted == Some(found.content.number());
        if found.content == wanted || accepted || self.options.force_parent || is_pending(record, [child.id, node.id]) {
            return Ok(());
        }
        let text = format!(
            "'{}' was made above content {wanted}, and this is {} now: the image was changed or exchanged since; give \
             --force-parent to read it nevertheless",
            above.place().label(),
            found.content
        );
        Err(Error::new(ErrorKind::Corrupt, text))
    }
}

/// Whether an interrupted operation changes a descriptor of one of two images, so that the CIDs in them need not agree.
fn is_pending(record: &Record, nodes: [u32; 2]) -> bool {
    let Some(Pending { settle, merging, .. }) = &record.pending else { return false };
    let settled = settle.iter().any(|settlement| nodes.contains(&settlement.node));
    settled || merging.is_some_and(|merging| nodes.contains(&merging.node))
}

/// Whether a name is that of an extent of a split disk, such as `NAME-f001.vmdk`, with its descriptor in the folder.
fn is_piece(name: &str, all: &BTreeSet<String>) -> bool {
    let split = name.strip_suffix(".vmdk").and_then(|stem| stem.rsplit_once('-'));
    let Some((disk, piece)) = split else { return false };
    let number = piece.strip_prefix(['f', 's']).unwrap_or_default();
    number.len() >= 3 && number.bytes().all(|byte| byte.is_ascii_digit()) && all.contains(&format!("{disk}.vmdk"))
}

/// The states that the descriptors and lists of a folder show, each with the file of its newest image.
fn find_states(home: &Folder, notes: &mut Vec<String>) -> Result<Vec<(Option<String>, String)>> {
    let (mut images, mut parents, mut lists) = (Vec::new(), HashSet::new(), Vec::new());
    let all = list(&**home.directory())?;
    for name in &all {
        let place = Place { folder: home.clone(), name: name.clone() };
        if name.ends_with(".vmsd") {
            lists.push(place);
            continue;
        }
        if !name.ends_with(".vmdk") || EXTENTS.iter().any(|ending| name.ends_with(ending)) || is_piece(name, &all) {
            continue;
        }
        match load_descriptor(&place) {
            Ok(Some(descriptor)) => {
                let hint = descriptor.parent_hint.unwrap_or_default();
                parents.extend(hint.rsplit(['/', '\\']).next().map(str::to_owned));
                images.push(name.clone());
            }
            // An extent, or another file.
            Ok(None) => {}
            Err(error) => notes.push(format!("a descriptor cannot be read: {error}")),
        }
    }
    let mut states = Vec::new();
    let heads: Vec<&String> = images.iter().filter(|name| !parents.contains(*name)).collect();
    match heads[..] {
        [head] => states.push((None, head.clone())),
        [] => {}
        _ => {
            let names: Vec<&str> = heads.iter().map(|name| name.as_str()).collect();
            let text = "several images have no children, so that the head is unknown; give the path of one of them";
            notes.push(format!("{text}: {}", names.join(", ")));
        }
    }
    let mut names = HashSet::new();
    for place in lists {
        match read_list(&place) {
            Ok(list) => {
                for snapshot in list.snapshots {
                    let own = snapshot.disks.iter().find(|disk| images.contains(&disk.file));
                    let name = own.map(|_| unique(&snapshot.name, snapshot.uid, &mut names));
                    states.extend(own.zip(name).map(|(disk, name)| (Some(name), disk.file.clone())));
                }
            }
            Err(error) => notes.push(format!("a list of snapshots cannot be read: {error}")),
        }
    }
    Ok(states)
}
