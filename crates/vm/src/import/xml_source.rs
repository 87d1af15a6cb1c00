//! A description in XML: errors about the description name its file and the line of an element.

use super::paths::Permitted;
use error::{Error, ErrorKind, Result};
use ovf::xml::Element;
use std::path::{Path, PathBuf};

/// The file that a parser reads.
pub(super) struct XmlSource<'a> {
    pub path: &'a Path,
    /// The folders in which files that the description names may be.
    pub permitted: &'a Permitted,
}

impl XmlSource<'_> {
    /// An error about an element.
    pub fn wrong(&self, element: &Element, what: impl std::fmt::Display) -> Error {
        let text = format!("'{}', line {}: {what}", self.path.display(), element.line);
        Error::new(ErrorKind::Invalid, text)
    }

    /// The path of a file that an element names.
    pub fn find(&self, element: &Element, name: &str) -> Result<PathBuf> {
        let context = |error: Error| error.context(format_args!("'{}', line {}", self.path.display(), element.line));
        self.permitted.find(name).map_err(context)
    }
}
