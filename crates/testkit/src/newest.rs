//! The newest client versions in Debian, which `scripts/clients` unpacks in addition to the installed ones.

use crate::process::{self, tool};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// The folder of the newest clients, which are unpacked if necessary.
pub fn newest() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap();
        // The folder is next to the output of cargo, which the user may have configured.
        let folder = process::program().ancestors().nth(2).unwrap().join("clients");
        tool(root.join("scripts/clients").to_str().unwrap(), &[folder.to_str().unwrap()]);
        folder
    })
}
