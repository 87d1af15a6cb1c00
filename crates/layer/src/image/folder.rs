//! Access control for files: every file that an image names, as opposed to the user, is opened through this module.
//!
//! A descriptor is untrusted input that names files of this machine: extents, and a parent. Invariants:
//!
//! 1. By default only files in the folder of the image that the user named, and in folders below it, are opened. `..`,
//!    absolute paths and other folders need a root that the caller permitted; the error names the missing root.
//! 2. The real location of a file decides: the name is resolved first, including symbolic links, and the result is
//!    compared with the roots. A link to a file outside the roots is refused like the path of that file.
//! 3. The resolved file is the one that is opened: its folder is opened component by component, and then the file,
//!    without following links, so that no other process can replace a component in between.
//! 4. A refused name is not looked up in the file system, so an error does not reveal whether such a file exists.
//! 5. Only regular files are opened: no device, pipe or socket.
//!
//! The file that the user named needs no permission: its folder is the first root. A file that a description of a
//! machine named was permitted when the description was read, and its path is canonical since then
//! ([`Place::resolved`]).

use crate::{Error, ErrorKind, IoContext, Result};
use backend::local::LocalDirectory;
use backend::{Access, Directory, File, IoMode};
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

/// The longest reference that is followed, in bytes.
const REFERENCE_MAX: usize = 4096;

/// A folder in which files are opened by the names that images contain.
#[derive(Clone)]
pub struct Folder {
    directory: Arc<dyn Directory>,
    /// The canonical path; `None` for a medium without paths, such as a simulated disk: then only plain names are
    /// possible.
    path: Option<Arc<Path>>,
    /// Canonical paths of the folders below which every file may be opened.
    roots: Arc<[PathBuf]>,
    /// Whether files that root creates belong to the owner of the folder ([`LocalDirectory::keep_owner`]).
    keeps_owner: bool,
}

/// A file that may be opened: its folder and its name.
#[derive(Clone)]
pub struct Place {
    /// The folder of the file.
    pub folder: Folder,
    /// The name of the file in the folder.
    pub name: String,
}

impl Folder {
    /// A folder without a path. Only files in it can be named.
    pub fn plain(directory: Arc<dyn Directory>) -> Self {
        Self { directory, path: None, roots: Arc::from([]), keeps_owner: false }
    }

    /// A folder of the local file system, with other folders to which images in it may refer.
    pub fn local(path: &Path, permitted: &[PathBuf]) -> Result<Self> {
        let own = resolve(path)?;
        let mut roots = vec![own.clone()];
        for path in permitted {
            roots.push(resolve(path)?);
        }
        Self::at(own, roots.into(), false)
    }

    /// The folder of a disk in a datastore: files that root creates belong to the owner of the folder
    /// ([`LocalDirectory::keep_owner`]).
    pub fn of_disk(path: &Path) -> Result<Self> {
        let own = resolve(path)?;
        Self::at(own.clone(), Arc::from([own]), true)
    }

    fn at(path: PathBuf, roots: Arc<[PathBuf]>, keeps_owner: bool) -> Result<Self> {
        let directory =
            LocalDirectory::open_resolved(&path).during(|| format!("opening the folder '{}'", path.display()))?;
        let directory = if keeps_owner { directory.keep_owner() } else { directory };
        Ok(Self { directory: Arc::new(directory), path: Some(path.into()), roots, keeps_owner })
    }

    /// The backend's handle of the folder.
    pub fn directory(&self) -> &Arc<dyn Directory> {
        &self.directory
    }

    /// The folder's path, if it has one.
    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// The file that an image in this folder names by `reference`: a name, a relative path or an absolute path, with
    /// `/` or `\`. If the reference can only mean a file in this folder, the file need not exist.
    ///
    /// # Errors
    /// `Invalid` if the file must not be opened; the message names the option that would permit it. `NotFound` if it
    /// does not exist.
    pub fn resolve(&self, reference: &str) -> Result<Place> {
        if reference.is_empty() || reference.len() > REFERENCE_MAX || reference.contains('\0') {
            return Err(Error::new(ErrorKind::Invalid, format!("'{}' is no file name", reference.escape_debug())));
        }
        let slashes = reference.replace('\\', "/");
        let Some(own) = &self.path else {
            let plain = Path::new(&slashes);
            let name = plain.strip_prefix("./").unwrap_or(plain);
            return match name.components().collect::<Vec<_>>()[..] {
                [Component::Normal(_)] => Ok(Place { folder: self.clone(), name: name.display().to_string() }),
                _ => Err(not_permitted(reference, None)),
            };
        };
        let path = own.join(&slashes);
        // A path that will be refused is not looked up in the file system.
        let literal = without_dots(&path).ok_or_else(|| not_permitted(reference, None))?;
        if !self.permits_file(&literal) {
            return Err(not_permitted(reference, literal.parent()));
        }
        self.directory.check_not_moved(own, &format!("the folder '{}'", own.display()))?;
        let real = path.canonicalize().during(|| format!("looking for '{}'", path.display()))?;
        if !self.permits_file(&real) {
            return Err(not_permitted(reference, real.parent()));
        }
        self.place(&real)
    }

    /// The file with this canonical path.
    fn place(&self, real: &Path) -> Result<Place> {
        let (Some(folder), Some(name)) = (real.parent(), real.file_name().and_then(|name| name.to_str())) else {
            let text = format!("'{}' is no file, or its name is no text", real.display());
            return Err(Error::new(ErrorKind::Invalid, text));
        };
        let folder = match self.path() == Some(folder) {
            true => self.clone(),
            false => Self::at(folder.to_path_buf(), Arc::clone(&self.roots), self.keeps_owner)?,
        };
        Ok(Place { folder, name: name.to_owned() })
    }

    /// Whether a path is below one of the roots. A root itself is not a file below it.
    fn permits_file(&self, path: &Path) -> bool {
        path.parent().is_some_and(|folder| self.roots.iter().any(|root| folder.starts_with(root)))
    }

    /// A file in the folder `name` beside this one, for parents that were moved together with their children.
    pub(super) fn beside(&self, name: &str, file: &str) -> Result<Place> {
        self.resolve(&format!("../{name}/{file}"))
    }
}

impl Place {
    /// The file that the user named, after following links. The files to which it refers may be in its folder and in
    /// the folders `permitted`.
    pub fn local(path: &Path, permitted: &[PathBuf]) -> Result<Self> {
        let real = path.canonicalize().during(|| format!("looking for '{}'", path.display()))?;
        let (Some(folder), Some(name)) = (real.parent(), real.file_name().and_then(|name| name.to_str())) else {
            let text = format!("'{}' is no file, or its name is no text", path.display());
            return Err(Error::new(ErrorKind::Invalid, text));
        };
        Ok(Self { folder: Folder::local(folder, permitted)?, name: name.to_owned() })
    }

    /// As [`Place::local`], for a canonical path that was permitted before: `Invalid` if another process has replaced
    /// a component of the path by a link since.
    pub fn resolved(path: &Path, permitted: &[PathBuf]) -> Result<Self> {
        let place = Self::local(path, permitted)?;
        match place.folder.path().is_some_and(|folder| folder.join(&place.name) == path) {
            true => Ok(place),
            false => {
                let text = format!("'{}' leads to another file than before: a link has replaced it", path.display());
                Err(Error::new(ErrorKind::Invalid, text))
            }
        }
    }

    /// A file in a folder without a path.
    pub fn plain(directory: Arc<dyn Directory>, name: &str) -> Self {
        Self { folder: Folder::plain(directory), name: name.to_owned() }
    }

    /// Opens the file.
    pub fn open(&self, mode: IoMode, access: Access) -> Result<Arc<dyn File>> {
        self.folder.directory.open_foreign(&self.name, mode, access).during(|| format!("opening '{}'", self.label()))
    }

    /// The name for messages: with the path if there is one. Two places with the same label are the same file (hard
    /// links apart).
    pub fn label(&self) -> String {
        match &self.folder.path {
            Some(path) => path.join(&self.name).display().to_string(),
            None => self.name.clone(),
        }
    }
}

fn resolve(path: &Path) -> Result<PathBuf> {
    path.canonicalize().during(|| format!("looking for the folder '{}'", path.display()))
}

/// A path without `.` and `..`, computed from its text without a query of the file system; `None` if it leads above the
/// root directory.
fn without_dots(path: &Path) -> Option<PathBuf> {
    let mut out = PathBuf::new();
    for component in path.components() {
        match component {
            Component::ParentDir if !out.pop() => return None,
            Component::ParentDir | Component::CurDir => {}
            other => out.push(other),
        }
    }
    Some(out)
}

fn not_permitted(reference: &str, folder: Option<&Path>) -> Error {
    let reference = reference.escape_debug();
    let how = match folder {
        Some(folder) => format!("if that is meant, give --allow-folder '{}'", folder.display()),
        None => "only files of that folder can be named".to_owned(),
    };
    Error::new(ErrorKind::Invalid, format!("the image refers to '{reference}', which is outside its folder: {how}"))
}
