//! Opening the parents of an image down to the base.
//!
//! A child names its parent by a path that may be outdated, because disks are moved and copied. The parent is searched
//! in this order: by its file name in the child's folder; by the hint; and in a folder next to the child's folder, by
//! the name of the last folder in the hint. The first image that can be opened, and that has the CID recorded in the
//! child, is the parent. A qcow2 image records no CID: its parent must be at the recorded path. Raw disks have no CID
//! either. A child that lamina makes above a raw disk records the CID of a disk that was never written, and its hint
//! has the name of a raw file. The file with that name is accepted as the parent, and opened as raw, whatever the guest
//! has written into it.

use super::{Format, Image, OpenOptions, ParentReference, Place, base_name, is_loss, is_raw_name};
use crate::descriptor::ContentId;
use crate::{Error, ErrorKind, Layer, Result};
use backend::{Access, IoMode};
use std::sync::Arc;

/// An image with its parents.
pub struct Chain {
    images: Vec<Image>,
}

impl Chain {
    /// The images, newest first; at least one.
    pub fn images(&self) -> &[Image] {
        &self.images
    }

    /// Returns the images, newest first.
    pub fn into_images(self) -> Vec<Image> {
        self.images
    }

    /// The layers of the images, newest first.
    pub fn layers(&self) -> Vec<Arc<dyn Layer>> {
        self.images.iter().map(|image| Arc::clone(image.layer())).collect()
    }
}

/// Opens an image with all its parents.
pub fn open_chain(place: Place, options: &OpenOptions) -> Result<Chain> {
    let mut visited = vec![place.label()];
    let mut images = vec![Image::open(place, options)?];
    while let Some(image) = images.last()
        && let Some(reference) = image.parent()
    {
        if images.len() > options.levels_max {
            let text = format!(
                "'{}' has more than {} levels of parents below it; consolidate some, or raise the limit",
                visited[0], options.levels_max
            );
            return Err(Error::new(ErrorKind::Unsupported, text));
        }
        let parent = match find_parent(image, reference, options, &visited) {
            Err(error) if options.salvage && is_loss(&error) => {
                let name = base_name(&reference.hint).to_owned();
                Image::lost(Place { folder: image.place().folder.clone(), name }, image, &error)
            }
            parent => parent?,
        };
        visited.push(parent.place().label());
        images.push(parent);
    }
    let is_delta = matches!(options.format, Some(Format::VmfsSparse | Format::SeSparse | Format::VsanSparse));
    if let [alone] = &images[..]
        && options.salvage
        && is_delta
    {
        // Without its descriptor, it is unknown whether zeros or a parent are below the extent.
        let place = Place { folder: alone.place().folder.clone(), name: format!("parent of {}", alone.place().name) };
        let why = Error::new(ErrorKind::NotFound, "an extent that is opened without its descriptor names no parent");
        images.push(Image::lost(place, alone, &why));
    }
    Ok(Chain { images })
}

/// The reasons why candidates for the parent were not accepted. The most serious reason is reported.
#[derive(Default)]
struct Passed {
    changed: Option<(Error, Image)>,
    circle: Option<Error>,
    unreadable: Option<Error>,
    refused: Option<Error>,
}

fn find_parent(child: &Image, reference: &ParentReference, options: &OpenOptions, visited: &[String]) -> Result<Image> {
    let label = child.place().label();
    let mut passed = Passed::default();
    let mut seen: Vec<String> = Vec::new();
    for candidate in candidates(child.place(), reference) {
        let place = match candidate {
            Ok(place) => place,
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            Err(error) => {
                passed.refused.get_or_insert(error);
                continue;
            }
        };
        let parent = place.label();
        if seen.contains(&parent) {
            continue;
        }
        seen.push(parent.clone());
        if visited.contains(&parent) {
            let text = format!(
                "'{label}' has '{parent}' as its parent, which is above it in the chain: the chain has a cycle"
            );
            passed.circle.get_or_insert(Error::new(ErrorKind::Corrupt, text));
            continue;
        }
        match open_parent(place, reference, options) {
            Ok(Some(image)) => match changed(&label, reference, &image) {
                None => return Ok(image),
                Some(error) => {
                    passed.changed.get_or_insert((error, image));
                }
            },
            Ok(None) => {}
            Err(error) => {
                passed.unreadable.get_or_insert(error);
            }
        }
    }
    match passed {
        Passed { changed: Some((_, image)), .. } if options.force => Ok(image),
        Passed { changed: Some((error, _)), .. } => Err(error),
        // A clone may have the same file name as its parent: then the file of that name in the clone's folder is the
        // clone itself, and the parent is in a folder that was not permitted.
        Passed { circle: Some(circle), refused: Some(refused), unreadable: None, .. } => Err(refused.context(circle)),
        Passed { circle: Some(error), .. } => Err(error),
        Passed { unreadable: Some(error), .. } | Passed { refused: Some(error), .. } => {
            Err(error.context(format!("the parent of '{label}'")))
        }
        _ => {
            let hint = reference.hint.escape_debug();
            let text = format!(
                "the parent of '{label}' is missing: there is no '{hint}', and no file of that name in the \
                 folder of the image"
            );
            Err(Error::new(ErrorKind::NotFound, text))
        }
    }
}

/// Candidates for the parent, best first. If the child records no CID, the path that it states is the only candidate.
fn candidates(child: &Place, reference: &ParentReference) -> impl Iterator<Item = Result<Place>> {
    let hint = reference.hint.as_str();
    let places = if reference.format.is_some() { 1..2 } else { 0..3 };
    let name = base_name(hint).to_owned();
    let beside = hint.rsplit(['/', '\\']).nth(1).filter(|folder| !folder.is_empty() && *folder != "..");
    let beside = beside.map(ToOwned::to_owned);
    let (hint, folder) = (hint.to_owned(), child.folder.clone());
    places.filter_map(move |which| match which {
        0 => Some(folder.resolve(&name)),
        1 => Some(folder.resolve(&hint)),
        _ => beside.as_ref().map(|beside| folder.beside(beside, &name)),
    })
}

/// Opens a parent for reading; `None` if the file does not exist.
fn open_parent(place: Place, reference: &ParentReference, options: &OpenOptions) -> Result<Option<Image>> {
    match place.open(IoMode::Buffered, Access::Read) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        other => drop(other?),
    }
    let format = reference.format.or(names_raw(&place, reference).then_some(Format::Flat));
    let options = OpenOptions { writable: false, format, ..options.clone() };
    Image::open(place, &options).map(Some)
}

/// Whether a child states that its parent is a raw disk.
fn names_raw(place: &Place, reference: &ParentReference) -> bool {
    reference.content == Some(ContentId::INITIAL) && is_raw_name(&place.name)
}

/// The error if an image is not the parent above which the child was made; `None` if it is that parent.
fn changed(child: &str, reference: &ParentReference, parent: &Image) -> Option<Error> {
    let wanted = reference.content?;
    let label = parent.place().label();
    let found = match parent.descriptor() {
        Some(descriptor) if descriptor.content == wanted => return None,
        Some(descriptor) => format!("its content is {} now", descriptor.content),
        None if names_raw(parent.place(), reference) => return None,
        None => "its content has no CID".to_owned(),
    };
    let text = format!(
        "'{child}' was made above content {wanted} of '{label}', but {found}: the parent was changed or exchanged since, \
         and together they would read as garbage; give --force-parent only to save what can be saved"
    );
    Some(Error::new(ErrorKind::Corrupt, text))
}
