//! Walking an XML document in one pass, in time and memory linear in its length.
//!
//! Elements and attributes are compared by local name, so that the namespaces of different OVF versions are treated
//! alike. Only XML's five predefined entities are accepted, and no document types.

use crate::{Error, ErrorKind, Result};
use quick_xml::escape::resolve_predefined_entity;
use quick_xml::events::{BytesStart, Event};
use quick_xml::{Reader, XmlVersion};

/// The deepest nesting of elements.
const DEPTH_MAX: usize = 64;
/// The most attributes of one element.
const ATTRIBUTES_MAX: usize = 64;

/// An element that begins.
pub(super) struct Element {
    attributes: Vec<(String, String)>,
}

impl Element {
    /// The value of an attribute.
    pub(super) fn attribute(&self, name: &str) -> Option<&str> {
        self.attributes.iter().find(|(own, _)| own == name).map(|(_, value)| value.as_str())
    }
}

/// An event of the walk. The path has the names of the elements from the outermost to this one.
pub(super) enum Step<'a> {
    /// An element begins.
    Open(&'a [String], &'a Element),
    /// An element ends, with the text directly in it; the text of inner elements is not included.
    Close(&'a [String], &'a str),
}

/// Walks a document; an error of `visit` ends the walk.
pub(super) fn walk(text: &str, visit: &mut dyn FnMut(Step<'_>) -> Result<()>) -> Result<()> {
    let mut reader = Reader::from_str(text);
    let mut path: Vec<String> = Vec::new();
    let mut texts: Vec<String> = Vec::new();
    let mut roots = 0;
    loop {
        match reader.read_event().map_err(wrong)? {
            Event::Start(start) => {
                roots += usize::from(path.is_empty());
                open(&start, &mut path, visit)?;
                texts.push(String::new());
            }
            Event::Empty(start) => {
                roots += usize::from(path.is_empty());
                open(&start, &mut path, visit)?;
                visit(Step::Close(&path, ""))?;
                path.pop();
            }
            Event::End(_) => {
                visit(Step::Close(&path, texts.last().map_or("", |text| text.trim())))?;
                path.pop();
                texts.pop();
            }
            Event::Text(part) => append(&mut texts, &part),
            Event::CData(part) => append(&mut texts, &part),
            Event::GeneralRef(reference) => {
                let character = reference.resolve_char_ref().map_err(wrong)?;
                match (character, resolve_predefined_entity(&reference)) {
                    (Some(character), _) => append(&mut texts, character.encode_utf8(&mut [0; 4])),
                    (_, Some(text)) => append(&mut texts, text),
                    _ => return Err(wrong(format!("entity {:?} is not known", &*reference))),
                }
            }
            Event::DocType(_) => return Err(wrong("it has a document type, which no OVF needs")),
            Event::Eof if roots == 1 && path.is_empty() => return Ok(()),
            Event::Eof => return Err(wrong("it ends too early, or is empty")),
            Event::Comment(_) | Event::Decl(_) | Event::PI(_) => {}
        }
    }
}

fn append(texts: &mut [String], part: &str) {
    if let Some(text) = texts.last_mut() {
        text.push_str(part);
    }
}

fn open(start: &BytesStart<'_>, path: &mut Vec<String>, visit: &mut dyn FnMut(Step<'_>) -> Result<()>) -> Result<()> {
    if path.len() == DEPTH_MAX {
        return Err(wrong(format!("its elements are nested deeper than {DEPTH_MAX}")));
    }
    let mut attributes = Vec::new();
    // The XML reader's own check for duplicates takes quadratic time.
    for attribute in start.attributes().with_checks(false) {
        let attribute = attribute.map_err(wrong)?;
        let value = attribute.normalized_value(XmlVersion::Explicit1_0).map_err(wrong)?;
        if attributes.len() == ATTRIBUTES_MAX {
            return Err(wrong(format!("an element has more than {ATTRIBUTES_MAX} attributes")));
        }
        attributes.push((attribute.key.local_name().into_inner().to_owned(), value.into_owned()));
    }
    path.push(start.local_name().into_inner().to_owned());
    visit(Step::Open(path, &Element { attributes }))
}

/// The error for an invalid document.
pub(super) fn wrong(what: impl std::fmt::Display) -> Error {
    Error::new(ErrorKind::Corrupt, format!("the OVF descriptor is damaged: {what}"))
}
