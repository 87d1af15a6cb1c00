//! Images outside any datastore: showing, checking and creating them.

mod check;
mod create;
mod show;

pub use check::{ImageCheck, ImageFinding, check};
pub use create::{NewImage, create};
pub use show::{ImageExtent, ImageInfo, ImageLevel, show};
pub(crate) use show::{unread_snapshots, unread_snapshots_of};

/// The kinds of images that can be created, by their names on the command line.
pub use layer::image::ImageKind;
