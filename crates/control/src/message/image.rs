//! What can be asked of images, which need no datastore.

use disk::convert::ImageOptions;
use disk::images::NewImage;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Verbs of images.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum ImageRequest {
    /// An image and its parents.
    Show {
        /// Its path.
        path: PathBuf,
        /// How it is opened.
        options: ImageOptions,
    },
    /// Check the tables.
    Check {
        /// Its path.
        path: PathBuf,
        /// Put right what can be.
        repair: bool,
        /// How it is opened.
        options: ImageOptions,
    },
    /// Make an image.
    Create {
        /// What to make.
        new: NewImage,
        /// How the parent is opened.
        options: ImageOptions,
    },
}

impl ImageRequest {
    /// True for what may take longer than a moment.
    pub fn takes_long(&self) -> bool {
        true
    }
}
