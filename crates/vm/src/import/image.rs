//! Import of a disk image alone, without a description of a machine: the machine gets hardware for which most guests
//! have drivers.

use super::{Content, Foreign, ForeignCard, ForeignDisk, Format};
use crate::definition::{Bus, Card, Display};
use error::Result;
use std::path::Path;

/// Memory of the machine in bytes, unless the user chooses another size.
const MEMORY: u64 = 1 << 30;

/// A machine with default hardware and the image as its disk.
pub fn read(path: &Path) -> Result<Foreign> {
    let mut machine = Foreign::new(path, Format::Image);
    machine.name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    machine.memory = MEMORY;
    machine.platform.display = Display::Vga;
    let controller = machine.add_controller("sata".into(), Bus::Sata)?;
    // The user may name a link. A file that does not exist is reported when it is opened.
    let file = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let content = Content::Image { path: file, format: None };
    machine.add_disk(ForeignDisk { label: "disk".into(), controller, unit: 0, content, stated: None })?;
    machine.add_card(ForeignCard {
        label: "card".into(),
        model: Card::E1000e,
        mac: None,
        network: String::new(),
        connected: true,
    })?;
    Ok(machine)
}
