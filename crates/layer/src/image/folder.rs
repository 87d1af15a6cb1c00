//! The gate: every file that an image names, rather than the user, is opened through here.
//!
//! A descriptor is untrusted input that names files of this machine: extents, and a parent. What holds:
//!
//! 1. Without further permission, only files in the folder of the image that the user named are opened, and in folders
//!    below it. `..`, absolute paths and other folders need a root that the caller allowed, and the error says which.
//! 2. What counts is where a file really is: the name is resolved first, links and all, and the result compared with
//!    the roots. A link that leads out is refused as the path it leads to would be.
//! 3. What was resolved is what is opened: the folder is opened component by component and the file in it, neither
//!    through a link, so that no other process can exchange them in between.
//! 4. A name that is refused is not looked at: whether there is such a file is not told.
//! 5. Only regular files: no device, pipe or socket.
//!
//! The file that the user named needs no permission: its folder is the first root.

use crate::{Error, ErrorKind, IoContext, Result};
use backend::local::LocalDirectory;
use backend::{Access, Directory, File, IoMode};
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

/// Longest reference followed, in bytes.
const REFERENCE_MAX: usize = 4096;

/// A folder from which files are opened by the names that images give.
#[derive(Clone)]
pub struct Folder {
    directory: Arc<dyn Directory>,
    /// The canonical path; `None` for one that has none (a pool, a simulated disk): only plain names lead anywhere.
    path: Option<Arc<Path>>,
    /// Canonical paths of folders within which everything may be opened.
    roots: Arc<[PathBuf]>,
}

/// A file that may be opened.
#[derive(Clone)]
pub struct Place {
    /// Where it is.
    pub folder: Folder,
    /// Its name there.
    pub name: String,
}

impl Folder {
    /// A folder without a path. Files of it, and no others, can be named.
    pub fn plain(directory: Arc<dyn Directory>) -> Self {
        Self { directory, path: None, roots: Arc::from([]) }
    }

    /// A folder of the local file system, with the other folders that images in it may refer to.
    pub fn local(path: &Path, permitted: &[PathBuf]) -> Result<Self> {
        let resolve =
            |path: &Path| path.canonicalize().during(|| format!("looking for the folder '{}'", path.display()));
        let own = resolve(path)?;
        let mut roots = vec![own.clone()];
        for path in permitted {
            roots.push(resolve(path)?);
        }
        Self::at(own, roots.into())
    }

    fn at(path: PathBuf, roots: Arc<[PathBuf]>) -> Result<Self> {
        let directory =
            LocalDirectory::open_resolved(&path).during(|| format!("opening the folder '{}'", path.display()))?;
        Ok(Self { directory: Arc::new(directory), path: Some(path.into()), roots })
    }

    /// The backend's handle of the folder.
    pub fn directory(&self) -> &Arc<dyn Directory> {
        &self.directory
    }

    /// Its path, if it has one.
    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// The file that an image in this folder calls `reference`: a name, or a path relative to the folder or absolute,
    /// with `/` or `\`. The file need not exist if it could only be in this folder.
    ///
    /// # Errors
    /// `Invalid` when it must not be opened, and how to allow it; `NotFound` when there is none.
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
        // Nothing is asked of the file system about a path that is refused anyway.
        let literal = without_dots(&path).ok_or_else(|| not_permitted(reference, None))?;
        if !self.permits_file(&literal) {
            return Err(not_permitted(reference, literal.parent()));
        }
        let real = path.canonicalize().during(|| format!("looking for '{}'", path.display()))?;
        if !self.permits_file(&real) {
            return Err(not_permitted(reference, real.parent()));
        }
        self.place(&real)
    }

    /// A file by its canonical path.
    fn place(&self, real: &Path) -> Result<Place> {
        let (Some(folder), Some(name)) = (real.parent(), real.file_name().and_then(|name| name.to_str())) else {
            let text = format!("'{}' is no file, or its name is no text", real.display());
            return Err(Error::new(ErrorKind::Invalid, text));
        };
        let folder = match self.path() == Some(folder) {
            true => self.clone(),
            false => Self::at(folder.to_path_buf(), Arc::clone(&self.roots))?,
        };
        Ok(Place { folder, name: name.to_owned() })
    }

    /// Whether a path is below one of the roots: a root itself is no file, and its own folder is not permitted.
    fn permits_file(&self, path: &Path) -> bool {
        path.parent().is_some_and(|folder| self.roots.iter().any(|root| folder.starts_with(root)))
    }

    /// The folder beside this one that bears `name`, for parents that moved together with their children.
    pub(super) fn beside(&self, name: &str, file: &str) -> Result<Place> {
        self.resolve(&format!("../{name}/{file}"))
    }
}

impl Place {
    /// The file that the user named, links and all. Its folder, and those in `permitted`, are where the files it refers
    /// to may be.
    pub fn local(path: &Path, permitted: &[PathBuf]) -> Result<Self> {
        let real = path.canonicalize().during(|| format!("looking for '{}'", path.display()))?;
        let (Some(folder), Some(name)) = (real.parent(), real.file_name().and_then(|name| name.to_str())) else {
            let text = format!("'{}' is no file, or its name is no text", path.display());
            return Err(Error::new(ErrorKind::Invalid, text));
        };
        Ok(Self { folder: Folder::local(folder, permitted)?, name: name.to_owned() })
    }

    /// A file of a folder.
    pub fn plain(directory: Arc<dyn Directory>, name: &str) -> Self {
        Self { folder: Folder::plain(directory), name: name.to_owned() }
    }

    /// Opens it.
    pub fn open(&self, mode: IoMode, access: Access) -> Result<Arc<dyn File>> {
        self.folder.directory.open_foreign(&self.name, mode, access).during(|| format!("opening '{}'", self.label()))
    }

    /// How it is called in messages: with its path if it has one. Two places are the same file if they are called the
    /// same (but for hard links).
    pub fn label(&self) -> String {
        match &self.folder.path {
            Some(path) => path.join(&self.name).display().to_string(),
            None => self.name.clone(),
        }
    }
}

/// A path with `.` and `..` taken out by what is written, without asking the file system; `None` if it leads above the
/// root.
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
