//! Writing a descriptor, in VMware's order, and so that QEMU finds the keys for which it searches.
//!
//! QEMU searches for the strings `CID=`, `parentCID=` and `createType="` anywhere in the first 20 sectors and uses the
//! first match. When it writes, it drops the text between `CID=` and `parentCID=`. So `CID=` and `parentCID=` are on
//! adjacent lines, before any text from users or other programs.

use super::{Descriptor, Encoding, PATH_MAX, QEMU_HEAD_MAX, Result, TEXT_MAX, identity, invalid};
use crate::{CAPACITY_MAX, SECTOR};
use std::borrow::Cow;

impl Descriptor {
    /// The text of a descriptor file.
    ///
    /// # Errors
    /// `Invalid` if a name or value cannot be written in the descriptor's encoding, or contains a line break or a zero
    /// byte; if the disk is empty or too large; or if the text is too long.
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        let mut out = Vec::with_capacity(1024);
        self.write_header(&mut out)?;
        out.extend_from_slice(b"# Extent description\n");
        let mut sectors = 0u64;
        for extent in &self.extents {
            sectors = sectors.saturating_add(extent.sectors);
            extent.write(&self.encoding, &mut out)?;
            out.push(b'\n');
        }
        if sectors > CAPACITY_MAX / SECTOR || self.extents.iter().any(|extent| extent.sectors == 0) {
            return Err(invalid(format!("a disk has from one sector to {} TiB", CAPACITY_MAX >> 40)));
        }
        if let Some(path) = &self.change_tracking {
            out.extend_from_slice(b"\n# Change Tracking File\n");
            self.write_quoted("changeTrackPath", path, &mut out)?;
        }
        // The blank after "Base" is written as VMware does.
        out.extend_from_slice(b"\n# The Disk Data Base \n#DDB\n\n");
        for entry in self.database.entries() {
            check_plain(entry.key.as_bytes(), "a ddb key")?;
            check_plain(&entry.value, "a ddb value")?;
            out.extend_from_slice(entry.key.as_bytes());
            out.extend_from_slice(b" = \"");
            out.extend_from_slice(&entry.value);
            out.extend_from_slice(b"\"\n");
        }
        if out.len() > TEXT_MAX {
            return Err(invalid(format!("the descriptor would be longer than {TEXT_MAX} bytes")));
        }
        Ok(out)
    }

    /// The text padded with zeros to `size`, the number of bytes that an extent reserves for it.
    ///
    /// # Errors
    /// Those of [`Descriptor::to_bytes`], and `NoSpace` if the text does not fit.
    pub fn to_embedded_bytes(&self, size: usize) -> Result<Vec<u8>> {
        let mut out = self.to_bytes()?;
        if out.len() > size {
            let text = format!("the descriptor takes {} bytes, and the extent has room for {size}", out.len());
            return Err(crate::Error::new(crate::ErrorKind::NoSpace, text));
        }
        out.resize(size, 0);
        Ok(out)
    }

    fn write_header(&self, out: &mut Vec<u8>) -> Result<()> {
        let head = format!(
            "# Disk DescriptorFile\nversion={}\nencoding=\"{}\"\nCID={}\nparentCID={}\n",
            self.version,
            self.encoding.name(),
            self.content,
            identity::parent_text(self.parent_content)
        );
        out.extend_from_slice(head.as_bytes());
        debug_assert!(out.len() < QEMU_HEAD_MAX);
        if let Some(native) = self.native_snapshot {
            self.write_quoted("isNativeSnapshot", if native { "yes" } else { "no" }, out)?;
        }
        self.write_quoted("createType", self.create_type.name(), out)?;
        match &self.parent_hint {
            Some(hint) => self.write_quoted("parentFileNameHint", hint, out),
            None => {
                out.push(b'\n');
                Ok(())
            }
        }
    }

    fn write_quoted(&self, key: &str, value: &str, out: &mut Vec<u8>) -> Result<()> {
        let value = quotable(&self.encoding, value, key)?;
        out.extend_from_slice(key.as_bytes());
        out.extend_from_slice(b"=\"");
        out.extend_from_slice(&value);
        out.extend_from_slice(b"\"\n");
        Ok(())
    }
}

/// The bytes of a name for use between quotes.
pub(super) fn quotable<'a>(encoding: &Encoding, text: &'a str, what: &str) -> Result<Cow<'a, [u8]>> {
    let bytes = encoding.encode(text)?;
    if bytes.is_empty() || bytes.len() > PATH_MAX || bytes.contains(&b'"') {
        let text = text.escape_debug();
        return Err(invalid(format!("{what} '{text}' cannot be written: it is empty, too long or holds a quote")));
    }
    check_plain(&bytes, what)?;
    Ok(bytes)
}

/// Refuses bytes that would end a line or the text.
pub(super) fn check_plain(bytes: &[u8], what: &str) -> Result<()> {
    if bytes.iter().any(|byte| matches!(byte, 0 | b'\n')) {
        return Err(invalid(format!("{what} '{}' holds a line break or a zero", bytes.escape_ascii())));
    }
    Ok(())
}
