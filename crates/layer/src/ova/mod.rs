//! OVA: a tar archive with a virtual machine's description (OVF), its disks, and a manifest of their digests.
//!
//! An OVA is not a layer, but a container of layers. [`Ova`] reads an archive in place, so that a disk in it can be
//! served or converted without unpacking; [`OvaWriter`] creates one. Invariants:
//!
//! 1. Names in the archive and in the OVF are plain file names; any other name is refused.
//! 2. The limits below bound members, references, disks, and the sizes of texts loaded into memory.
//! 3. Digests are checked while bytes are read ([`Ova::verify`], [`Ova::reader`]). A mismatch names the member.
//! 4. An unfinished archive does not begin with a tar header: the first header is written last.

mod archive;
mod description;
mod digest;
mod envelope;
mod manifest;
mod section;
#[cfg(test)]
mod tests;
mod writer;

pub use archive::Member;
pub use description::{Disk, Hardware};
pub use digest::Algorithm;
pub use envelope::{Controller, Machine, Network};
pub use section::Section;
pub use writer::{Hashed, OvaOptions, OvaWriter, PlannedDisk};

use crate::{Error, ErrorKind, Result};
use archive::Archive;
use backend::File;
use description::Description;
use digest::Hasher;
use manifest::Manifest;
use std::io::{self, Read};
use std::sync::Arc;

/// The most members of an archive.
pub const MEMBERS_MAX: usize = 1024;
/// The largest OVF descriptor that is loaded.
pub const DESCRIPTOR_MAX: u64 = 4 << 20;
/// The largest manifest that is loaded.
pub const MANIFEST_MAX: u64 = 1 << 20;

/// Bytes read at a time while digests are computed.
const READ_BYTES: usize = 1 << 20;

/// An open archive.
pub struct Ova {
    image: String,
    archive: Archive,
    descriptor: usize,
    description: Description,
    manifest: Option<Manifest>,
    warnings: Vec<String>,
}

impl Ova {
    /// Opens an archive: lists it, reads the descriptor and the manifest, and checks the descriptor's digest. Disks are
    /// not read.
    pub fn open(file: Arc<dyn File>, image: &str) -> Result<Self> {
        let context = |error: Error| error.context(image);
        let archive = Archive::open(file, image)?;
        let descriptor = archive.only("ovf").map_err(context)?;
        let Some(descriptor) = descriptor else {
            return Err(Error::new(
                ErrorKind::Corrupt,
                format!("{image}: this is no OVA archive: it contains no OVF descriptor"),
            ));
        };
        let text = archive.text(descriptor, DESCRIPTOR_MAX)?;
        let mut warnings = Vec::new();
        let manifest = match archive.only("mf").map_err(context)? {
            Some(member) => Some(Manifest::parse(&archive.text(member, MANIFEST_MAX)?).map_err(context)?),
            None => {
                warnings.push("it has no manifest: its contents cannot be checked".to_owned());
                None
            }
        };
        if let Some(manifest) = &manifest {
            for name in manifest.names() {
                if archive.find(name).is_none() {
                    let what = format!("{image}: the manifest names {name}, which is missing");
                    return Err(Error::new(ErrorKind::Corrupt, what));
                }
            }
            for member in archive.members() {
                let own = member.has_ending("mf") || member.has_ending("cert");
                if !own && manifest.digest(member.name()).is_none() {
                    warnings.push(format!("the manifest does not name {}: it cannot be checked", member.name()));
                }
            }
        }
        let name = archive.members()[descriptor].name();
        if let Some((algorithm, expected)) = manifest.as_ref().and_then(|manifest| manifest.digest(name)) {
            let mut hasher = Hasher::new(algorithm);
            hasher.update(&text);
            check_digest(image, name, algorithm, expected, &hasher.finish())?;
        }
        let description = Description::read(&text, name).map_err(context)?;
        for disk in &description.disks {
            if archive.find(&disk.file).is_none() {
                let what = format!("{image}: disk {} is in {}, which is missing", disk.id, disk.file);
                return Err(Error::new(ErrorKind::Corrupt, what));
            }
        }
        Ok(Self { image: image.to_owned(), archive, descriptor, description, manifest, warnings })
    }

    /// The members in the order of the archive.
    pub fn members(&self) -> &[Member] {
        self.archive.members()
    }

    /// The OVF descriptor's text.
    pub fn descriptor(&self) -> Result<Vec<u8>> {
        self.archive.text(self.descriptor, DESCRIPTOR_MAX)
    }

    /// The disks in the order of the OVF.
    pub fn disks(&self) -> &[Disk] {
        &self.description.disks
    }

    /// The virtual machine's name, if the OVF states it.
    pub fn machine(&self) -> Option<&str> {
        self.description.name.as_deref()
    }

    /// Processors and memory, if the OVF states them.
    pub fn hardware(&self) -> Hardware {
        self.description.hardware
    }

    /// Warnings for the user: members that no digest covers.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// A member as a file of its own, read in place: a streamOptimized disk is opened from it.
    pub fn file(&self, name: &str) -> Result<Arc<dyn File>> {
        Ok(Arc::new(self.archive.section(self.index_of(name)?)))
    }

    /// Reads a member from front to back. If the manifest has a digest of the member that does not match, the read of
    /// the last bytes fails with `InvalidData`.
    pub fn reader(&self, name: &str) -> Result<impl Read + use<>> {
        let section = self.archive.section(self.index_of(name)?);
        let expected = self.manifest.as_ref().and_then(|manifest| manifest.digest(name));
        let check = expected.map(|(algorithm, expected)| {
            (Hasher::new(algorithm), algorithm, expected.to_vec()) //
        });
        Ok(CheckedReader { image: self.image.clone(), name: name.to_owned(), section, at: 0, check })
    }

    /// Reads all members that the manifest names and checks their digests. `progress` is called with the number of
    /// bytes read since its last call; if it returns an error, the check ends with that error.
    pub fn verify(&self, progress: &mut dyn FnMut(u64) -> Result<()>) -> Result<()> {
        let Some(manifest) = &self.manifest else {
            return Err(Error::new(ErrorKind::Unsupported, format!("{}: it has no manifest of digests", self.image)));
        };
        let mut buffer = vec![0; READ_BYTES];
        for (name, algorithm, expected) in manifest.entries() {
            let section = self.archive.section(self.index_of(name)?);
            let mut hasher = Hasher::new(algorithm);
            let mut at = 0;
            while at < section.length() {
                let part = (section.length() - at).min(buffer.len() as u64) as usize;
                let failed = |error| Error::io(format!("{}: cannot read {name}", self.image), error);
                section.read_at(&mut buffer[..part], at).map_err(failed)?;
                hasher.update(&buffer[..part]);
                at += part as u64;
                progress(part as u64)?;
            }
            check_digest(&self.image, name, algorithm, expected, &hasher.finish())?;
        }
        Ok(())
    }

    fn index_of(&self, name: &str) -> Result<usize> {
        let none = || Error::new(ErrorKind::NotFound, format!("{}: there is no {name} in it", self.image));
        self.archive.find(name).ok_or_else(none)
    }
}

fn check_digest(image: &str, name: &str, algorithm: Algorithm, expected: &[u8], found: &[u8]) -> Result<()> {
    if expected == found {
        return Ok(());
    }
    let (expected, found) = (digest::hex(expected), digest::hex(found));
    let what = format!("{image}: {name} is not what the manifest says: {algorithm} {found} instead of {expected}");
    Err(Error::new(ErrorKind::Corrupt, format!("{what}; get the archive again")))
}

struct CheckedReader {
    image: String,
    name: String,
    section: Section,
    at: u64,
    check: Option<(Hasher, Algorithm, Vec<u8>)>,
}

impl Read for CheckedReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let part = (self.section.length() - self.at).min(buffer.len() as u64) as usize;
        self.section.read_at(&mut buffer[..part], self.at)?;
        self.at += part as u64;
        if let Some((hasher, ..)) = &mut self.check {
            hasher.update(&buffer[..part]);
        }
        // The digest is compared together with the last bytes, because a reader that has the length makes no further
        // call.
        if self.at == self.section.length()
            && let Some((hasher, algorithm, expected)) = self.check.take()
        {
            check_digest(&self.image, &self.name, algorithm, &expected, &hasher.finish())
                .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error.to_string()))?;
        }
        Ok(part)
    }
}
