//! Requests on a datastore without a local folder: the process that makes a request carries it out.

#![allow(clippy::unwrap_used)]

use backend::simulated::{SimulatedDisk, SimulatedOptions};
use control::{
    DiskRequest, JobRequest, MachineRequest, MachineVerb, Part, Reconnect, Reply, Request, Target, Watch, dispatch,
    socket,
};
use disk::location::{Scheme, register};
use disk::{Datastore, InitOptions, Location, NewDisk, Progress, Provisioning, SettingsChange};
use error::{ErrorKind, Result};

/// A watch for requests that report no parts.
struct Nothing;

impl Progress for Nothing {}

impl Watch for Nothing {
    fn part(&self, part: Part) -> Result<()> {
        panic!("{part:?} was not asked for")
    }
}

#[test]
fn verbs_need_no_local_folder_except_for_machines_and_servers() {
    let medium = SimulatedDisk::new(1, SimulatedOptions::default());
    register(Scheme {
        name: "simulated",
        form: "simulated:disk",
        accepts: |name| name == "disk",
        connect: Box::new(move |_| Ok(medium.directory())),
    })
    .unwrap();
    let location = Location::parse("simulated:disk").unwrap();
    Datastore::init(&location, InitOptions { journal_size: 4 << 20 }).unwrap();
    let target = Target::At(location.clone());
    let ask = |request| dispatch(&target, request, &Nothing);
    let name = || "a".to_owned();

    let new = NewDisk::native(8 << 20, Provisioning::Thin);
    ask(Request::Disk(DiskRequest::Create { name: name(), new, settings: SettingsChange::default() })).unwrap();
    let (capacity, shrink, reconnect) = (16 << 20, false, Reconnect::NoClient);
    ask(Request::Disk(DiskRequest::Resize { name: name(), capacity, shrink, reconnect, tell_machine: true })).unwrap();
    let shown = ask(Request::Disk(DiskRequest::Show { name: name() })).unwrap();
    assert!(matches!(shown, Reply::Disk(disk) if disk.capacity == capacity && disk.machine.is_none()));

    let refused = |error: error::Error, told: &str| {
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.to_string().contains("'simulated:disk'") && error.to_string().contains(told), "{error}");
    };
    let machines = MachineRequest { qemu: "qemu".into(), memory_folder: None, verb: MachineVerb::List };
    refused(ask(Request::Machine(Box::new(machines))).unwrap_err(), "it cannot have virtual machines");
    refused(ask(Request::Job(JobRequest::Show { id: "1".into() })).unwrap_err(), "is not served");
    let server = socket::Server::start(&location, None, Box::new(|_, _| Ok(Reply::Settled)));
    refused(server.err().unwrap(), "it cannot have a control socket");
    ask(Request::Disk(DiskRequest::Delete { name: name(), promote: false, force: false })).unwrap();
}
