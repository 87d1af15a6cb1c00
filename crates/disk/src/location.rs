//! The location of a datastore: a folder, or a name on another medium.
//!
//! 1. A location is a text, and is printed as the user entered it. As for `qemu-img`, a text with a colon before its
//!    first slash is `SCHEME:NAME`; every other text is the path of a folder. A folder whose name has a colon is
//!    written `./a:b`.
//! 2. One call of [`register`] adds a medium. No other code depends on the set of media.
//! 3. Code that needs a local folder calls [`Location::need_folder`], which fails for other media.
//! 4. [`Location::parse`], for the input of users, refuses a scheme that is not registered. A location in a message or
//!    a record is refused only when it is used: a record must be readable even if the medium in it is not registered.

use backend::local::{LocalDirectory, LocalQueues};
use backend::{Access, Directory, IoMode, private};
use error::{Error, ErrorKind, IoContext, Result};
use parking_lot::RwLock;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::ffi::OsStr;
use std::fmt;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A file that every datastore has.
const SUPERBLOCK: &str = "superblock";
/// The lock file of a datastore. A failed creation removes the file again.
const LOCK_FILE: &str = "lock";

/// The registered schemes.
static SCHEMES: RwLock<Vec<Arc<Scheme>>> = RwLock::new(Vec::new());

/// A medium: how its datastores are named and opened.
pub struct Scheme {
    /// The part of a location before the colon.
    pub name: &'static str,
    /// The form of locations on this medium, for messages: `rados:POOL/NAMESPACE`.
    pub form: &'static str,
    /// Whether the text after the colon is a name on this medium.
    pub accepts: fn(&str) -> bool,
    /// Connects to the directory of a name. A lock that one connection holds excludes all other connections.
    pub connect: Box<Connect>,
}

/// See [`Scheme::connect`].
pub type Connect = dyn Fn(&str) -> io::Result<Arc<dyn Directory>> + Send + Sync;

/// Registers a scheme in this process. The caller does this before the first location is parsed.
///
/// # Errors
/// `Exists` if the scheme is registered already, `Invalid` if no location can begin with its name.
pub fn register(scheme: Scheme) -> Result<()> {
    let name = scheme.name;
    if name.is_empty() || name.contains([':', '/']) {
        return Err(Error::new(ErrorKind::Invalid, format!("'{}' cannot be a scheme", name.escape_debug())));
    }
    let mut schemes = SCHEMES.write();
    if schemes.iter().any(|known| known.name == name) {
        return Err(Error::new(ErrorKind::Exists, format!("scheme '{name}' is registered already")));
    }
    schemes.push(Arc::new(scheme));
    Ok(())
}

/// The location of a datastore.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Location(LocationKind);

#[derive(Clone, Debug, PartialEq, Eq)]
enum LocationKind {
    /// A folder, by a path that cannot be parsed as `SCHEME:NAME`.
    Folder(PathBuf),
    /// A name on a medium.
    Medium { scheme: String, name: String },
}
use LocationKind::{Folder, Medium};

/// The parts of `SCHEME:NAME`; `None` for the path of a folder.
fn split(text: &OsStr) -> Option<(&OsStr, &OsStr)> {
    let bytes = text.as_bytes();
    let colon = bytes.iter().position(|byte| matches!(byte, b':' | b'/')).filter(|at| bytes[*at] == b':')?;
    Some((OsStr::from_bytes(&bytes[..colon]), OsStr::from_bytes(&bytes[colon + 1..])))
}

impl Location {
    /// Parses the input of a user.
    ///
    /// # Errors
    /// `Invalid` if the scheme is not registered, or does not accept the name.
    pub fn parse(text: impl AsRef<OsStr>) -> Result<Self> {
        let location = Self::read(text.as_ref());
        if let Medium { scheme, name } = &location.0 {
            location.find(scheme, name)?;
        }
        Ok(location)
    }

    /// Parses a location whose scheme need not be registered.
    fn read(text: &OsStr) -> Self {
        let part = |part: &OsStr| part.to_string_lossy().into_owned();
        Self(match split(text) {
            None => Folder(text.into()),
            Some((scheme, name)) => Medium { scheme: part(scheme), name: part(name) },
        })
    }

    /// The registered scheme `wanted`, if it accepts `name`.
    fn find(&self, wanted: &str, name: &str) -> Result<Arc<Scheme>> {
        let text = self.to_string().escape_debug().to_string();
        let schemes = SCHEMES.read();
        let Some(scheme) = schemes.iter().find(|scheme| scheme.name == wanted) else {
            let mut forms = vec!["the path of a folder"];
            forms.extend(schemes.iter().map(|scheme| scheme.form));
            let forms = forms.join(" or ");
            let text = format!(
                "no datastore can be at '{text}': '{}' is not a scheme known here; a location is {forms}, and a folder \
                 with a colon in its name is written './{text}'",
                wanted.escape_debug()
            );
            return Err(Error::new(ErrorKind::Invalid, text));
        };
        if !(scheme.accepts)(name) {
            let text = format!("no datastore can be at '{text}': locations there are written {}", scheme.form);
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        Ok(Arc::clone(scheme))
    }

    /// The path of the local folder; `None` on another medium.
    pub fn local_path(&self) -> Option<&Path> {
        match &self.0 {
            Folder(path) => Some(path),
            Medium { .. } => None,
        }
    }

    /// The local folder of the datastore, for a feature that needs one.
    ///
    /// # Errors
    /// `Unsupported` if the datastore is not in a local folder; the message says that the datastore cannot have `what`.
    pub fn need_folder(&self, what: &str) -> Result<&Path> {
        self.local_path().ok_or_else(|| {
            let text = format!("datastore '{self}' is not in a local folder: it cannot have {what}");
            Error::new(ErrorKind::Unsupported, text)
        })
    }

    /// If the folder does not exist, returns an error that says what to do.
    pub fn require(&self) -> Result<()> {
        let Folder(path) = &self.0 else { return Ok(()) };
        let sentence = match std::fs::metadata(path) {
            Ok(metadata) if metadata.is_dir() => return Ok(()),
            Ok(_) => format!("'{self}' is not a folder: a datastore is one"),
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                format!("no datastore at '{self}': make one with `lamina init {self}`")
            }
            Err(e) => return Err(Error::io(format!("looking for the datastore '{self}'"), e)),
        };
        Err(Error::new(ErrorKind::NotFound, sentence))
    }

    /// The location with an absolute path, which is valid in every process.
    pub fn absolute(&self) -> Result<Self> {
        let Folder(path) = &self.0 else { return Ok(self.clone()) };
        let invalid = |e| Error::new(ErrorKind::Invalid, format!("'{self}' is no path: {e}"));
        std::path::absolute(path).map(Self::from).map_err(invalid)
    }

    /// The location with the canonical path of its folder, which must exist.
    pub fn resolved(&self) -> Result<Self> {
        self.require()?;
        let Folder(path) = &self.0 else { return Ok(self.clone()) };
        path.canonicalize().map(Self::from).during(|| format!("finding '{self}'"))
    }

    /// Creates the folder of a new datastore if it is missing, and returns whether it was missing. A folder that all
    /// users share, such as `/tmp`, is refused, because a datastore denies them the access.
    pub(crate) fn make(&self) -> Result<bool> {
        let Folder(path) = &self.0 else { return Ok(false) };
        let making = || format!("making {self}");
        if path.exists() {
            if !path.is_dir() {
                let text = format!("'{self}' is not a folder, as a datastore must be: give the path of a new folder");
                return Err(Error::new(ErrorKind::Exists, text));
            }
            if private::is_shared_folder(path) {
                let text =
                    format!("all users share the folder '{self}': give a folder of its own, such as '{self}/store'");
                return Err(Error::new(ErrorKind::Invalid, text));
            }
            return Ok(false);
        }
        if let Some(parent) = path.parent() {
            std::fs::create_dir_all(parent).during(making)?;
        }
        private::create_folder_of_caller(path).during(making)?;
        Ok(true)
    }

    /// Denies other users the access to the folder of a new datastore, which may have existed before.
    pub(crate) fn close_to_others(&self) {
        let Folder(path) = &self.0 else { return };
        if let Err(error) = private::close_folder(path) {
            tracing::warn!(datastore = %self, %error, "the folder stays open to other users");
        }
    }

    /// Undoes [`Location::make`] after a failed creation: removes the files that the creation made, and the folder if
    /// it is empty then.
    pub(crate) fn unmake(&self) {
        if let Folder(path) = &self.0 {
            let _ = std::fs::remove_file(path.join(LOCK_FILE));
            let _ = std::fs::remove_dir(path);
        }
    }

    /// Fails if the folder of an open datastore is no longer at its path. Called before an operation that uses the
    /// path.
    pub(crate) fn check_not_moved(&self, directory: &dyn Directory) -> Result<()> {
        let Folder(path) = &self.0 else { return Ok(()) };
        directory.check_not_moved(path, &format!("the folder of the datastore '{self}'"))
    }

    /// Connects to the directory. `queues` applies only to a folder, because another medium has its own queues.
    pub(crate) fn connect(&self, queues: LocalQueues) -> Result<Arc<dyn Directory>> {
        let connected = match &self.0 {
            Folder(path) => {
                LocalDirectory::open(path, queues).map(|folder| Arc::new(folder.keep_owner()) as Arc<dyn Directory>)
            }
            Medium { scheme, name } => (self.find(scheme, name)?.connect)(name),
        };
        connected.during(|| format!("opening {self}"))
    }
}

/// Whether the directory contains a datastore; true if this cannot be determined.
pub(crate) fn holds_datastore(directory: &dyn Directory) -> bool {
    let superblock = directory.open_foreign(SUPERBLOCK, IoMode::Buffered, Access::Read);
    !superblock.is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Folder(path) => path.display().fmt(f),
            Medium { scheme, name } => write!(f, "{scheme}:{name}"),
        }
    }
}

/// The path of a folder, even if its text has the form of a name on another medium.
impl From<PathBuf> for Location {
    fn from(path: PathBuf) -> Self {
        match split(path.as_os_str()) {
            None => Self(Folder(path)),
            Some(_) => Self(Folder(Path::new(".").join(path))),
        }
    }
}

impl From<&Path> for Location {
    fn from(path: &Path) -> Self {
        path.to_path_buf().into()
    }
}

impl From<&PathBuf> for Location {
    fn from(path: &PathBuf) -> Self {
        path.clone().into()
    }
}

impl From<&Location> for Location {
    fn from(location: &Location) -> Self {
        location.clone()
    }
}

impl Serialize for Location {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        match &self.0 {
            Folder(path) => path.serialize(serializer),
            Medium { .. } => serializer.collect_str(self),
        }
    }
}

impl<'de> Deserialize<'de> for Location {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        PathBuf::deserialize(deserializer).map(|text| Self::read(text.as_os_str()))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use std::ffi::OsString;
    use std::os::unix::ffi::OsStringExt;

    #[test]
    fn text_before_a_colon_before_the_first_slash_is_a_scheme() {
        for path in ["store", "/srv/a:b", "./a:b", "a/b:c", "../x:y/z", "", "/", "./rados:a/b"] {
            let location = Location::parse(path).unwrap();
            assert_eq!(location.local_path(), Some(Path::new(path)));
            assert_eq!(location.to_string(), path);
        }
        for text in ["rados:a/b", "a:b", ":", ":a", "2026-11-24T12:00", "a:/b", "file:/srv/a"] {
            let error = Location::parse(text).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid);
            let told = ["the path of a folder".to_owned(), format!("'./{text}'")];
            assert!(told.iter().all(|told| error.to_string().contains(told)), "{error}");
        }
        let bytes = OsString::from_vec(b"/srv/\xff".to_vec());
        assert_eq!(Location::parse(&bytes).unwrap().local_path(), Some(Path::new(&bytes)));
        assert!(Location::parse(OsString::from_vec(b"\xff\n:a".to_vec())).is_err());
    }

    #[test]
    fn the_path_of_a_folder_has_no_scheme_and_is_parsed_as_printed() {
        let location = Location::from(Path::new("a:b"));
        assert_eq!(location.local_path(), Some(Path::new("./a:b")));
        assert_eq!(Location::parse(location.to_string()).unwrap(), location);
        assert!(location.absolute().unwrap().local_path().unwrap().ends_with("a:b"));
    }

    #[test]
    fn a_record_with_an_unknown_scheme_is_readable_and_unchanged() {
        let location: Location = serde_json::from_str("\"nowhere:a/b\"").unwrap();
        assert_eq!(serde_json::to_string(&location).unwrap(), "\"nowhere:a/b\"");
        assert_eq!(location.local_path(), None);
        assert_eq!(location.connect(LocalQueues::Threads).err().unwrap().kind(), ErrorKind::Invalid);
        let folder: Location = serde_json::from_str("\"/srv/a:b\"").unwrap();
        assert_eq!(folder, Location::from(Path::new("/srv/a:b")));
        assert_eq!(serde_json::to_string(&folder).unwrap(), "\"/srv/a:b\"");
    }
}
