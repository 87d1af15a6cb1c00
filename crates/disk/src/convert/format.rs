//! Formats of conversion sources and targets, with their names on the command line.

use crate::{Error, ErrorKind, Result};
use layer::image::{Format, ImageKind};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// The format of a conversion's target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum TargetFormat {
    /// A native disk of the datastore.
    Native,
    /// An image that stays writable after the conversion.
    Image(ImageKind),
    /// A streamOptimized VMDK: one compressed file, written once.
    StreamOptimized,
    /// An OVA archive with one streamOptimized disk and its OVF description.
    Ova,
}

impl TargetFormat {
    /// Every format.
    pub fn all() -> impl Iterator<Item = Self> {
        let images = ImageKind::ALL.into_iter().map(Self::Image);
        std::iter::once(Self::Native).chain(images).chain([Self::StreamOptimized, Self::Ova])
    }

    /// The format's name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Native => "native",
            Self::Image(kind) => kind.name(),
            Self::StreamOptimized => "streamoptimized",
            Self::Ova => "ova",
        }
    }
}

impl fmt::Display for TargetFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for TargetFormat {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        Self::all().find(|format| format.name().eq_ignore_ascii_case(name)).ok_or_else(|| unknown(name, Self::all()))
    }
}

impl TryFrom<String> for TargetFormat {
    type Error = Error;

    fn try_from(name: String) -> Result<Self> {
        name.parse()
    }
}

impl From<TargetFormat> for String {
    fn from(format: TargetFormat) -> Self {
        format.name().to_owned()
    }
}

/// The format of a source file, as the user may state it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum SourceFormat {
    /// A raw image.
    Raw,
    /// A VMDK that is opened by its descriptor.
    Vmdk,
    /// A qcow2 image.
    Qcow2,
    /// An OVA archive.
    Ova,
    /// A VMFSsparse extent whose descriptor is lost. Its parent is unknown, so ranges that are not allocated in the
    /// extent read as zeros.
    VmfsSparse,
    /// A SEsparse extent whose descriptor is lost.
    SeSparse,
    /// A vsanSparse object whose descriptor is lost.
    VsanSparse,
    /// A sparse extent of VMware Workstation whose descriptor is lost.
    MonolithicSparse,
}

impl SourceFormat {
    /// Every format.
    pub const ALL: [Self; 8] = [
        Self::Raw,
        Self::Vmdk,
        Self::Qcow2,
        Self::Ova,
        Self::VmfsSparse,
        Self::SeSparse,
        Self::VsanSparse,
        Self::MonolithicSparse,
    ];

    /// The format's name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Vmdk => "vmdk",
            Self::Qcow2 => "qcow2",
            Self::Ova => "ova",
            Self::VmfsSparse => "vmfssparse",
            Self::SeSparse => "sesparse",
            Self::VsanSparse => "vsansparse",
            Self::MonolithicSparse => "monolithicsparse",
        }
    }

    /// This format as a format of [`layer::image`]; `None` for archives, which `layer::image` does not open.
    pub(crate) fn of_image(self) -> Option<Format> {
        match self {
            Self::Raw => Some(Format::Flat),
            Self::Vmdk => Some(Format::Vmdk),
            Self::Qcow2 => Some(Format::Qcow2),
            Self::Ova => None,
            Self::VmfsSparse => Some(Format::VmfsSparse),
            Self::SeSparse => Some(Format::SeSparse),
            Self::VsanSparse => Some(Format::VsanSparse),
            Self::MonolithicSparse => Some(Format::HostedSparse),
        }
    }
}

impl fmt::Display for SourceFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for SourceFormat {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        let found = Self::ALL.into_iter().find(|format| format.name().eq_ignore_ascii_case(name));
        found.ok_or_else(|| unknown(name, Self::ALL.into_iter()))
    }
}

impl TryFrom<String> for SourceFormat {
    type Error = Error;

    fn try_from(name: String) -> Result<Self> {
        name.parse()
    }
}

impl From<SourceFormat> for String {
    fn from(format: SourceFormat) -> Self {
        format.name().to_owned()
    }
}

fn unknown<T: fmt::Display>(name: &str, known: impl Iterator<Item = T>) -> Error {
    let known: Vec<String> = known.map(|format| format.to_string()).collect();
    let text = format!("'{}' is none of the formats {}", name.escape_debug(), known.join(", "));
    Error::new(ErrorKind::Invalid, text)
}
