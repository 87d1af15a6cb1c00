//! Parsing a descriptor: line by line, in one pass over the bytes.

use super::{
    ContentId, CreateType, Database, Descriptor, EXTENTS_MAX, Encoding, ExtentLine, LINE_MAX, PATH_MAX, Result,
    TEXT_MAX, corrupt, identity, shown, unsupported,
};
use crate::{CAPACITY_MAX, SECTOR};

/// Header keys that lamina uses, in the order of [`Header`]'s fields.
const KEYS: [&str; 8] = [
    "version",
    "encoding",
    "CID",
    "parentCID",
    "isNativeSnapshot",
    "createType",
    "parentFileNameHint",
    "changeTrackPath",
];

/// The value of each key in [`KEYS`], as written in the text.
#[derive(Default)]
struct Header<'a> {
    values: [Option<&'a [u8]>; KEYS.len()],
}

/// Whether a file that begins with these bytes is a descriptor: then its first line that is neither empty nor a comment
/// is `version=` with a number.
pub(crate) fn starts_like_one(bytes: &[u8]) -> bool {
    /// The most lines examined.
    const LINES_MAX: usize = 64;
    for line in lines(bytes).take(LINES_MAX) {
        let line = line.trim_ascii();
        if line.is_empty() || line.starts_with(b"#") {
            // Comments are text; a file with zero bytes in a comment is binary data and no descriptor.
            if line.contains(&0) {
                return false;
            }
            continue;
        }
        let Some((key, value)) = pair(line) else { return false };
        return key.eq_ignore_ascii_case(b"version") && value.first().is_some_and(u8::is_ascii_digit);
    }
    false
}

impl Descriptor {
    /// Parses the descriptor in a file's bytes, or one that is embedded in an extent and followed by zeros.
    ///
    /// # Errors
    /// `Corrupt` for bytes that are no descriptor or contradict themselves, `Unsupported` for a newer or unknown kind
    /// of descriptor.
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
        if end > TEXT_MAX {
            return Err(corrupt(format!("the descriptor is longer than {TEXT_MAX} bytes")));
        }
        let text = &bytes[..end];
        if !starts_like_one(text) {
            return Err(corrupt("this is no disk descriptor: it does not begin with its version"));
        }
        let header = Header::read(text)?;
        if content_lines(text).filter_map(pair).any(|(key, value)| is_of_encryption(key, value)) {
            return Err(unsupported("the disk is encrypted by VMware: decrypt it there, and copy it again"));
        }
        let encoding = header.encoding()?;
        let mut extents = Vec::new();
        let mut database = Database::default();
        let mut sectors = 0u64;
        for line in content_lines(text) {
            if let Some(extent) = ExtentLine::parse(line, &encoding) {
                let extent = extent?;
                if extents.len() >= EXTENTS_MAX {
                    return Err(unsupported(format!("the descriptor names more than {EXTENTS_MAX} extents")));
                }
                sectors = sectors.saturating_add(extent.sectors);
                if sectors > CAPACITY_MAX / SECTOR {
                    return Err(corrupt(format!("the extents together exceed {} TiB", CAPACITY_MAX >> 40)));
                }
                extents.push(extent);
            } else if let Some((key, value)) = pair(line)
                && key.len() > 4
                && key[..4].eq_ignore_ascii_case(b"ddb.")
            {
                let Ok(key) = std::str::from_utf8(key) else {
                    return Err(corrupt(format!("the ddb key {} is no text", shown(key))));
                };
                // When the entry is written, blanks and quotes are added; the line has to stay within its limit.
                if key.len() + value.len() + 5 > LINE_MAX {
                    return Err(corrupt(format!("the ddb entry {} is too long", shown(key.as_bytes()))));
                }
                database.push(key.to_owned(), value.to_vec())?;
            }
        }
        let content = header.content(2)?;
        Ok(Self {
            version: header.version()?,
            content: ContentId::new(content)
                .ok_or_else(|| corrupt("CID is ffffffff, which means that there is no content"))?,
            parent_content: ContentId::new(header.content(3)?),
            native_snapshot: header.native_snapshot()?,
            create_type: CreateType::named(&header.required_text(5, &encoding)?),
            parent_hint: header.text(6, &encoding)?,
            change_tracking: header.text(7, &encoding)?,
            encoding,
            extents,
            database,
        })
    }
}

impl<'a> Header<'a> {
    fn read(text: &'a [u8]) -> Result<Self> {
        let mut header = Self::default();
        for line in lines(text) {
            if line.len() > LINE_MAX {
                return Err(corrupt(format!("the descriptor has a line of more than {LINE_MAX} bytes")));
            }
        }
        for line in content_lines(text) {
            let Some((key, value)) = pair(line) else { continue };
            let Some(index) = KEYS.iter().position(|known| known.as_bytes().eq_ignore_ascii_case(key)) else {
                continue;
            };
            match header.values[index] {
                Some(before) if before != value => {
                    return Err(corrupt(format!(
                        "the descriptor says {}={} and {}: remove the wrong line",
                        KEYS[index],
                        shown(before),
                        shown(value)
                    )));
                }
                _ => header.values[index] = Some(value),
            }
        }
        Ok(header)
    }

    fn required(&self, index: usize) -> Result<&'a [u8]> {
        self.values[index].ok_or_else(|| corrupt(format!("the descriptor has no {} line", KEYS[index])))
    }

    fn version(&self) -> Result<u32> {
        let value = self.required(0)?;
        match value {
            [digit @ b'1'..=b'4'] => Ok(u32::from(digit - b'0')),
            _ => Err(unsupported(format!("descriptor version {} is unknown; 1 to 4 are read", shown(value)))),
        }
    }

    fn encoding(&self) -> Result<Encoding> {
        let Some(value) = self.values[1] else { return Ok(Encoding::Utf8) };
        let named = std::str::from_utf8(value).ok().and_then(Encoding::named);
        named.ok_or_else(|| corrupt(format!("{} is no name of an encoding", shown(value))))
    }

    fn content(&self, index: usize) -> Result<u32> {
        let value = self.required(index)?;
        let number = std::str::from_utf8(value).ok().and_then(identity::parse_number);
        number.ok_or_else(|| {
            corrupt(format!("{} is {}, not a hexadecimal number of up to 8 digits", KEYS[index], shown(value)))
        })
    }

    fn native_snapshot(&self) -> Result<Option<bool>> {
        match self.values[4] {
            None => Ok(None),
            Some(value) if value.eq_ignore_ascii_case(b"no") => Ok(Some(false)),
            Some(value) if value.eq_ignore_ascii_case(b"yes") => Ok(Some(true)),
            Some(value) => Err(corrupt(format!("isNativeSnapshot is {}, neither yes nor no", shown(value)))),
        }
    }

    fn required_text(&self, index: usize, encoding: &Encoding) -> Result<String> {
        self.required(index)?;
        self.text(index, encoding)?.ok_or_else(|| corrupt(format!("{} is empty", KEYS[index])))
    }

    /// The value of an optional key; an empty value counts as absent.
    fn text(&self, index: usize, encoding: &Encoding) -> Result<Option<String>> {
        match self.values[index] {
            None | Some([]) => Ok(None),
            Some(value) if value.len() > PATH_MAX || value.contains(&b'"') => {
                Err(corrupt(format!("{} is {}, which is too long or holds a quote", KEYS[index], shown(value))))
            }
            Some(value) => encoding.decode(value, KEYS[index]).map(Some),
        }
    }
}

/// The lines of a text, without line ends. A UTF-8 byte order mark at the beginning, as Windows editors write it, is
/// skipped.
fn lines(text: &[u8]) -> impl Iterator<Item = &[u8]> {
    let text = text.strip_prefix(b"\xef\xbb\xbf").unwrap_or(text);
    text.split(|byte| *byte == b'\n')
}

/// The lines that are neither empty nor comments, without surrounding blanks.
fn content_lines(text: &[u8]) -> impl Iterator<Item = &[u8]> {
    lines(text).map(<[u8]>::trim_ascii).filter(|line| !line.is_empty() && !line.starts_with(b"#"))
}

/// Whether a line says that the extents are encrypted: the keys, or the I/O filter of vSphere that encrypts.
fn is_of_encryption(key: &[u8], value: &[u8]) -> bool {
    let mut filters = value.split(|byte| matches!(byte, b',' | b';' | b' '));
    key.eq_ignore_ascii_case(b"encryptionKeys")
        || key.eq_ignore_ascii_case(b"ddb.iofilters")
            && filters.any(|filter| filter.eq_ignore_ascii_case(b"vmwarevmcrypt"))
}

/// The key and the value of a line, without surrounding blanks and quotes.
fn pair(line: &[u8]) -> Option<(&[u8], &[u8])> {
    let equals = line.iter().position(|byte| *byte == b'=')?;
    let (key, value) = (line[..equals].trim_ascii(), line[equals + 1..].trim_ascii());
    let value = value.strip_prefix(b"\"").and_then(|inner| inner.strip_suffix(b"\"")).unwrap_or(value);
    (!key.is_empty()).then_some((key, value))
}
