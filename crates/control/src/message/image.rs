//! Requests about images, which need no datastore.

use disk::convert::ImageOptions;
use disk::images::NewImage;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Operations on images.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum ImageRequest {
    /// Show an image and its parents.
    Show {
        /// The path of the image.
        path: PathBuf,
        /// How the image is opened.
        options: ImageOptions,
    },
    /// Check the tables of an image.
    Check {
        /// The path of the image.
        path: PathBuf,
        /// Repair what can be repaired.
        repair: bool,
        /// How the image is opened.
        options: ImageOptions,
    },
    /// Create an image.
    Create {
        /// The image to create.
        new: NewImage,
        /// How the parent is opened.
        options: ImageOptions,
    },
}

impl ImageRequest {
    /// Whether the request may take long.
    pub fn takes_long(&self) -> bool {
        true
    }
}
