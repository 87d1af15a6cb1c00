//! The descriptor text embedded in an extent: read and replaced as bytes, without parsing it.

use super::Hosted;
use crate::{Error, ErrorKind, IoContext, Result, SECTOR};
use backend::File;

use super::header::Header;

/// Reads the embedded descriptor, without the zeros after it; `None` if there is none.
pub(crate) fn read_descriptor(file: &dyn File, header: &Header, image: &str) -> Result<Option<Vec<u8>>> {
    if header.descriptor_offset == 0 || header.descriptor_size == 0 {
        return Ok(None);
    }
    let length = file.len().during(|| format!("{image}: cannot find out the length"))?;
    let bytes = header.descriptor_size * SECTOR;
    let start = header.descriptor_offset.checked_mul(SECTOR).filter(|start| *start < length);
    let Some(start) = start else {
        let what = format!("{image}: its descriptor at sector {} lies outside the file", header.descriptor_offset);
        return Err(Error::new(ErrorKind::Corrupt, what));
    };
    let mut text = vec![0; bytes.min(length - start) as usize];
    file.read_at(&mut text, start).during(|| format!("{image}: cannot read the descriptor"))?;
    let end = text.iter().position(|byte| *byte == 0).unwrap_or(text.len());
    text.truncate(end);
    Ok((!text.is_empty()).then_some(text))
}

impl Hosted {
    /// The embedded descriptor; `None` if there is none.
    pub fn descriptor(&self) -> Result<Option<Vec<u8>>> {
        read_descriptor(self.file.as_ref(), &self.header, &self.image)
    }

    /// Replaces the embedded descriptor, durably. Only changed sectors are written. A change within one sector (CID and
    /// parentCID are in the first) is complete or absent after a crash, a larger one may be partial.
    pub fn set_descriptor(&self, text: &[u8]) -> Result<()> {
        self.check_changeable(self.writer()?)?;
        let room = self.header.descriptor_size * SECTOR;
        if self.header.descriptor_offset == 0 || text.len() as u64 > room {
            let what =
                format!("{}: a descriptor of {} bytes does not fit the {room} kept for it", self.image, text.len());
            return Err(Error::new(ErrorKind::Invalid, what));
        }
        let start = self.header.descriptor_offset * SECTOR;
        let mut old = vec![0; room as usize];
        self.file.read_at(&mut old, start).during(|| format!("{}: cannot read the descriptor", self.image))?;
        let mut new = text.to_vec();
        new.resize(room as usize, 0);
        let sector = SECTOR as usize;
        let pairs = old.chunks_exact(sector).zip(new.chunks_exact(sector));
        for (number, (_, new)) in pairs.enumerate().filter(|(_, (old, new))| old != new) {
            self.file
                .write_at(&[new], start + number as u64 * SECTOR, true)
                .during(|| format!("{}: cannot write the descriptor", self.image))?;
        }
        Ok(())
    }
}
