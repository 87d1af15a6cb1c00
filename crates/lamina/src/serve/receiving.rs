//! Receiving disks and machines from other servers.

use crate::cli::ServeArguments;
use connections::TlsConfig;
use control::jobs::Jobs;
use control::{Change, Target};
use disk::{Datastore, Location};
use error::{Error, ErrorKind, Result};
use replication::{Attachments, Making, Receiver, ReceiverConfig};
use std::sync::Arc;
use vm::definition::Definition;
use vm::machines::{Machines, OwnDisk};

/// Handles definitions of machines that are received with their disks. Each becomes a machine when its disks are
/// complete.
struct Arriving {
    location: Location,
    machines: Machines,
    jobs: Arc<Jobs>,
}

/// A machine whose disks are not complete yet.
struct Prepared {
    making: vm::machines::Making,
    definition: Definition,
}

/// The definition of a machine that is sent. It must not decide what runs on this host: further arguments make QEMU
/// open any file, or start any program. A sender of this program sends no images, and no machine that starts with the
/// host.
fn parse(text: &str) -> Result<Definition> {
    let mut definition = Definition::parse(text, "the machine that is sent")?;
    if !definition.arguments.is_empty() {
        let text = format!(
            "machine '{}' has further arguments of QEMU, which are not taken from another server: remove them with 'lamina \
             vm edit --no-qemu-args' there, and add them here when it is received",
            definition.name
        );
        return Err(Error::new(ErrorKind::Invalid, text));
    }
    definition.autostart = false;
    definition.eject_all();
    Ok(definition)
}

impl Arriving {
    fn read(&self, text: &str, disks: &[String]) -> Result<Definition> {
        let definition = parse(text)?;
        let name = &definition.name;
        if definition.disk_names() != disks {
            let text = format!("machine '{name}' has the disks {:?}, and {disks:?} are sent", definition.disk_names());
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        if self.machines.has(name) {
            return Err(Error::new(ErrorKind::Exists, format!("there is a machine '{name}' already")));
        }
        Ok(definition)
    }
}

impl Attachments for Arriving {
    fn check_names(&self, disks: &[String]) -> Result<()> {
        let names: Vec<&str> = disks.iter().map(String::as_str).collect();
        match control::refuse_left(&self.location, &names) {
            // An interrupted command has left a disk with one of these names. It is deleted now, so that the sender
            // need not wait for the next command.
            Err(error) if error.kind() == ErrorKind::Busy => {
                self.machines.recover()?;
                control::refuse_left(&self.location, &names)
            }
            outcome => outcome,
        }
    }

    fn check(&self, text: &str, disks: &[String]) -> Result<()> {
        self.read(text, disks).map(drop)
    }

    fn begin(&self, text: &str, disks: &[String]) -> Result<Box<dyn Making>> {
        let definition = self.read(text, disks)?;
        let own = |one: &Definition| {
            let own = one.disk_names().into_iter().map(|name| OwnDisk { name, origin: None });
            own.collect()
        };
        let making = self.machines.make(std::slice::from_ref(&definition), own, Vec::new())?;
        Ok(Box::new(Prepared { making, definition }))
    }

    fn arrived(&self, disks: &[String]) {
        let received = |disk: &String| Change::DiskReceived { disk: disk.clone() };
        self.jobs.events().publish(disks.iter().map(received).collect());
    }
}

impl Making for Prepared {
    fn finish(self: Box<Self>) -> Result<()> {
        let Self { making, definition } = *self;
        making.made(definition.disk_names());
        making.finish(&definition.name)?;
        making.settle()
    }
}

/// Starts the receiver, if the arguments request one.
pub fn start(
    location: &Location,
    datastore: &Arc<Datastore>,
    jobs: &Arc<Jobs>,
    arguments: &ServeArguments,
) -> Result<Option<Receiver>> {
    let Some(listen) = arguments.receive else { return Ok(None) };
    let (Some(certificate), Some(key)) = (&arguments.tls_cert, &arguments.tls_key) else {
        return Err(Error::new(ErrorKind::Invalid, "receiving needs a certificate: give --tls-cert and --tls-key"));
    };
    let config = ReceiverConfig {
        listen,
        tls: TlsConfig {
            certificate: certificate.clone(),
            key: key.clone(),
            client_authorities: arguments.tls_client_ca.clone(),
            required: true,
        },
        clients: arguments.receive_from.clone(),
    };
    let folder = location.need_folder("virtual machines")?.join(vm::machines::FOLDER);
    let machines = Machines::open(folder, control::disks(Target::At(location.clone())))?;
    let arriving = Arriving { location: location.clone(), machines, jobs: Arc::clone(jobs) };
    Receiver::start(&config, Arc::clone(datastore), Arc::new(arriving)).map(Some)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_sender_does_not_decide_what_runs_on_the_receiver() {
        let mut sent = Definition::new("web", 1, 64 << 20).unwrap();
        sent.add_cdrom(Some("/etc/shadow".into())).unwrap();
        sent.autostart = true;
        sent.version = sent.needed_version();
        let received = parse(&sent.to_text().unwrap()).unwrap();
        assert!(!received.autostart && received.cdroms.iter().all(|drive| drive.file.is_none()));
        sent.arguments = vec!["-drive".to_owned(), "file=/dev/sda".to_owned()];
        sent.version = sent.needed_version();
        assert_eq!(parse(&sent.to_text().unwrap()).unwrap_err().kind(), ErrorKind::Invalid);
    }
}
