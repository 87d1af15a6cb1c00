//! Creating an image at a path.

use super::show::{ImageLevel, show};
use crate::convert::{ImageOptions, folder_of};
use error::{Error, ErrorKind, Result};
use layer::descriptor::{Adapter, storage};
use layer::image::{self, Image, ImageKind, NewParent, system_entropy};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use work::Progress;

/// An image to create.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NewImage {
    /// Path of the descriptor, or of the file if the format has only one.
    pub path: PathBuf,
    /// Capacity in bytes; `None` for that of the parent.
    pub capacity: Option<u64>,
    /// The image's format, by name.
    pub format: String,
    /// The parent image.
    pub parent: Option<PathBuf>,
    /// The disk adapter that the geometry in the descriptor is computed for, by name.
    pub adapter: Option<String>,
}

/// Creates the image. After an error no file of the image remains.
pub fn create(new: &NewImage, options: &ImageOptions, progress: &dyn Progress) -> Result<ImageLevel> {
    let invalid = |text: String| Error::new(ErrorKind::Invalid, text);
    let kind: ImageKind = new.format.parse()?;
    let (folder, name) = folder_of(&new.path)?;
    let parent = new.parent.as_deref().map(|path| open_parent(path, options)).transpose()?;
    let capacity = match (new.capacity, &parent) {
        (Some(capacity), _) => capacity,
        (None, Some(parent)) => parent.layer().capacity(),
        (None, None) => return Err(invalid("an image without a parent needs a size".to_owned())),
    };
    let adapter = match new.adapter.as_deref() {
        Some(name) => Adapter::named(name).ok_or_else(|| {
            invalid(format!("'{}' is not an adapter: use lsilogic, buslogic or ide", name.escape_debug()))
        })?,
        None => Adapter::default(),
    };
    let mut image = image::NewImage { adapter, ..image::NewImage::new(&name, capacity, kind) };
    if let Some(parent) = &parent {
        if capacity < parent.layer().capacity() {
            let text = format!("an image of {capacity} bytes cannot have a parent of {}", parent.layer().capacity());
            return Err(invalid(text));
        }
        image = image.above(NewParent::of(parent, &folder)?);
    }
    storage::sweep_one(&**folder.directory(), &name)?;
    let random = system_entropy();
    image::create(&folder, &image, &mut || random(), progress)?;
    drop(parent);
    // The format of a raw file is stated, because an empty file has no bytes from which it could be detected.
    let format = (kind == ImageKind::Raw).then_some(crate::convert::SourceFormat::Raw);
    let shown = show(&new.path, &ImageOptions { format, ..options.clone() })?;
    shown.levels.into_iter().next().ok_or_else(|| invalid("an image has at least one level".to_owned()))
}

fn open_parent(path: &Path, options: &ImageOptions) -> Result<Image> {
    // The parent's whole chain must open, because otherwise the new image could not be opened.
    let opened = image::open_chain(options.place(path)?, &options.opening(false))?;
    let mut images = opened.into_images();
    images.truncate(1);
    images.pop().ok_or_else(|| Error::new(ErrorKind::NotFound, format!("there is no image '{}'", path.display())))
}
