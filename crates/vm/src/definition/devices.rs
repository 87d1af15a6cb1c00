//! Adding disks and network cards to a definition.
//!
//! 1. A disk that is added gets the kind of controller of the machine's first disk, and a card gets the model of the
//!    first card, because the guest has a driver for that kind or model.
//! 2. A device that is added while the machine runs is placed where the process accepts new devices: in a port, or on
//!    an existing controller that accepts disks at run time.
//! 3. A controller on the root bus cannot be removed from the process. The definition names a controller only by its
//!    disks, so the last disk of a controller is not removed while the machine runs.

use super::forward::FORWARDS_MAX;
use super::{
    Bus, Card, Chipset, DISK_SLOTS, Definition, Disk, FIRST_PORT, IDE_SLOT, Link, NETWORK_SLOTS, Network,
    PORTS_DEFAULT, PORTS_MAX,
};
use crate::identity::Mac;
use error::{Error, ErrorKind, Result};
use std::collections::BTreeSet;
use std::ops::Range;

/// Longest name of a network interface of Linux, in bytes.
const INTERFACE_MAX: usize = 15;

impl Disk {
    /// Whether the disk is in a port.
    pub fn is_in_port(&self) -> bool {
        self.slot >= FIRST_PORT
    }
}

impl Network {
    /// Whether the card is in a port, so that it can be removed while the machine runs.
    pub fn is_in_port(&self) -> bool {
        self.slot >= FIRST_PORT
    }
}

impl Link {
    /// The network of a clone. A tap device and a port of the host belong to one machine only.
    pub(super) fn for_clone(&self) -> Self {
        match self {
            Self::Tap(_) => Self::None,
            Self::Forward(_) => Self::User,
            other => other.clone(),
        }
    }

    /// Checks names of interfaces, and that no port is forwarded twice.
    pub(super) fn check(&self) -> Result<()> {
        let invalid = |text: String| Err(Error::new(ErrorKind::Invalid, text));
        match self {
            Self::Bridge(name) | Self::Tap(name)
                if name.is_empty() || name.len() > INTERFACE_MAX || name.contains(['/', ':', ' ', '\0']) =>
            {
                invalid(format!("'{}' is no name of an interface: 1 to {INTERFACE_MAX} bytes", name.escape_debug()))
            }
            Self::Forward(ports) => {
                let hosts: BTreeSet<_> = ports.iter().map(|it| (it.address, it.port, it.udp)).collect();
                match ports.len() {
                    0 => invalid("no port is forwarded: use \"user\"".into()),
                    count if count > FORWARDS_MAX => invalid(format!("at most {FORWARDS_MAX} ports are forwarded")),
                    count if hosts.len() < count => invalid("a port of the host is forwarded twice".into()),
                    _ => Ok(()),
                }
            }
            _ => Ok(()),
        }
    }
}

impl Definition {
    /// Adds a disk: at the lowest free address of the controllers that the machine has, or in the lowest free slot.
    pub fn add_disk(&mut self, name: &str) -> Result<()> {
        self.add_disk_on(name, self.usual_bus())
    }

    fn add_disk_on(&mut self, name: &str, mut bus: Bus) -> Result<()> {
        let mut place = None;
        if bus == Bus::Ide && self.platform.chipset == Chipset::I440fx {
            place =
                self.free_unit(bus).or_else(|| (!self.disks.iter().any(|it| it.bus == bus)).then_some((IDE_SLOT, 0)));
        }
        if bus == Bus::Ide && place.is_none() {
            // The IDE controller, of which the chipset has at most one, has no free address.
            bus = Bus::Sata;
        }
        let taken = |slot: u8| self.slots().any(|taken| taken == slot);
        let place = place.or_else(|| self.free_unit(bus)).or_else(|| Some((free_slot(DISK_SLOTS, &taken)?, 0)));
        let Some((slot, unit)) = place else {
            let text = format!(
                "machine '{}' has {} disks already: all {} PCI slots for disks and their controllers are in use",
                self.name,
                self.disks.len(),
                DISK_SLOTS.len()
            );
            return Err(Error::new(ErrorKind::Invalid, text));
        };
        self.disks.push(Disk { name: name.to_owned(), slot, bus, unit });
        Ok(())
    }

    /// Attaches all disks to controllers of another kind, in their order. Disks in ports stay there: they are virtio
    /// disks, for which the guest has a driver.
    pub fn set_bus(&mut self, bus: Bus) -> Result<()> {
        if bus == Bus::Ide && self.platform.chipset != Chipset::I440fx {
            let text = format!("machine '{}' has the chipset q35, which has no IDE controller: use sata", self.name);
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        let mut changed = Self { disks: Vec::with_capacity(self.disks.len()), ..self.clone() };
        for disk in &self.disks {
            match disk.is_in_port() {
                true => changed.disks.push(disk.clone()),
                false => changed.add_disk_on(&disk.name, bus)?,
            }
        }
        *self = changed;
        Ok(())
    }

    /// Replaces the model of all network cards.
    pub fn set_card(&mut self, model: Card) {
        self.networks.iter_mut().for_each(|card| card.model = model);
    }

    /// Adds a network card in the lowest free slot.
    pub fn add_network(&mut self, mac: Mac, link: Link) -> Result<()> {
        let taken = |slot: u8| self.slots().any(|taken| taken == slot);
        let slot = free_slot(NETWORK_SLOTS, &taken).ok_or_else(|| {
            let text = format!("machine '{}' has the maximum of network cards already", self.name);
            Error::new(ErrorKind::Invalid, text)
        })?;
        self.networks.push(Network { mac, link, slot, model: self.usual_card() });
        Ok(())
    }

    /// Adds a disk to a machine that runs: on a controller that accepts disks at run time, otherwise as a virtio disk
    /// in the lowest free port.
    pub fn plug_disk(&mut self, name: &str) -> Result<()> {
        let bus = self.usual_bus();
        let on_controller = bus.takes_disks().then(|| self.free_unit(bus)).flatten();
        let (bus, slot, unit) = match on_controller {
            Some((slot, unit)) => (bus, slot, unit),
            None => (Bus::Virtio, self.free_port()?, 0),
        };
        self.disks.push(Disk { name: name.to_owned(), slot, bus, unit });
        Ok(())
    }

    /// Adds a network card to a machine that runs, in the lowest free port.
    pub fn plug_network(&mut self, mac: Mac, link: Link) -> Result<()> {
        let slot = self.free_port()?;
        self.networks.push(Network { mac, link, slot, model: self.usual_card() });
        Ok(())
    }

    /// Whether a disk can be removed while the machine runs.
    pub fn can_unplug(&self, disk: &Disk) -> bool {
        let others = || self.disks.iter().any(|it| it.slot == disk.slot && it.unit != disk.unit);
        let first = self.disks.first().is_some_and(|first| first.name == disk.name);
        disk.is_in_port() || disk.bus.takes_disks() && others() && !first
    }

    /// Changes the number of processors. If the new number cannot be divided by the processors of a socket, all are put
    /// in one socket.
    pub fn set_cpus(&mut self, cpus: u32) {
        self.cpus = cpus;
        if let Some(cores) = &mut self.platform.cores
            && !cpus.is_multiple_of(*cores)
        {
            *cores = cpus;
        }
    }

    /// Changes the number of ports.
    pub fn set_ports(&mut self, ports: u8) -> Result<()> {
        if self.slots().any(|slot| slot >= FIRST_PORT.saturating_add(ports)) {
            let text = format!("machine '{}' has a device in port {ports} or above: remove it first", self.name);
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        self.ports = ports;
        self.check()
    }

    fn usual_bus(&self) -> Bus {
        self.disks.first().map_or(Bus::Virtio, |disk| disk.bus)
    }

    fn usual_card(&self) -> Card {
        self.networks.first().map_or(Card::Virtio, |network| network.model)
    }

    /// The lowest free address on the controllers of this kind: slot and unit.
    fn free_unit(&self, bus: Bus) -> Option<(u8, u8)> {
        let mut slots: Vec<u8> = self.disks.iter().filter(|disk| disk.bus == bus).map(|disk| disk.slot).collect();
        slots.sort_unstable();
        slots.dedup();
        let taken = |slot: u8, unit: u8| self.disks.iter().any(|disk| (disk.slot, disk.unit) == (slot, unit));
        slots.into_iter().find_map(|slot| Some((slot, (0..bus.units()).find(|unit| !taken(slot, *unit))?)))
    }

    fn free_port(&self) -> Result<u8> {
        let ports = FIRST_PORT..FIRST_PORT + self.ports;
        free_slot(ports, &|slot| self.slots().any(|taken| taken == slot)).ok_or_else(|| {
            let name = &self.name;
            let text = match self.ports {
                0 => format!(
                    "machine '{name}' has no ports for devices that are added while it runs: stop the machine, and \
                     then add the device, or add ports with 'lamina vm edit {name} --ports {PORTS_DEFAULT}'"
                ),
                ports => format!(
                    "all {ports} ports of machine '{name}' are in use: stop the machine, and then add the device, or \
                     add more ports (up to {PORTS_MAX}) with 'lamina vm edit {name} --ports N'"
                ),
            };
            Error::new(ErrorKind::Invalid, text)
        })
    }

    fn slots(&self) -> impl Iterator<Item = u8> {
        self.disks.iter().map(|disk| disk.slot).chain(self.networks.iter().map(|network| network.slot))
    }
}

fn free_slot(mut slots: Range<u8>, taken: &dyn Fn(u8) -> bool) -> Option<u8> {
    slots.find(|slot| !taken(*slot))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn machine(chipset: Chipset, disks: &[(Bus, u8, u8)]) -> Definition {
        let mut machine = Definition::new("web", 4, 64 << 20).unwrap();
        machine.platform.chipset = chipset;
        for (index, (bus, slot, unit)) in disks.iter().enumerate() {
            machine.disks.push(Disk { name: format!("d{index}"), slot: *slot, bus: *bus, unit: *unit });
        }
        machine.check().unwrap();
        machine
    }

    fn last(machine: &Definition) -> (Bus, u8, u8) {
        let disk = machine.disks.last().unwrap();
        machine.check().unwrap();
        (disk.bus, disk.slot, disk.unit)
    }

    #[test]
    fn an_added_disk_is_on_a_controller_for_which_the_guest_has_a_driver() {
        let ide: Vec<(Bus, u8, u8)> = (0..4).map(|unit| (Bus::Ide, IDE_SLOT, unit)).collect();
        let sata: Vec<(Bus, u8, u8)> = (0..6).map(|unit| (Bus::Sata, 9, unit)).collect();
        for (chipset, disks, off, running) in [
            (Chipset::Q35, &[][..], (Bus::Virtio, 8, 0), (Bus::Virtio, 32, 0)),
            (Chipset::Q35, &[(Bus::Virtio, 8, 0)], (Bus::Virtio, 9, 0), (Bus::Virtio, 32, 0)),
            (Chipset::Q35, &[(Bus::Pvscsi, 8, 0), (Bus::Sata, 9, 0)], (Bus::Pvscsi, 8, 1), (Bus::Pvscsi, 8, 1)),
            (Chipset::Q35, &[(Bus::VirtioScsi, 8, 3)], (Bus::VirtioScsi, 8, 0), (Bus::VirtioScsi, 8, 0)),
            (Chipset::Q35, &[(Bus::Lsisas, 8, 0)], (Bus::Lsisas, 8, 1), (Bus::Virtio, 32, 0)),
            (Chipset::Q35, &[(Bus::Nvme, 8, 0)], (Bus::Nvme, 8, 1), (Bus::Virtio, 32, 0)),
            (Chipset::Q35, &sata, (Bus::Sata, 8, 0), (Bus::Virtio, 32, 0)),
            (Chipset::I440fx, &ide[..3], (Bus::Ide, IDE_SLOT, 3), (Bus::Virtio, 32, 0)),
            (Chipset::I440fx, &ide, (Bus::Sata, 8, 0), (Bus::Virtio, 32, 0)),
        ] {
            let mut machine = machine(chipset, disks);
            machine.add_disk("new").unwrap();
            assert_eq!(last(&machine), off, "{disks:?}");
            machine.disks.pop();
            machine.plug_disk("new").unwrap();
            assert_eq!(last(&machine), running, "{disks:?}");
        }
    }

    #[test]
    fn all_disks_are_attached_to_controllers_of_another_kind_in_their_order() {
        let from = [(Bus::Sata, 8, 0), (Bus::Sata, 8, 3), (Bus::Lsi, 9, 1)];
        let mut machine = machine(Chipset::Q35, &from);
        machine.add_network(Mac::new().unwrap(), Link::User).unwrap();
        machine.disks.push(Disk { name: "plugged".into(), slot: FIRST_PORT, bus: Bus::Virtio, unit: 0 });
        let places = |machine: &Definition| -> Vec<(Bus, u8, u8)> {
            machine.check().unwrap();
            machine.disks.iter().map(|disk| (disk.bus, disk.slot, disk.unit)).collect()
        };
        let port = (Bus::Virtio, FIRST_PORT, 0);
        machine.set_bus(Bus::Virtio).unwrap();
        machine.set_card(Card::E1000);
        assert_eq!(places(&machine), [(Bus::Virtio, 8, 0), (Bus::Virtio, 9, 0), (Bus::Virtio, 10, 0), port]);
        assert_eq!((machine.networks[0].model, machine.disks[1].name.as_str()), (Card::E1000, "d1"));
        machine.set_bus(Bus::Pvscsi).unwrap();
        assert_eq!(places(&machine), [(Bus::Pvscsi, 8, 0), (Bus::Pvscsi, 8, 1), (Bus::Pvscsi, 8, 2), port]);
        assert!(machine.set_bus(Bus::Ide).unwrap_err().to_string().contains("use sata"));
        for number in 0..6 {
            machine.add_disk(&format!("more{number}")).unwrap();
        }
        // Nine virtio disks need nine slots, and there are eight.
        let full = machine.clone();
        assert_eq!(machine.set_bus(Bus::Virtio).unwrap_err().kind(), ErrorKind::Invalid);
        assert_eq!(machine, full);
    }

    #[test]
    fn the_first_and_the_last_disk_of_a_controller_stay_while_the_machine_runs() {
        let pair =
            [(Bus::Pvscsi, 8, 0), (Bus::Pvscsi, 8, 1), (Bus::Pvscsi, 9, 0), (Bus::Lsi, 10, 0), (Bus::Lsi, 10, 1)];
        let mut machine = machine(Chipset::Q35, &pair);
        machine.disks.push(Disk { name: "plugged".into(), slot: FIRST_PORT, bus: Bus::Virtio, unit: 0 });
        let can: Vec<bool> = machine.disks.iter().map(|disk| machine.can_unplug(disk)).collect();
        assert_eq!(can, [false, true, false, false, false, true]);
    }

    #[test]
    fn an_added_card_has_the_model_of_the_first_one() {
        let mut machine = machine(Chipset::Q35, &[]);
        machine.add_network(Mac::new().unwrap(), Link::User).unwrap();
        machine.networks[0].model = Card::E1000e;
        machine.add_network(Mac::new().unwrap(), Link::User).unwrap();
        machine.plug_network(Mac::new().unwrap(), Link::User).unwrap();
        machine.check().unwrap();
        let models: Vec<(u8, Card)> = machine.networks.iter().map(|it| (it.slot, it.model)).collect();
        assert_eq!(models, [(16, Card::E1000e), (17, Card::E1000e), (32, Card::E1000e)]);
    }

    #[test]
    fn tap_devices_and_forwarded_ports_belong_to_one_machine() {
        let mut machine = machine(Chipset::Q35, &[]);
        let forward = Link::Forward(vec!["2222:22".parse().unwrap(), "8080:80".parse().unwrap()]);
        for link in [forward, Link::Tap("tap0".into()), Link::Bridge("br0".into())] {
            machine.add_network(Mac::new().unwrap(), link).unwrap();
        }
        machine.check().unwrap();
        assert_eq!(machine.needed_version(), 2);
        assert!(machine.unsavable().is_some());
        let text = machine.to_text().unwrap();
        assert!(text.contains("forward = [\"2222:22\", \"8080:80\"]") && text.contains("tap = \"tap0\""), "{text}");
        assert_eq!(Definition::parse(&text, "web").unwrap(), machine);
        let origin = crate::definition::Origin {
            machine: "web".into(),
            snapshot: None,
            way: crate::definition::CloneKind::Full,
        };
        let clone = machine.for_clone("copy", origin).unwrap();
        let links: Vec<&Link> = clone.networks.iter().map(|card| &card.link).collect();
        assert_eq!(links, [&Link::User, &Link::None, &Link::Bridge("br0".into())]);
        for wrong in [
            Link::Tap(String::new()),
            Link::Tap("a/b".into()),
            Link::Tap("longer-than-allowed".into()),
            Link::Forward(Vec::new()),
            Link::Forward(vec!["1:22".parse().unwrap(), "1:23".parse().unwrap()]),
        ] {
            machine.networks[0].link = wrong;
            assert!(machine.check().is_err(), "{:?}", machine.networks[0].link);
        }
    }

    #[test]
    fn processors_that_cannot_be_divided_into_the_sockets_are_in_one() {
        let mut machine = machine(Chipset::Q35, &[]);
        machine.platform.cores = Some(2);
        for (cpus, cores) in [(8, 2), (3, 3), (4, 4)] {
            machine.set_cpus(cpus);
            machine.check().unwrap();
            assert_eq!(machine.platform.cores, Some(cores));
        }
    }
}
