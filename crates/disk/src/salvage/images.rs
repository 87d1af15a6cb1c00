//! Salvage of disks in VMware's formats: images by path, and the disks of a datastore.

use super::levels::{LevelSource, LostRanges};
use super::{SalvageList, SalvageObject};
use crate::convert::{ImageOptions, is_archive};
use crate::foreign::{IMAGES, ImageFolders};
use crate::images::unread_snapshots_of;
use crate::migrate::Overlay;
use crate::{Error, ErrorKind, Result};
use layer::image::{Image, OpenOptions, open_chain};
use std::path::Path;
use std::sync::Arc;
use vmdk::Remains;
use work::{Progress, Unreported};

/// Images, newest first, and what is known to be lost of them.
pub(super) struct Line {
    pub(super) images: Vec<Image>,
    pub(super) notes: Vec<String>,
}

impl Line {
    /// Uses the second copies of metadata.
    fn proven(mut self, progress: &dyn Progress) -> Result<Self> {
        for image in &self.images {
            self.notes.extend(image.use_proofs(&Unreported(progress))?);
        }
        Ok(self)
    }

    /// The images as a source.
    pub(super) fn source<'a>(self, lost: &LostRanges, progress: &'a dyn Progress) -> Result<LevelSource<'a>> {
        LevelSource::new(self.images, lost.clone(), progress)
    }

    /// Capacity, and the number of bytes whose location is unknown.
    fn survey(self, progress: &dyn Progress) -> Result<(u64, u64)> {
        let lost = LostRanges::default();
        let capacity = self.images.first().map_or(0, |image| image.layer().capacity());
        self.source(&lost, progress)?.survey()?;
        Ok((capacity, lost.merged().iter().map(|range| range.length).sum()))
    }
}

/// Opens an image with its parents.
pub(crate) fn open_image(path: &Path, options: &ImageOptions) -> Result<Vec<Image>> {
    let place = options.place(path)?;
    if options.member.is_some() || is_archive(&place, options.format)? {
        let text = "is an archive, which is verified as a whole: unpack it with tar, and read the disk in it";
        return Err(Error::new(ErrorKind::Unsupported, format!("'{}' {text}", path.display())));
    }
    let opening = OpenOptions { salvage: true, ..options.opening(false) };
    Ok(open_chain(place, &opening)?.into_images())
}

/// An image by path, with its parents, as a source. What is lost is added to `notes` and `lost`.
pub(crate) fn image_source<'a>(
    path: &Path,
    options: &ImageOptions,
    lost: &LostRanges,
    notes: &mut Vec<String>,
    progress: &'a dyn Progress,
) -> Result<LevelSource<'a>> {
    let images = open_image(path, options)?;
    if let Some(newest) = images.first() {
        notes.extend(unread_snapshots_of(newest)?);
    }
    let line = line_of(images).proven(progress)?;
    notes.extend_from_slice(&line.notes);
    LevelSource::new(line.images, lost.clone(), progress)
}

fn line_of(images: Vec<Image>) -> Line {
    let notes = images.iter().flat_map(|image| image.notes().to_vec()).collect();
    Line { images, notes }
}

/// The list for an image by path.
pub(super) fn list_image(path: &Path, options: &ImageOptions, progress: &dyn Progress) -> Result<SalvageList> {
    let line = line_of(open_image(path, options)?);
    let notes = line.notes.clone();
    let (capacity, lost) = line.survey(progress)?;
    let object = SalvageObject { disk: path.display().to_string(), snapshot: None, capacity, proven: true, lost };
    Ok(SalvageList { objects: vec![object], incomplete: false, behind: false, notes })
}

/// The disks in VMware's formats of a datastore that is not open.
pub(super) struct Images {
    disks: Vec<Remains>,
    /// Problems of the folders.
    pub(super) notes: Vec<String>,
    /// Whether a folder cannot be read.
    pub(super) incomplete: bool,
}

impl Images {
    /// Reads the folders of the disks.
    pub(super) fn look(folders: &ImageFolders, options: &ImageOptions) -> Result<Self> {
        let mut found = Self { disks: Vec::new(), notes: Vec::new(), incomplete: false };
        let finder = folders.clone();
        let how = vmdk::Options {
            force_parent: options.force_parent,
            replay_journal: options.replay_journal,
            folders: Some(Arc::new(move |reference: &str| finder.find(reference))),
            ..vmdk::Options::default()
        };
        for folder in folders.names()? {
            let looked = folders.home(&folder).and_then(|home| Remains::look(home, &folder, &how));
            match looked {
                Ok(remains) => found.disks.extend(remains),
                Err(error) => {
                    found.incomplete = true;
                    found.notes.push(format!("folder '{IMAGES}/{folder}' cannot be read: {error}"));
                }
            }
        }
        found.notes.extend(found.disks.iter().flat_map(|disk| disk.notes().to_vec()));
        Ok(found)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.disks.is_empty()
    }

    /// Adds the states of all disks to a list.
    pub(super) fn list(&self, list: &mut SalvageList, progress: &dyn Progress) -> Result<()> {
        for disk in &self.disks {
            let states = disk.states();
            if states.is_empty() {
                list.incomplete = true;
            }
            for snapshot in states {
                let opened = disk.open(snapshot.as_deref()).map(line_of);
                let notes = opened.as_ref().map(|line| line.notes.clone()).unwrap_or_default();
                let (capacity, lost) = match opened.and_then(|line| line.survey(progress)) {
                    Ok(sizes) => sizes,
                    Err(error) if error.kind() == ErrorKind::Interrupted => return Err(error),
                    Err(error) => {
                        let state = super::label(&(disk.name().to_owned(), snapshot));
                        list.notes.push(format!("'{state}' cannot be read: {error}"));
                        list.incomplete = true;
                        continue;
                    }
                };
                let new: Vec<String> = notes.into_iter().filter(|note| !list.notes.contains(note)).collect();
                list.notes.extend(new);
                let (disk, proven) = (disk.name().to_owned(), disk.is_proven());
                list.objects.push(SalvageObject { disk, snapshot, capacity, proven, lost });
            }
        }
        Ok(())
    }

    /// Opens a state of a disk; `None` if there is no disk of that name with that state. The flag says whether the
    /// name comes from an undamaged record.
    pub(super) fn open(
        &self,
        name: &str,
        snapshot: Option<&str>,
        progress: &dyn Progress,
    ) -> Result<Option<(Line, bool)>> {
        let has =
            |disk: &&Remains| disk.name() == name && disk.states().iter().any(|state| state.as_deref() == snapshot);
        let Some(disk) = self.disks.iter().find(has) else { return Ok(None) };
        let overlay = disk.record().filter(|_| snapshot.is_none()).map(Overlay::of);
        if let Some(Ok(Some(overlay))) = &overlay
            && let Some(source) = overlay.source()
        {
            let text = format!(
                "the content of disk '{name}' was still arriving from {}, and its newest writes are in a native layer: \
                 restore it from there again, which gives its content without these writes",
                source.title
            );
            return Err(Error::new(ErrorKind::Unsupported, text));
        }
        if overlay.is_some_and(|overlay| !matches!(overlay, Ok(None))) {
            let text = format!(
                "disk '{name}' was being imported, and its newest writes are in a native layer above its images: \
                 salvage its image by path, which gives its content without these writes"
            );
            return Err(Error::new(ErrorKind::Unsupported, text));
        }
        let mut line = line_of(disk.open(snapshot)?).proven(progress)?;
        line.notes.splice(0..0, disk.notes().iter().cloned());
        Ok(Some((line, disk.is_proven())))
    }
}
