//! Changing a machine: its name, processors, memory, clock, boot order, user and further arguments of QEMU, disks and
//! their controllers, images in CD-ROM drives, and network cards.
//!
//! 1. Disks and cards of a running machine are added and removed in its process too ([`crate::plug`]), and images are
//!    inserted and ejected ([`crate::media`]). All other properties take effect when a process starts, so they are
//!    changed only while the machine is off.
//! 2. The name of a machine is the name of its folder: a rename of the folder changes the name. The name in the
//!    definition follows.
//! 3. A frozen machine is not changed: its saved state requires the devices that it was saved with.

use crate::busy::{DISK_OF_CLIENTS, while_busy};
use crate::definition::{BootDevice, Bus, CPU_MODEL_USUAL, Card, Clock, Definition, Link, Vnc, VncTls, WriteErrors};
use crate::host::Host;
use crate::identity::Mac;
use crate::instant::freeze;
use crate::machine::{self, Change, MachineState};
use crate::qmp::Client;
use crate::{durable, media, plug};
use error::{Error, ErrorKind, IoContext, Result};
use serde::{Deserialize, Serialize};
use std::fs;
use std::path::{Path, PathBuf};

/// What to change; `None` and empty lists leave a property unchanged.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Edit {
    /// Virtual CPUs.
    pub cpus: Option<u32>,
    /// Model of the CPUs with its features; [`CPU_MODEL_USUAL`] for the usual one.
    pub cpu_model: Option<String>,
    /// CPUs in each socket; 0 to let QEMU choose.
    pub cores: Option<u32>,
    /// What the hardware clock shows.
    pub clock: Option<Clock>,
    /// Memory in bytes.
    pub memory: Option<u64>,
    /// Further arguments of QEMU, which replace the present ones.
    pub arguments: Option<Vec<String>>,
    /// Whether `start --autostart` starts the machine.
    pub autostart: Option<bool>,
    /// Most memory of QEMU besides the memory of the guest, in bytes; 0 for no limit.
    pub qemu_memory: Option<u64>,
    /// The user as which QEMU runs.
    pub run_as: Option<String>,
    /// Run QEMU as the default user of the datastore.
    pub no_run_as: bool,
    /// What QEMU does when a write of the guest fails.
    #[serde(default)]
    pub write_errors: Option<WriteErrors>,
    /// Ports for devices that are added while the machine runs.
    pub ports: Option<u8>,
    /// The kind of controller of all disks, except those in ports.
    pub bus: Option<Bus>,
    /// The model of all network cards.
    pub card: Option<Card>,
    /// The devices that the firmware tries, in this order; empty for the usual order.
    pub boot_order: Option<Vec<BootDevice>>,
    /// Where to serve the machine's screen by VNC.
    pub vnc: Option<Vnc>,
    /// Switch VNC off.
    pub no_vnc: bool,
    /// The certificates with which VNC is encrypted.
    pub vnc_tls: Option<VncTls>,
    /// Switch the encryption of VNC off.
    pub no_vnc_tls: bool,
    /// Remove all CD-ROM drives.
    pub no_cdroms: bool,
    /// Images to eject from CD-ROM drives, which stay: paths or file names.
    pub eject: Vec<PathBuf>,
    /// Eject also from a drive that the guest has locked.
    pub force_eject: bool,
    /// Images to insert: into an empty CD-ROM drive, or into a new one.
    pub insert: Vec<PathBuf>,
    /// Disks of the datastore to add.
    pub add_disks: Vec<String>,
    /// Disks to remove; they stay in the datastore.
    pub remove_disks: Vec<String>,
    /// Network cards to add.
    pub add_networks: Vec<Link>,
    /// Network cards to remove, by their addresses.
    pub remove_networks: Vec<Mac>,
}

impl Edit {
    /// Whether the edit changes a property that only a new process can have.
    fn needs_off(&self) -> bool {
        let sizes = self.cpus.is_some() || self.memory.is_some() || self.ports.is_some();
        let processors = self.cpu_model.is_some() || self.cores.is_some() || self.clock.is_some();
        sizes
            || processors
            || self.bus.is_some()
            || self.card.is_some()
            || self.arguments.is_some()
            || self.qemu_memory.is_some()
            || self.run_as.is_some()
            || self.no_run_as
            || self.write_errors.is_some()
            || self.boot_order.is_some()
            || self.vnc.is_some()
            || self.no_vnc
            || self.vnc_tls.is_some()
            || self.no_vnc_tls
            || self.no_cdroms
    }
}

/// Changes a machine; returns its new definition.
///
/// # Errors
/// `WrongState` if the machine must be off for the change; `Busy` if a disk is in use, or the guest does not release a
/// device. Changes made before the failed one are kept.
pub fn edit(change: &Change, host: &Host, edit: &Edit) -> Result<Definition> {
    let machine = change.machine();
    let name = machine.name();
    let wrong = |text: String| Err(Error::new(ErrorKind::WrongState, text));
    if freeze::frozen(machine)?.is_some() {
        return wrong(format!(
            "machine '{name}' is frozen, and its saved state requires its present devices; start it, or discard that \
             state with 'lamina vm stop --force {name}'"
        ));
    }
    let state = machine.state()?;
    let runs = state != MachineState::Stopped;
    if runs && edit.needs_off() {
        return wrong(format!(
            "machine '{name}' runs: CPUs, memory, clock, controllers, models of cards, ports, boot order, write errors, \
             VNC, CD-ROM drives, and user and arguments of QEMU change only while it is off; stop it first"
        ));
    }
    if runs && state != MachineState::Running && !(edit.remove_disks.is_empty() && edit.remove_networks.is_empty()) {
        return wrong(format!("the guest of machine '{name}' is paused and cannot release a device; resume it first"));
    }
    let mut definition = machine.definition()?;
    if let Some(cpus) = edit.cpus {
        definition.set_cpus(cpus);
    }
    if let Some(model) = &edit.cpu_model {
        definition.cpu_model = (model != CPU_MODEL_USUAL).then(|| model.clone());
    }
    if let Some(cores) = edit.cores {
        definition.platform.cores = (cores > 0).then_some(cores);
    }
    definition.platform.clock = edit.clock.unwrap_or(definition.platform.clock);
    definition.memory = edit.memory.unwrap_or(definition.memory);
    definition.qemu_memory = edit.qemu_memory.map_or(definition.qemu_memory, |limit| (limit > 0).then_some(limit));
    definition.write_errors = edit.write_errors.unwrap_or(definition.write_errors);
    definition.autostart = edit.autostart.unwrap_or(definition.autostart);
    if let Some(arguments) = &edit.arguments {
        definition.arguments.clone_from(arguments);
    }
    if edit.run_as.is_some() || edit.no_run_as {
        definition.run_as.clone_from(&edit.run_as);
    }
    if let Some(ports) = edit.ports {
        definition.set_ports(ports)?;
    }
    if let Some(bus) = edit.bus {
        definition.set_bus(bus)?;
    }
    if let Some(model) = edit.card {
        definition.set_card(model);
    }
    if let Some(order) = &edit.boot_order {
        definition.boot_order.clone_from(order);
    }
    if edit.vnc.is_some() || edit.no_vnc {
        definition.set_vnc(edit.vnc);
    }
    if edit.vnc_tls.is_some() || edit.no_vnc_tls {
        definition.vnc_tls.clone_from(&edit.vnc_tls);
    }
    if edit.no_cdroms {
        definition.cdroms.clear();
    }
    change.define(&definition)?;
    let mut task = Task { change, host, definition, runs };
    edit.remove_disks.iter().try_for_each(|disk| task.remove_disk(disk))?;
    edit.remove_networks.iter().try_for_each(|mac| task.remove_network(*mac))?;
    edit.eject.iter().try_for_each(|image| task.eject(image, edit.force_eject))?;
    edit.insert.iter().try_for_each(|image| task.insert(image))?;
    task.check_disks(&edit.add_disks)?;
    edit.add_disks.iter().try_for_each(|disk| task.add_disk(disk))?;
    edit.add_networks.iter().try_for_each(|link| task.add_network(link))?;
    Ok(task.definition)
}

/// The error for a disk that cannot be added, because it belongs to the machine `user`.
fn belongs_to(disk: &str, user: &str) -> Error {
    Error::new(ErrorKind::Busy, format!("disk '{disk}' belongs to machine '{user}'"))
}

/// Whether QEMU may still carry out a request whose answer did not come. Then the definition keeps the device: a later
/// device with its address would not be added, and the guest would use this one in its place. The same holds for a
/// device that an earlier command has added to the definition.
fn may_follow(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Io | ErrorKind::Busy)
}

struct Task<'a> {
    change: &'a Change,
    host: &'a Host,
    definition: Definition,
    runs: bool,
}

impl Task<'_> {
    fn name(&self) -> String {
        self.change.machine().name()
    }

    /// The monitor of a machine that runs, and what else a change of its process needs. Both are obtained before the
    /// definition changes, so that an error changes nothing.
    fn process<T>(&self, needs: impl FnOnce() -> Result<T>) -> Result<Option<(Client, T)>> {
        self.runs.then(|| Ok((self.change.machine().monitor()?, needs()?))).transpose()
    }

    fn at_root(&self, what: &str) -> Error {
        let name = self.name();
        let text = format!(
            "a running machine releases only devices that were added while it ran, and {what} of machine '{name}' is \
             not one of them: stop it first"
        );
        Error::new(ErrorKind::WrongState, text)
    }

    fn check_disks(&self, disks: &[String]) -> Result<()> {
        if disks.is_empty() {
            return Ok(());
        }
        let (there, users) = (self.host.disks().all()?, self.host.machines().users_of_disks()?);
        for disk in disks {
            match (there.get(disk), users.get(disk)) {
                (None, _) => return Err(Error::new(ErrorKind::NotFound, format!("there is no disk '{disk}'"))),
                // An earlier command was killed after it had added the disk to the definition but not yet to the
                // process.
                (_, Some(user)) if *user == self.name() => {}
                (_, Some(user)) => return Err(belongs_to(disk, user)),
                (Some(facts), None) if self.runs && facts.clients > 0 => self.wait_unused(disk)?,
                _ => {}
            }
        }
        Ok(())
    }

    /// Waits until no client uses a disk: the server may not have seen yet that a client has disconnected.
    fn wait_unused(&self, disk: &str) -> Result<()> {
        while_busy(DISK_OF_CLIENTS, || match self.host.disks().all()?.get(disk).map_or(0, |facts| facts.clients) {
            0 => Ok(()),
            clients => {
                let text =
                    format!("disk '{disk}' is in use by {clients} other client(s); two writers destroy its content");
                Err(Error::new(ErrorKind::Busy, text))
            }
        })
    }

    fn add_disk(&mut self, disk: &str) -> Result<()> {
        let process = self.process(|| self.host.disks().server())?;
        let repeated = self.definition.disks.iter().any(|one| one.name == disk);
        match self.definition.disks.iter().find(|one| one.name == disk) {
            None => {
                let _claim = self.host.machines().claim_disks()?;
                if let Some(user) = self.host.machines().users_of_disks()?.get(disk) {
                    return Err(belongs_to(disk, user));
                }
                match self.runs {
                    true => self.definition.plug_disk(disk)?,
                    false => self.definition.add_disk(disk)?,
                }
                self.change.define(&self.definition)?;
            }
            // An earlier command may have been killed before it added the disk to the process.
            Some(there) if self.runs && self.definition.can_unplug(there) => {}
            Some(_) => {
                let text = format!("disk '{disk}' is in machine '{}' already", self.name());
                return Err(Error::new(ErrorKind::Exists, text));
            }
        }
        let added = self.definition.disks.iter().find(|one| one.name == disk);
        let Some((added, (mut monitor, nbd))) = added.zip(process) else { return Ok(()) };
        plug::add_disk(&mut monitor, &nbd, &self.definition, added).or_else(|error| {
            let name = self.name();
            if repeated || may_follow(&error) {
                let text =
                    format!("it is not known whether machine '{name}' has disk '{disk}' now; repeat the command");
                return Err(error.context(text));
            }
            self.definition.disks.retain(|one| one.name != disk);
            self.change.define(&self.definition)?;
            Err(error.context(format_args!("disk '{disk}' was not added to machine '{name}'")))
        })
    }

    fn remove_disk(&mut self, disk: &str) -> Result<()> {
        let Some(at) = self.definition.disks.iter().position(|one| one.name == disk) else {
            let text = format!("machine '{}' has no disk '{disk}'; 'lamina vm show' lists its disks", self.name());
            return Err(Error::new(ErrorKind::NotFound, text));
        };
        if self.runs {
            let removed = &self.definition.disks[at];
            if !self.definition.can_unplug(removed) {
                return Err(self.at_root(&format!("disk '{disk}'")));
            }
            let mut monitor = self.change.machine().monitor()?;
            plug::remove_disk(&mut monitor, removed)
                .map_err(|error| error.context(format_args!("disk '{disk}' of machine '{}'", self.name())))?;
        }
        self.definition.disks.remove(at);
        self.change.define(&self.definition)
    }

    fn insert(&mut self, image: &Path) -> Result<()> {
        let image = media::readable(image)?;
        let process = self.process(|| Ok(()))?;
        let drives = &self.definition.cdroms;
        // An earlier command may have been killed after it had added the image to the definition, and before it
        // inserted the image in the process.
        let before = drives.iter().position(|drive| self.runs && drive.file.as_ref() == Some(&image));
        let at = match before.or_else(|| drives.iter().position(|drive| drive.file.is_none())) {
            Some(at) => at,
            None if self.runs => {
                let name = self.name();
                let text = format!(
                    "machine '{name}' has no empty CD-ROM drive: eject an image with 'lamina vm edit {name} --eject FILE', \
                     or stop it, which allows another drive"
                );
                return Err(Error::new(ErrorKind::WrongState, text));
            }
            None => {
                self.definition.add_cdrom(None)?;
                self.definition.cdroms.len() - 1
            }
        };
        self.definition.cdroms[at].file = Some(image.clone());
        self.change.define(&self.definition)?;
        let Some((mut monitor, ())) = process else { return Ok(()) };
        media::insert(&mut monitor, &self.definition.cdroms[at]).or_else(|error| {
            let name = self.name();
            if before.is_some() || may_follow(&error) {
                let image = image.display();
                let text = format!("it is not known whether '{image}' is in machine '{name}' now; repeat the command");
                return Err(error.context(text));
            }
            self.definition.cdroms[at].file = None;
            self.change.define(&self.definition)?;
            Err(error.context(format_args!("'{}' was not inserted into machine '{name}'", image.display())))
        })
    }

    fn eject(&mut self, image: &Path, force: bool) -> Result<()> {
        let Some(at) = self.definition.cdrom_with(image) else {
            let text = format!(
                "machine '{}' has no CD-ROM drive with '{}'; 'lamina vm show' lists its drives",
                self.name(),
                image.display()
            );
            return Err(Error::new(ErrorKind::NotFound, text));
        };
        if self.runs {
            let mut monitor = self.change.machine().monitor()?;
            media::eject(&mut monitor, &self.definition.cdroms[at], force)
                .map_err(|error| error.context(format_args!("'{}' in machine '{}'", image.display(), self.name())))?;
        }
        self.definition.cdroms[at].file = None;
        self.change.define(&self.definition)
    }

    fn add_network(&mut self, link: &Link) -> Result<()> {
        if self.runs && matches!(link, Link::Bridge(_)) && self.change.machine().running()?.is_sandboxed() {
            let text = format!(
                "QEMU's sandbox does not let the running machine '{}' start the helper program for a bridge: stop it \
                 first, or add a tap device",
                self.name()
            );
            return Err(Error::new(ErrorKind::WrongState, text));
        }
        let (machine, host) = (self.change.machine(), self.host);
        let process = self.process(|| host.features())?;
        let mac = Mac::new()?;
        match self.runs {
            true => self.definition.plug_network(mac, link.clone())?,
            false => self.definition.add_network(mac, link.clone())?,
        }
        self.change.define(&self.definition)?;
        let added = self.definition.networks.last();
        let Some((added, (mut monitor, features))) = added.zip(process) else { return Ok(()) };
        let chipset = self.definition.platform.chipset;
        plug::add_network(&mut monitor, machine, features, chipset, added).or_else(|error| {
            let name = self.name();
            if may_follow(&error) {
                let text = format!("it is not known whether machine '{name}' has network card {mac} now");
                return Err(error.context(text));
            }
            self.definition.networks.pop();
            self.change.define(&self.definition)?;
            Err(error.context(format_args!("no network card was added to machine '{name}'")))
        })
    }

    fn remove_network(&mut self, mac: Mac) -> Result<()> {
        let Some(at) = self.definition.networks.iter().position(|one| one.mac == mac) else {
            let text = format!("machine '{}' has no network card {mac}; 'lamina vm show' lists its cards", self.name());
            return Err(Error::new(ErrorKind::NotFound, text));
        };
        if self.runs {
            let removed = &self.definition.networks[at];
            if !removed.is_in_port() {
                return Err(self.at_root(&format!("network card {mac}")));
            }
            let mut monitor = self.change.machine().monitor()?;
            plug::remove_network(&mut monitor, removed)
                .map_err(|error| error.context(format_args!("network card {mac} of machine '{}'", self.name())))?;
        }
        self.definition.networks.remove(at);
        self.change.define(&self.definition)
    }
}

/// Renames a machine that is off. Its disks and its snapshots keep their names.
pub fn rename(change: &Change, host: &Host, to: &str) -> Result<Definition> {
    let machine = change.machine();
    let name = machine.name();
    crate::definition::check_name(to)?;
    if machine.process()?.is_some() {
        let text = format!("machine '{name}' runs, and its process uses the paths of its folder; stop it first");
        return Err(Error::new(ErrorKind::WrongState, text));
    }
    if host.machines().has(to) {
        return Err(Error::new(ErrorKind::Exists, format!("there is a machine '{to}' already")));
    }
    let definition = Definition { name: to.to_owned(), ..machine.definition()? };
    let folder = host.machines().folder();
    // The rename fails if another command has created a machine with this name meanwhile, because the folder of a
    // machine is not empty.
    fs::rename(machine.folder(), folder.join(to)).during(|| format!("renaming machine '{name}'"))?;
    durable::sync(folder)?;
    // The lock belongs to the folder, not to its name, and so is still held.
    machine::define(&folder.join(to), &definition)?;
    Ok(definition)
}

#[cfg(test)]
mod tests;
