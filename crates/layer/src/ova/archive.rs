//! The members of a tar archive: their checked names and their locations. Contents are not unpacked.

use super::{MEMBERS_MAX, Section};
use crate::{Error, ErrorKind, IoContext, Result};
use backend::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::sync::Arc;

/// The most bytes of headers, long names and extensions read while an archive is listed; contents are skipped.
const LISTING_MAX: u64 = 8 << 20;
/// The longest name of a member, in bytes.
const NAME_MAX: usize = 255;

/// One file in an archive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    name: String,
    start: u64,
    size: u64,
}

impl Member {
    /// The member's name: a plain file name without folders.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The member's size in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    pub(super) fn has_ending(&self, ending: &str) -> bool {
        self.name.rsplit_once('.').is_some_and(|(_, own)| own.eq_ignore_ascii_case(ending))
    }
}

/// A listed archive.
pub(super) struct Archive {
    image: String,
    file: Arc<dyn File>,
    members: Vec<Member>,
}

impl Archive {
    pub(super) fn open(file: Arc<dyn File>, image: &str) -> Result<Self> {
        let length = file.len().during(|| format!("{image}: cannot find out the length"))?;
        let corrupt = |what: String| Error::new(ErrorKind::Corrupt, format!("{image}: {what}"));
        // The errors of the parser contain the bytes of the damaged header, so they are not shown.
        let listing = |error: io::Error, members: usize| match error.kind() {
            io::ErrorKind::Other | io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof if members == 0 => {
                corrupt(
                    "this is no OVA archive, or it is damaged: it does not begin with the header of a file".to_owned(),
                )
            }
            io::ErrorKind::Other | io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof => corrupt(format!(
                "the archive is damaged: the header of the file after file number {members} is invalid"
            )),
            _ => Error::io(format!("{image}: cannot list the archive"), error),
        };
        let reader = Reader { file: Arc::clone(&file), at: 0, length, budget: LISTING_MAX };
        let mut archive = tar::Archive::new(reader);
        let mut members: Vec<Member> = Vec::new();
        for entry in archive.entries_with_seek().map_err(|error| listing(error, 0))? {
            let entry = entry.map_err(|error| listing(error, members.len()))?;
            let path = String::from_utf8_lossy(&entry.path_bytes()).into_owned();
            let kind = entry.header().entry_type();
            if kind.is_dir() || kind.is_pax_global_extensions() {
                continue;
            }
            if !kind.is_file() {
                return Err(corrupt(format!("{path:?} is no plain file: links and devices are refused")));
            }
            let name = plain_name(path.strip_prefix("./").unwrap_or(&path)).map_err(|error| error.context(image))?;
            let (start, size) = (entry.raw_file_position(), entry.size());
            if start.checked_add(size).is_none_or(|end| end > length) {
                return Err(corrupt(format!("{name} extends past the end: the archive is truncated")));
            }
            if members.len() == MEMBERS_MAX {
                return Err(corrupt(format!("it has more than {MEMBERS_MAX} members")));
            }
            if members.iter().any(|member| member.name.eq_ignore_ascii_case(name)) {
                return Err(corrupt(format!("it holds {name} twice")));
            }
            members.push(Member { name: name.to_owned(), start, size });
        }
        Ok(Self { image: image.to_owned(), file, members })
    }

    pub(super) fn members(&self) -> &[Member] {
        &self.members
    }

    /// Index of the member called `name`.
    pub(super) fn find(&self, name: &str) -> Option<usize> {
        self.members.iter().position(|member| member.name == name)
    }

    /// Index of the only member with a name that has this ending.
    pub(super) fn only(&self, ending: &str) -> Result<Option<usize>> {
        let mut found = (0..self.members.len()).filter(|at| self.members[*at].has_ending(ending));
        match (found.next(), found.next()) {
            (_, Some(_)) => Err(Error::new(ErrorKind::Invalid, format!("it holds several .{ending} files"))),
            (first, None) => Ok(first),
        }
    }

    /// A member as a file.
    pub(super) fn section(&self, index: usize) -> Section {
        let member = &self.members[index];
        Section::new(Arc::clone(&self.file), member.start, member.size)
    }

    /// The content of a member, of at most `most` bytes.
    pub(super) fn text(&self, index: usize, most: u64) -> Result<Vec<u8>> {
        let member = &self.members[index];
        let name = &member.name;
        if member.size > most {
            let what = format!("{}: {name} has {} bytes, at most {most} can be read", self.image, member.size);
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        let mut bytes = vec![0; member.size as usize];
        self.file.read_at(&mut bytes, member.start).during(|| format!("{}: cannot read {name}", self.image))?;
        Ok(bytes)
    }
}

/// Refuses names that are not plain file names.
pub(super) fn plain_name(name: &str) -> Result<&str> {
    let strange = |c: char| c == '/' || c == '\\' || c == ':' || c.is_control();
    if name.is_empty() || name.len() > NAME_MAX || name == "." || name == ".." || name.contains(strange) {
        let why = if name.len() > NAME_MAX {
            format!("it has {} bytes, at most {NAME_MAX} are allowed", name.len())
        } else if name.contains(char::is_control) {
            "it contains control characters".to_owned()
        } else {
            "it would lead out of the archive".to_owned()
        };
        let what = format!("{name:?} is no plain file name: {why}");
        return Err(Error::new(ErrorKind::Invalid, what));
    }
    Ok(name)
}

/// The input of the tar reader, with a limit on bytes, because the tar reader loads long names into memory.
struct Reader {
    file: Arc<dyn File>,
    at: u64,
    length: u64,
    budget: u64,
}

impl Read for Reader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let part = self.length.saturating_sub(self.at).min(buffer.len() as u64);
        let what = || io::Error::new(io::ErrorKind::InvalidData, "its headers take more than 8 MiB");
        self.budget = self.budget.checked_sub(part).ok_or_else(what)?;
        self.file.read_at(&mut buffer[..part as usize], self.at)?;
        self.at += part;
        Ok(part as usize)
    }
}

impl Seek for Reader {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let at = match to {
            SeekFrom::Start(at) => Some(at),
            SeekFrom::Current(by) => self.at.checked_add_signed(by),
            SeekFrom::End(by) => self.length.checked_add_signed(by),
        };
        self.at = at.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "a size is invalid"))?;
        Ok(self.at)
    }
}
