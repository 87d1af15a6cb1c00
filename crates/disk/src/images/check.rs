//! Checking an image together with its parents.

use crate::convert::ImageOptions;
use error::{Error, ErrorKind, Result};
use layer::image::check::{Checked, check as check_image};
use layer::image::{Image, Place, open_chain};
use serde::{Deserialize, Serialize};
use std::path::Path;
use work::Progress;

/// The result of a check.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageCheck {
    /// The findings for every extent of every level, newest level first.
    pub findings: Vec<ImageFinding>,
    /// How many problems there are.
    pub problems: u64,
    /// Number of problems that were repaired.
    pub repaired: u64,
}

/// The result for one extent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageFinding {
    /// The image to which the extent belongs.
    pub image: String,
    /// The extent's file.
    pub file: String,
    /// The extent's format.
    pub format: String,
    /// The problems that the check found.
    pub problems: Vec<String>,
    /// Remarks that are not problems.
    pub notes: Vec<String>,
    /// Bytes in the file that nothing references.
    pub dead: u64,
}

/// Checks the image at a path. With `repair` this image is opened for writing, but never its parents.
pub fn check(path: &Path, options: &ImageOptions, repair: bool, progress: &dyn Progress) -> Result<ImageCheck> {
    let place = options.place(path)?;
    if crate::convert::is_archive(&place, options.format)? {
        let mut warnings = Vec::new();
        let (disk, _) = crate::convert::open_member(&place, options, progress, &mut warnings)?;
        let finding = ImageFinding {
            image: place.label(),
            file: disk.file,
            format: "ova".into(),
            problems: Vec::new(),
            notes: warnings,
            dead: 0,
        };
        return Ok(ImageCheck { findings: vec![finding], ..ImageCheck::default() });
    }
    let opening = options.opening(false);
    let mut out = ImageCheck::default();
    // The image's own tables are checked first, because a missing parent may be only one of its problems.
    let mut below = Vec::new();
    let broken = match open_chain(place.clone(), &opening) {
        Ok(chain) => {
            below.extend(chain.images().iter().skip(1).map(|image| image.place().clone()));
            None
        }
        // Without its parents the chain cannot be opened, but the image alone can.
        Err(error) if Image::open(place.clone(), &opening).is_ok() => Some(error),
        Err(error) if repair || error.kind() == ErrorKind::Corrupt => Some(error),
        Err(error) => return Err(error),
    };
    look(&mut out, &place, &opening, repair, progress)?;
    if let (Some(error), Some(finding)) = (broken, out.findings.first_mut()) {
        // The chain is opened again, because the repair may have removed the reason for the failure.
        if open_chain(place, &opening).is_err() {
            finding.problems.push(error.to_string());
            out.problems += 1;
        }
    }
    for parent in below {
        look(&mut out, &parent, &opening, false, progress)?;
    }
    Ok(out)
}

fn look(
    out: &mut ImageCheck,
    place: &Place,
    opening: &layer::image::OpenOptions,
    repair: bool,
    progress: &dyn Progress,
) -> Result<()> {
    progress.update(0, 1);
    if progress.cancelled() {
        return Err(Error::new(ErrorKind::Interrupted, "the check was stopped"));
    }
    let label = place.label();
    for Checked { file, format, problems, notes, repaired, dead } in check_image(place, opening, repair, progress)? {
        out.problems += problems.len() as u64;
        out.repaired += repaired;
        out.findings.push(ImageFinding { image: label.clone(), file, format, problems, notes, dead });
    }
    Ok(())
}
