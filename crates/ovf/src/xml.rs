//! XML as a tree of elements, within limits.
//!
//! Elements and attributes are identified by their local names, because each writer chooses its own namespace prefixes.
//! Only XML's five predefined entities are accepted, and no document types, so that no entity can expand to a long
//! text.

use error::{Error, ErrorKind, Result};
use quick_xml::escape::resolve_predefined_entity;
use quick_xml::events::{BytesStart, Event};
use quick_xml::{Reader, XmlVersion};

/// Deepest nesting of elements.
const DEPTH_MAX: usize = 64;
/// Most attributes of one element.
const ATTRIBUTES_MAX: usize = 64;
/// Most elements. A tree of this many elements takes about 80 MB.
const ELEMENTS_MAX: usize = 500_000;

/// An element.
#[derive(Debug, Default)]
pub struct Element {
    /// The element's local name.
    pub name: String,
    /// The line on which the element begins.
    pub line: usize,
    /// The element's own text, without the text of inner elements.
    pub text: String,
    attributes: Vec<(String, String)>,
    /// The elements inside this element.
    pub children: Vec<Element>,
}

impl Element {
    /// The value of an attribute.
    pub fn attribute(&self, name: &str) -> Option<&str> {
        self.attributes.iter().find(|(own, _)| own == name).map(|(_, value)| value.as_str())
    }

    /// The first inner element with that name.
    pub fn child(&self, name: &str) -> Option<&Self> {
        self.children.iter().find(|child| child.name == name)
    }

    /// The inner elements with that name.
    pub fn all<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a Self> {
        self.children.iter().filter(move |child| child.name == name)
    }

    /// The element that is reached by following a path of names.
    pub fn at(&self, path: &[&str]) -> Option<&Self> {
        path.iter().try_fold(self, |element, name| element.child(name))
    }

    /// The text of the first inner element with that name; `None` if it is missing or empty.
    pub fn text_of(&self, name: &str) -> Option<&str> {
        self.child(name).map(|child| child.text.as_str()).filter(|text| !text.is_empty())
    }
}

/// Parses a document; errors name `origin` and the line.
pub fn parse(bytes: &[u8], origin: &str) -> Result<Element> {
    let text = std::str::from_utf8(bytes).map_err(|error| {
        let line = newlines(&bytes[..error.valid_up_to()]) + 1;
        wrong(origin, line, "it is not UTF-8")
    })?;
    let text = text.trim_start_matches('\u{feff}').trim_end_matches('\0');
    let mut reader = Reader::from_str(text);
    let mut open: Vec<Element> = Vec::new();
    let (mut line, mut counted, mut elements) = (1, 0, 0);
    let mut root = None;
    loop {
        let event = reader.read_event();
        let at = usize::try_from(reader.buffer_position()).map_or(text.len(), |at| at.min(text.len()));
        let begins = line;
        line += newlines(&text.as_bytes()[counted.min(at)..at]);
        counted = at;
        let fail = |what: &dyn std::fmt::Display| wrong(origin, line, what);
        match event.map_err(|error| fail(&error))? {
            event @ (Event::Start(_) | Event::Empty(_)) => {
                elements += 1;
                if open.is_empty() && root.is_some() {
                    return Err(fail(&"it has a second root element, and XML has only one"));
                }
                if open.len() == DEPTH_MAX || elements > ELEMENTS_MAX {
                    return Err(fail(&"it has too many elements, or they are nested too deeply"));
                }
                match event {
                    Event::Start(start) => open.push(element(&start, begins).map_err(|what| fail(&what))?),
                    Event::Empty(start) => {
                        let done = element(&start, begins).map_err(|what| fail(&what))?;
                        close(&mut open, done, &mut root);
                    }
                    _ => {}
                }
            }
            Event::End(_) => {
                if let Some(mut done) = open.pop() {
                    done.text = done.text.trim().to_owned();
                    close(&mut open, done, &mut root);
                }
            }
            Event::Text(part) => append(&mut open, &part),
            Event::CData(part) => append(&mut open, &part),
            Event::GeneralRef(reference) => {
                let character = reference.resolve_char_ref().map_err(|error| fail(&error))?;
                match (character, resolve_predefined_entity(&reference)) {
                    (Some(character), _) => append(&mut open, character.encode_utf8(&mut [0; 4])),
                    (_, Some(text)) => append(&mut open, text),
                    _ => return Err(fail(&format!("entity {:?} is not known", &*reference))),
                }
            }
            Event::DocType(_) => return Err(fail(&"it has a document type, which no description of a machine needs")),
            Event::Eof => {
                let whole = root.filter(|_| open.is_empty());
                return whole.ok_or_else(|| wrong(origin, line, "it ends too early, or is empty"));
            }
            Event::Comment(_) | Event::Decl(_) | Event::PI(_) => {}
        }
    }
}

fn newlines(bytes: &[u8]) -> usize {
    bytes.iter().filter(|byte| **byte == b'\n').count()
}

fn wrong(origin: &str, line: usize, what: impl std::fmt::Display) -> Error {
    Error::new(ErrorKind::Invalid, format!("'{origin}', line {line}: {what}"))
}

fn append(open: &mut [Element], part: &str) {
    if let Some(element) = open.last_mut() {
        element.text.push_str(part);
    }
}

fn close(open: &mut [Element], done: Element, root: &mut Option<Element>) {
    match open.last_mut() {
        Some(parent) => parent.children.push(done),
        None => *root = Some(done),
    }
}

fn element(start: &BytesStart<'_>, line: usize) -> std::result::Result<Element, String> {
    let mut attributes = Vec::new();
    // The XML library's own check for duplicate attributes takes quadratic time.
    for attribute in start.attributes().with_checks(false) {
        let attribute = attribute.map_err(|error| error.to_string())?;
        let value = attribute.normalized_value(XmlVersion::Explicit1_0).map_err(|error| error.to_string())?;
        if attributes.len() == ATTRIBUTES_MAX {
            return Err(format!("an element has more than {ATTRIBUTES_MAX} attributes"));
        }
        attributes.push((attribute.key.local_name().into_inner().to_owned(), value.into_owned()));
    }
    let name = start.local_name().into_inner().to_owned();
    Ok(Element { name, line, attributes, ..Element::default() })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_tree_with_lines() {
        let text =
            b"<?xml version='1.0'?>\n<a xmlns:x='u' x:k='v&amp;w'>\n  <!-- c --><x:b>1 &lt; 2</x:b>\n<b/>t</a>\n";
        let root = parse(text, "f").unwrap();
        assert_eq!((root.name.as_str(), root.attribute("k"), root.text.as_str()), ("a", Some("v&w"), "t"));
        assert_eq!(root.all("b").map(|b| (b.text.as_str(), b.line)).collect::<Vec<_>>(), [("1 < 2", 3), ("", 4)]);
        assert!(root.at(&["b", "c"]).is_none() && root.text_of("b") == Some("1 < 2"));
    }

    #[test]
    fn what_is_no_tree_is_refused_with_its_line() {
        let deep = "<a>".repeat(70) + &"</a>".repeat(70);
        let many = format!("<a>{}</a>", "<b/>".repeat(ELEMENTS_MAX));
        for (text, line) in [
            ("", 1),
            ("<a>\n<b>\n</a>", 3),
            ("<a>", 1),
            ("<a/>\n<b/>", 2),
            ("\n<!DOCTYPE a [<!ENTITY e 'x'>]><a>&e;</a>", 2),
            ("<a>\n&nbsp;</a>", 2),
            (&deep, 1),
            (&many, 1),
        ] {
            let error = parse(text.as_bytes(), "f").unwrap_err().to_string();
            assert!(error.starts_with(&format!("'f', line {line}: ")), "{error}");
        }
        let two = parse(b"<a/>\n<b/>", "f").unwrap_err().to_string();
        assert!(two.ends_with("a second root element, and XML has only one"), "{two}");
        assert!(parse(b"<a>\n\xff</a>", "f").unwrap_err().to_string().contains("line 2: it is not UTF-8"));
    }
}
