//! The files that a description names. A description is untrusted: it must not cause lamina to read a file of the host
//! that does not belong to the machine.
//!
//! A file is accepted if its real path, after following links, is in the real folder of the description or in a folder
//! that the user has permitted. The file is opened by this path without following links, because who can write the
//! folder can replace the file by a link meanwhile: a disk is opened after the disks before it were copied.

use error::{Error, ErrorKind, Result};
use std::io;
use std::path::{Path, PathBuf};

/// The folders in which files may be.
pub struct Permitted {
    /// The folder of the description, and the permitted folders; all absolute, without links.
    folders: Vec<PathBuf>,
}

impl Permitted {
    /// Permits the folder of the description `path`, and the folders `also`.
    pub fn beside(path: &Path, also: &[PathBuf]) -> Result<Self> {
        let beside = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let mut folders = Vec::with_capacity(also.len() + 1);
        for (folder, option) in std::iter::once((beside, "")).chain(also.iter().map(|it| (&**it, "--allow-folder: "))) {
            let real = folder.canonicalize();
            folders.push(real.map_err(|e| Error::io(format!("{option}looking for '{}'", folder.display()), e))?);
        }
        Ok(Self { folders })
    }

    /// Accepts every name without looking for the file, for tests that open none.
    pub fn unchecked() -> Self {
        Self { folders: Vec::new() }
    }

    /// The path of a file that a description names; an error if the file is in another folder or does not exist.
    pub fn find(&self, name: &str) -> Result<PathBuf> {
        let Some(beside) = self.folders.first() else { return Ok(name.into()) };
        // If the name is an absolute path, `join` ignores the folder.
        let path = beside.join(name);
        let real = path.canonicalize().map_err(|e| match e.kind() {
            io::ErrorKind::NotFound => {
                let remedy = match Path::new(name).is_absolute() {
                    // The path is that of another host, such as /vmfs/volumes of ESXi.
                    true => "change the path in the description to the place of the file on this host",
                    false => "copy it there, with all files of the machine",
                };
                let text = format!("there is no file '{}': {remedy}", path.display());
                Error::new(ErrorKind::NotFound, text)
            }
            _ => Error::io(format!("looking for '{}'", path.display()), e),
        })?;
        if self.folders.iter().any(|folder| real.starts_with(folder)) {
            return Ok(real);
        }
        let folder = real.parent().unwrap_or(&real);
        let text = format!(
            "file '{}' is not in the folder of the description: if it belongs to the machine, permit its folder with \
             --allow-folder '{}'",
            real.display(),
            folder.display()
        );
        Err(Error::new(ErrorKind::Invalid, text))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;

    #[test]
    fn a_name_does_not_lead_out_of_the_folders() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().canonicalize().unwrap();
        for name in ["vm", "other", "vm/inner"] {
            fs::create_dir(root.join(name)).unwrap();
            fs::write(root.join(name).join("disk"), name).unwrap();
        }
        symlink(root.join("other/disk"), root.join("vm/link")).unwrap();
        let own = Permitted::beside(&root.join("vm/x.vmx"), &[]).unwrap();
        assert_eq!(own.find("disk").unwrap(), root.join("vm/disk"));
        assert_eq!(own.find("inner/../disk").unwrap(), root.join("vm/disk"));
        assert_eq!(own.find(root.join("vm/inner/disk").to_str().unwrap()).unwrap(), root.join("vm/inner/disk"));
        for (name, remedy) in [("nothing", "copy it there"), ("/vmfs/volumes/ds/web.vmdk", "change the path")] {
            let error = own.find(name).unwrap_err();
            assert!(error.kind() == ErrorKind::NotFound && error.to_string().contains(remedy), "{error}");
        }
        for name in ["../other/disk", "link", "/etc/passwd", root.join("other/disk").to_str().unwrap()] {
            let error = own.find(name).unwrap_err();
            assert!(error.kind() == ErrorKind::Invalid && error.to_string().contains("--allow-folder"), "{error}");
        }
        let more = Permitted::beside(&root.join("vm/x.vmx"), &[root.join("other")]).unwrap();
        for name in ["../other/disk", "link"] {
            assert_eq!(more.find(name).unwrap(), root.join("other/disk"));
        }
    }
}
