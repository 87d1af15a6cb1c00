//! CD-ROM drives of a machine, and the order in which its firmware tries the devices.
//!
//! 1. The drives are on the controller that is part of the chipset: six units of SATA on q35, four of IDE on i440fx. So
//!    they need no PCI slots, and BIOS and UEFI have a driver for them.
//! 2. A drive without a file is empty. Drives are added and removed while the machine is off; files are inserted and
//!    ejected at any time.

use super::{Bus, Chipset, Definition};
use error::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// Units of the chipset's controller: SATA of q35, and IDE of i440fx.
const UNITS: [u8; 2] = [6, 4];

/// A CD-ROM drive.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cdrom {
    /// The drive's address on the controller of the chipset.
    pub unit: u8,
    /// The absolute path of the image in the drive; `None` if the drive is empty.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<PathBuf>,
}

/// A kind of device that the firmware boots.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BootDevice {
    /// The first disk.
    Disk,
    /// The CD-ROM drives, in their order.
    Cdrom,
    /// The network cards, in their order.
    Network,
}

impl BootDevice {
    /// The order if the definition has none.
    pub const USUAL: [Self; 2] = [Self::Disk, Self::Cdrom];

    /// The name of the device in definitions.
    pub fn name(self) -> &'static str {
        match self {
            Self::Disk => "disk",
            Self::Cdrom => "cdrom",
            Self::Network => "network",
        }
    }
}

impl Definition {
    /// Adds a drive with this image, or an empty one.
    pub fn add_cdrom(&mut self, file: Option<PathBuf>) -> Result<()> {
        let units = self.cdrom_units();
        let taken = |unit: u8| {
            let ide = self.disks.iter().any(|disk| disk.bus == Bus::Ide && disk.unit == unit);
            ide || self.cdroms.iter().any(|cdrom| cdrom.unit == unit)
        };
        let Some(unit) = (0..units).find(|unit| !taken(*unit)) else {
            let text = format!(
                "machine '{}' has no place for another CD-ROM drive: the controller of its chipset takes {units}",
                self.name
            );
            return Err(Error::new(ErrorKind::Invalid, text));
        };
        self.cdroms.push(Cdrom { unit, file });
        Ok(())
    }

    /// The drive that has an image, which is given by its path or by its file name.
    pub fn cdrom_with(&self, image: &Path) -> Option<usize> {
        let whole = image.canonicalize().ok();
        let is = |file: &PathBuf| *file == image || whole.as_ref() == Some(file);
        let named = |file: &PathBuf| file.file_name() == image.file_name();
        let find = |test: &dyn Fn(&PathBuf) -> bool| {
            self.cdroms.iter().position(|cdrom| cdrom.file.as_ref().is_some_and(test))
        };
        find(&is).or_else(|| find(&named))
    }

    /// Empties all drives, for a machine on another host.
    pub fn eject_all(&mut self) {
        self.cdroms.iter_mut().for_each(|cdrom| cdrom.file = None);
    }

    /// The devices that the firmware tries, in their order; none if QEMU starts a kernel itself.
    pub fn boot_devices(&self) -> &[BootDevice] {
        match (&self.boot, self.boot_order.as_slice()) {
            (Some(_), _) => &[],
            (None, []) => &BootDevice::USUAL,
            (None, order) => order,
        }
    }

    fn cdrom_units(&self) -> u8 {
        match self.platform.chipset {
            Chipset::Q35 => UNITS[0],
            Chipset::I440fx => UNITS[1],
        }
    }

    pub(super) fn check_cdroms(&self) -> Result<()> {
        let invalid = |what: String| Err(Error::new(ErrorKind::Invalid, what));
        let mut taken: Vec<u8> = self.disks.iter().filter(|disk| disk.bus == Bus::Ide).map(|disk| disk.unit).collect();
        for Cdrom { unit, file } in &self.cdroms {
            if *unit >= self.cdrom_units() || taken.contains(unit) {
                return invalid(format!("unit {unit} of a CD-ROM drive is in use, or does not exist in the chipset"));
            }
            taken.push(*unit);
            if let Some(file) = file.as_ref().filter(|file| !file.is_absolute()) {
                return invalid(format!("'{}' of a CD-ROM drive is no absolute path", file.display()));
            }
        }
        let mut order = self.boot_order.clone();
        order.sort_unstable();
        order.dedup();
        if order.len() < self.boot_order.len() {
            return invalid("the boot order names a kind of device twice".into());
        }
        if self.boot.is_some() && !order.is_empty() {
            return invalid("a machine that boots a kernel without a boot loader has no boot order".into());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::definition::{Disk, IDE_SLOT};

    #[test]
    fn drives_share_the_ide_controller_of_i440fx_with_disks() {
        let mut machine = Definition::new("web", 1, 64 << 20).unwrap();
        machine.platform.chipset = Chipset::I440fx;
        machine.disks.push(Disk { name: "old".into(), slot: IDE_SLOT, bus: Bus::Ide, unit: 1 });
        for _ in 0..3 {
            machine.add_cdrom(None).unwrap();
        }
        machine.check().unwrap();
        let units: Vec<u8> = machine.cdroms.iter().map(|cdrom| cdrom.unit).collect();
        assert_eq!(units, [0, 2, 3]);
        assert!(machine.add_cdrom(None).unwrap_err().to_string().contains("takes 4"));
        machine.cdroms[0].unit = 1;
        assert!(machine.check().is_err());
        machine.platform.chipset = Chipset::Q35;
        machine.disks.clear();
        machine.add_cdrom(Some("relative.iso".into())).unwrap();
        assert!(machine.check().unwrap_err().to_string().contains("absolute"));
    }

    #[test]
    fn an_image_is_found_by_its_path_and_by_its_name() {
        let mut machine = Definition::new("web", 1, 64 << 20).unwrap();
        for file in ["/srv/a/x.iso", "/srv/b/x.iso", "/srv/b/y.iso"] {
            machine.add_cdrom(Some(file.into())).unwrap();
        }
        for (image, drive) in [("/srv/b/x.iso", Some(1)), ("/tmp/y.iso", Some(2)), ("/tmp/z.iso", None)] {
            assert_eq!(machine.cdrom_with(Path::new(image)), drive, "{image}");
        }
    }
}
