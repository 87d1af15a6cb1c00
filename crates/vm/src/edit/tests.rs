//! Changes of a running machine whose QEMU does not answer.

#![allow(clippy::unwrap_used)]
use super::*;
use crate::qemu::drives;
use crate::snapshots::tests::with_machine;
use parking_lot::Mutex;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::thread;

/// What a QEMU has, as far as the commands for disks and images change it.
#[derive(Default)]
struct Qemu {
    nodes: BTreeMap<String, Value>,
    devices: BTreeSet<String>,
    medium: Option<String>,
    /// A command that is carried out without an answer.
    deaf_to: &'static str,
}

impl Qemu {
    fn start(monitor: &Path) -> Arc<Mutex<Self>> {
        let qemu = Arc::new(Mutex::new(Self::default()));
        fs::create_dir(monitor.parent().unwrap()).unwrap();
        let (listener, served) = (UnixListener::bind(monitor).unwrap(), Arc::clone(&qemu));
        thread::spawn(move || listener.incoming().for_each(|stream| drop(Self::serve(&served, stream.unwrap()))));
        qemu
    }

    fn serve(served: &Mutex<Self>, mut stream: UnixStream) -> io::Result<()> {
        writeln!(stream, "{}", json!({ "QMP": {} }))?;
        for line in BufReader::new(stream.try_clone()?).lines() {
            let request: Value = serde_json::from_str(&line?)?;
            let command = request["execute"].as_str().unwrap();
            let mut qemu = served.lock();
            let answer = qemu.carry_out(command, &request["arguments"]);
            if qemu.deaf_to == command {
                qemu.deaf_to = "";
                break;
            }
            writeln!(stream, "{}", json!({ "return": answer, "id": request["id"] }))?;
        }
        Ok(())
    }

    fn carry_out(&mut self, command: &str, arguments: &Value) -> Value {
        let text = |key: &str| arguments[key].as_str().unwrap_or_default().to_owned();
        match command {
            "blockdev-add" => drop(self.nodes.insert(text("node-name"), arguments.clone())),
            "blockdev-del" => drop(self.nodes.remove(&text("node-name"))),
            "device_add" => drop(self.devices.insert(text("id"))),
            "blockdev-insert-medium" => self.medium = Some(text("node-name")),
            "query-named-block-nodes" => {
                return self.nodes.keys().map(|name| json!({ "node-name": name })).collect();
            }
            "qom-list" => return self.devices.iter().map(|name| json!({ "name": name })).collect(),
            "query-block" => {
                return self.medium.iter().map(|node| json!({ "inserted": { "node-name": node } })).collect();
            }
            _ => {}
        }
        json!({})
    }
}

/// Without an answer QEMU may carry out the command later. A device of another disk that got the same address was
/// taken for the one to be added.
#[test]
fn a_change_whose_answer_is_lost_is_completed_by_the_next_command() {
    let (folder, _disks, host) = with_machine();
    let change = host.change("web").unwrap();
    let mut definition = change.machine().definition().unwrap();
    definition.add_cdrom(None).unwrap();
    change.define(&definition).unwrap();
    let qemu = Qemu::start(&change.machine().run().monitor());
    let task = || {
        let definition = change.machine().definition().unwrap();
        Task { change: &change, host: &host, definition, runs: true }
    };
    for (disk, command) in [("one", "blockdev-add"), ("two", "device_add")] {
        qemu.lock().deaf_to = command;
        task().add_disk(disk).unwrap_err();
        let definition = change.machine().definition().unwrap();
        let added = definition.disks.iter().find(|it| it.name == disk).expect("QEMU may have the disk");
        task().add_disk(disk).unwrap();
        let qemu = qemu.lock();
        assert_eq!(qemu.nodes[&drives::disk_node(added)]["export"], disk);
        assert!(qemu.devices.contains(&drives::disk_device(added)), "{command}");
    }
    let image = folder.path().canonicalize().unwrap().join("x.iso");
    fs::write(&image, "x").unwrap();
    for command in ["blockdev-add", "blockdev-open-tray", "blockdev-insert-medium"] {
        qemu.lock().deaf_to = command;
        task().insert(&image).unwrap_err();
        task().insert(&image).unwrap();
        let mut qemu = qemu.lock();
        let node = qemu.medium.take().expect(command);
        assert_eq!(qemu.nodes.remove(&node).unwrap()["filename"], image.to_str().unwrap());
        assert_eq!(task().definition.cdroms[0].file.as_ref(), Some(&image));
    }
}
