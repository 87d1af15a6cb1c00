//! Conversion targets that are files.

use super::archive::StreamSink;
use super::copy::Sink;
use super::image::ImageSink;
use super::{Address, TargetFormat};
use error::{Error, ErrorKind, Result};
use layer::descriptor::storage;
use layer::image::{Folder, ImageKind, NewImage};
use std::path::{Path, PathBuf};
use work::Progress;

/// A sink, and the files that it creates.
pub(crate) struct Target<'a> {
    pub(crate) sink: Box<dyn Sink + 'a>,
    pub(crate) files: Vec<PathBuf>,
}

/// Refuses a target whose name does not fit the format, or that exists already.
pub(super) fn check(to: &Address, format: TargetFormat) -> Result<()> {
    match (to, format) {
        (Address::Path(path), TargetFormat::Native) => {
            let text = format!(
                "'{}' is a file, and native disks are in a datastore: name the target disk:NAME, or choose a format \
                 of files",
                path.display()
            );
            Err(Error::new(ErrorKind::Invalid, text))
        }
        (Address::Path(path), _) if std::fs::symlink_metadata(path).is_ok() => {
            Err(Error::new(ErrorKind::Exists, format!("there is a file '{}' already", path.display())))
        }
        (Address::Disk(name), _) if name.contains('@') => {
            let text = format!("'{name}' names a snapshot, but the target must be a new disk");
            Err(Error::new(ErrorKind::Invalid, text))
        }
        _ => Ok(()),
    }
}

/// The folder of a new file, and its name there.
pub(crate) fn folder_of(path: &Path) -> Result<(Folder, String)> {
    let name = path.file_name().and_then(|name| name.to_str());
    let Some(name) = name else {
        let text = format!("'{}' has no file name, or is not UTF-8", path.display());
        return Err(Error::new(ErrorKind::Invalid, text));
    };
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    Ok((Folder::local(parent, &[])?, name.to_owned()))
}

/// Creates an empty target under a temporary name.
pub(super) fn make(
    path: &Path,
    format: TargetFormat,
    capacity: u64,
    progress: &dyn Progress,
) -> Result<Target<'static>> {
    let (folder, name) = folder_of(path)?;
    // Removes the files of a conversion to the same name that a power cut ended.
    let removed = storage::sweep_one(&**folder.directory(), &name)?;
    if !removed.is_empty() {
        tracing::warn!("removed what an unfinished conversion had left: {}", removed.join(", "));
    }
    let in_folder = |file: &str| path.with_file_name(file);
    let (sink, files): (Box<dyn Sink>, Vec<PathBuf>) = match format {
        TargetFormat::Image(kind) => {
            let files = files_of(&name, kind, capacity)?.iter().map(|file| in_folder(file)).collect();
            (Box::new(ImageSink::new(&folder, &name, kind, capacity, progress)?), files)
        }
        TargetFormat::StreamOptimized => {
            (Box::new(StreamSink::new(&folder, &name, capacity, false)?), vec![path.to_path_buf()])
        }
        TargetFormat::Ova => (Box::new(StreamSink::new(&folder, &name, capacity, true)?), vec![path.to_path_buf()]),
        TargetFormat::Native => {
            return Err(Error::new(ErrorKind::Invalid, "native disks are in a datastore"));
        }
    };
    Ok(Target { sink, files })
}

/// Names of the files of an image. The first is the file by which the image is opened.
pub(crate) fn files_of(name: &str, kind: ImageKind, capacity: u64) -> Result<Vec<String>> {
    let mut files = vec![name.to_owned()];
    if let Some(descriptor) = NewImage::new(name, capacity, kind).descriptor(&mut || 0)? {
        let extents = descriptor.extents.into_iter().filter_map(|extent| extent.file);
        files.extend(extents.filter(|extent| extent != name));
    }
    Ok(files)
}
