//! The builds of UEFI on this host. Their names and folders differ between distributions, so they are found by the
//! description files that distributions install (QEMU's interface `firmware.json`).
//!
//! The files are read in the order of their names, and the first build that fits is used, as `firmware.json` requires.

use crate::definition::{Chipset, Platform};
use error::{Error, ErrorKind, Result};
use serde::Deserialize;
use std::fs;
use std::path::{Path, PathBuf};

/// Folders with descriptions of firmware; a file hides files of the same name in later folders.
const FOLDERS: [&str; 3] = ["/etc/qemu/firmware", "/usr/local/share/qemu/firmware", "/usr/share/qemu/firmware"];
/// Longest description that is read, in bytes.
const TEXT_MAX: u64 = 1 << 20;

/// The files of a build of UEFI.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Build {
    /// The file with the firmware's code, which is the same for all machines.
    pub code: PathBuf,
    /// The template for the variables of a new machine.
    pub variables: PathBuf,
}

/// UEFI for one machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Uefi {
    /// The file with the firmware's code.
    pub code: PathBuf,
    /// The file with the machine's variables.
    pub variables: PathBuf,
}

#[derive(Deserialize)]
struct Description {
    #[serde(rename = "interface-types")]
    interfaces: Vec<String>,
    mapping: Mapping,
    targets: Vec<Target>,
    features: Vec<String>,
}

#[derive(Deserialize)]
struct Mapping {
    device: String,
    executable: Option<Image>,
    #[serde(rename = "nvram-template")]
    template: Option<Image>,
}

#[derive(Deserialize)]
struct Image {
    filename: PathBuf,
    format: String,
}

#[derive(Deserialize)]
struct Target {
    architecture: String,
    machines: Vec<String>,
}

/// The build for a platform. `length` is the length of the machine's variables in bytes, if it has any: a build whose
/// variables have another length cannot use them.
pub fn find(platform: &Platform, length: Option<u64>) -> Result<Build> {
    find_in(&FOLDERS.map(Path::new), platform, length)
}

fn find_in(folders: &[&Path], platform: &Platform, length: Option<u64>) -> Result<Build> {
    let mut files: Vec<(String, PathBuf)> = Vec::new();
    for folder in folders {
        // A folder that does not exist has no descriptions.
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            if name.ends_with(".json") && files.iter().all(|(known, _)| *known != name) {
                files.push((name, entry.path()));
            }
        }
    }
    files.sort();
    let found = files.iter().find_map(|(_, path)| fitting(path, platform, length));
    found.ok_or_else(|| {
        let secure = if platform.secure_boot { " with Secure Boot" } else { "" };
        let length = length.map(|length| format!(" and variables of {length} bytes")).unwrap_or_default();
        let text = format!(
            "no UEFI firmware{secure} for the chipset {}{length} is described in {}; Debian's package is ovmf",
            platform.chipset.name(),
            folders.iter().map(|folder| folder.display().to_string()).collect::<Vec<_>>().join(" or ")
        );
        Error::new(ErrorKind::NotFound, text)
    })
}

/// The build that a file describes, if it fits.
fn fitting(path: &Path, platform: &Platform, length: Option<u64>) -> Option<Build> {
    if fs::metadata(path).ok()?.len() > TEXT_MAX {
        return None;
    }
    let Description { interfaces, mapping, targets, features } = serde_json::from_slice(&fs::read(path).ok()?).ok()?;
    let has = |feature: &str| features.iter().any(|one| one == feature);
    let machine = match platform.chipset {
        Chipset::Q35 => "pc-q35-",
        Chipset::I440fx => "pc-i440fx-",
    };
    let mut machines = targets.iter().filter(|target| target.architecture == "x86_64").flat_map(|it| &it.machines);
    let fits = interfaces.iter().any(|one| one == "uefi")
        && mapping.device == "flash"
        && machines.any(|one| one.starts_with(machine))
        && has("secure-boot") == platform.secure_boot
        && has("enrolled-keys") == platform.secure_boot
        && ["amd-sev-es", "amd-sev-snp", "intel-tdx"].iter().all(|confidential| !has(confidential));
    let (code, template) = (mapping.executable?, mapping.template?);
    if !fits || code.format != "raw" || template.format != "raw" {
        return None;
    }
    let there = fs::metadata(&template.filename).ok()?.len();
    (code.filename.exists() && length.is_none_or(|length| length == there))
        .then_some(Build { code: code.filename, variables: template.filename })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::definition::Firmware;

    fn describe(folder: &Path, name: &str, machines: &str, features: &str, variables: usize) {
        let [code, template] = ["code", "vars"].map(|kind| folder.join(format!("{name}.{kind}")));
        fs::write(&code, "code").unwrap();
        fs::write(&template, vec![0; variables]).unwrap();
        let text = format!(
            r#"{{"interface-types":["uefi"],"mapping":{{"device":"flash",
            "executable":{{"filename":{code:?},"format":"raw"}},"nvram-template":{{"filename":{template:?},"format":"raw"}}}},
            "targets":[{{"architecture":"x86_64","machines":[{machines}]}}],"features":[{features}],"tags":[]}}"#
        );
        fs::write(folder.join(format!("{name}.json")), text).unwrap();
    }

    #[test]
    fn the_first_description_that_fits_is_used() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        describe(path, "40-enrolled", r#""pc-q35-*""#, r#""secure-boot","enrolled-keys","requires-smm""#, 64);
        describe(path, "50-empty", r#""pc-q35-*""#, r#""secure-boot","requires-smm""#, 64);
        describe(path, "60-plain", r#""pc-i440fx-*","pc-q35-*""#, "", 64);
        describe(path, "70-large", r#""pc-q35-*""#, "", 128);
        fs::write(path.join("10-broken.json"), "{").unwrap();
        let platform =
            |chipset, secure_boot| Platform { chipset, secure_boot, firmware: Firmware::Uefi, ..Platform::default() };
        let name = |chipset, secure, length| {
            let found = find_in(&[path, Path::new("/nowhere")], &platform(chipset, secure), length);
            found.map(|build| build.code.file_stem().unwrap().to_str().unwrap().to_owned())
        };
        assert_eq!(name(Chipset::Q35, true, None).unwrap(), "40-enrolled");
        assert_eq!(name(Chipset::Q35, false, None).unwrap(), "60-plain");
        assert_eq!(name(Chipset::I440fx, false, None).unwrap(), "60-plain");
        assert_eq!(name(Chipset::Q35, false, Some(128)).unwrap(), "70-large");
        for wrong in [name(Chipset::I440fx, true, None), name(Chipset::Q35, false, Some(1))] {
            let error = wrong.unwrap_err();
            assert!(error.kind() == ErrorKind::NotFound && error.to_string().contains("ovmf"), "{error}");
        }
    }
}
