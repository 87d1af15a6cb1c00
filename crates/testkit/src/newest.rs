//! The newest clients that Debian has, which `scripts/clients` unpacks beside the installed ones.

use crate::process::{self, tool};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// The folder of the newest clients, made at need.
pub fn newest() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap();
        // Beside what cargo builds, whichever folder that is.
        let folder = process::program().ancestors().nth(2).unwrap().join("clients");
        tool(root.join("scripts/clients").to_str().unwrap(), &[folder.to_str().unwrap()]);
        folder
    })
}
