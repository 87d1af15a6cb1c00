//! Images outside any datastore: what they are, whether they are sound, and new ones.

mod check;
mod create;
mod show;

pub use check::{ImageCheck, ImageFinding, check};
pub use create::{NewImage, create};
pub use show::{ImageExtent, ImageInfo, ImageLevel, show};

/// The kinds that can be made, by the names of the command line.
pub use layer::image::ImageKind;
