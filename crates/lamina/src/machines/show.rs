//! `lamina vm show` and `lamina vm list`.

use crate::End;
use crate::output::{self, Align, Form, Table, human, print_facts};
use error::Result;
use serde_json::{Value, json};
use std::io;
use vm::definition::{Definition, Link, Origin};
use vm::host::Host;
use vm::instant::freeze;
use vm::machine::{Machine, MachineState, MemoryRecord};
use vm::snapshots::{self, Record};

/// What a machine does, in a word.
fn state(machine: &Machine) -> Result<&'static str> {
    Ok(match machine.glance()? {
        MachineState::Stopped if freeze::frozen(machine)?.is_some() => "frozen",
        MachineState::Stopped => "stopped",
        MachineState::Running => "running",
        MachineState::Paused => "paused",
        MachineState::Other => "busy",
    })
}

fn link(link: &Link) -> String {
    match link {
        Link::User => "user".into(),
        Link::None => "unplugged".into(),
        Link::Bridge(bridge) => format!("bridge={bridge}"),
    }
}

fn origin(origin: &Origin) -> String {
    let at = origin.snapshot.as_ref().map(|name| format!("@{name}")).unwrap_or_default();
    format!("{}{at} ({} clone)", origin.machine, origin.way.name())
}

/// A definition as JSON.
pub fn definition(definition: &Definition) -> Value {
    let disks: Vec<Value> = definition.disks.iter().map(|it| json!({ "name": it.name, "slot": it.slot })).collect();
    let networks = definition.networks.iter();
    let networks: Vec<Value> =
        networks.map(|it| json!({ "mac": it.mac, "link": link(&it.link), "slot": it.slot })).collect();
    json!({
        "name": definition.name, "uuid": definition.uuid, "cpus": definition.cpus, "memory": definition.memory,
        "boot": definition.boot, "disks": disks, "networks": networks, "origin": definition.origin,
    })
}

/// A snapshot as JSON.
pub fn snapshot(machine: &str, record: &Record) -> Value {
    let disks: Vec<String> = record.disks.iter().map(|it| format!("{}@{}", it.disk, it.name)).collect();
    json!({
        "machine": machine, "name": record.name, "created": record.created, "consistency": record.consistency,
        "memory": record.has_memory(), "disks": disks,
    })
}

/// All machines.
pub fn all(host: &Host, form: Form) -> Result<End> {
    let mut values = Vec::new();
    let columns = [("NAME", Align::Left), ("STATE", Align::Left), ("CPUS", Align::Right), ("MEMORY", Align::Right)];
    let more = [("DISKS", Align::Right), ("CLONE OF", Align::Left)];
    let mut table = Table::new(&[&columns[..], &more[..]].concat());
    for machine in host.machines().list()? {
        let defined = match machine.definition() {
            Ok(defined) => defined,
            // Deleted between the two looks.
            Err(_) if !machine.folder().exists() => continue,
            Err(error) => return Err(error),
        };
        let state = state(&machine)?;
        let mut value = definition(&defined);
        value["state"] = json!(state);
        values.push(value);
        table.row(vec![
            defined.name.clone(),
            state.into(),
            defined.cpus.to_string(),
            human::size(defined.memory),
            defined.disks.len().to_string(),
            defined.origin.as_ref().map(origin).unwrap_or_default(),
        ]);
    }
    print(form, &json!({ "machines": values }), |out| table.print(out))
}

fn print(form: Form, value: &Value, text: impl FnOnce(&mut dyn io::Write) -> io::Result<()>) -> Result<End> {
    let mut out = io::BufWriter::new(io::stdout());
    let written = match form {
        Form::Json => output::print_json(&mut out, value),
        Form::Text => text(&mut out),
    };
    match written.and_then(|()| io::Write::flush(&mut out)) {
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Ok(End::Unread),
        Err(e) => Err(error::Error::io("writing the output", e)),
        Ok(()) => Ok(End::Code(0)),
    }
}

/// The snapshots of a machine.
pub fn snapshots(host: &Host, name: &str, form: Form) -> Result<End> {
    let records = snapshots::list(&host.machines().get(name)?)?;
    let mut table = Table::new(&[
        ("SNAPSHOT", Align::Left),
        ("TAKEN", Align::Left),
        ("HOLDS", Align::Left),
        ("DISKS", Align::Right),
    ]);
    for record in &records {
        let holds =
            if record.has_memory() { "disks and memory".into() } else { format!("disks, {}", record.consistency) };
        let taken = human::time(record.created);
        table.row(vec![format!("{name}@{}", record.name), taken, holds, record.disks.len().to_string()]);
    }
    let values: Vec<Value> = records.iter().map(|record| snapshot(name, record)).collect();
    print(form, &json!({ "snapshots": values }), |out| table.print(out))
}

/// One machine.
pub fn one(host: &Host, name: &str, form: Form) -> Result<End> {
    let machine = host.machines().get(name)?;
    let defined = machine.definition()?;
    let state = state(&machine)?;
    let process = machine.process()?;
    let records = snapshots::list(&machine)?;
    let children = host.children(&machine)?;
    let frozen = freeze::frozen(&machine)?;
    let memory = match &process {
        Some(_) => machine.memory().ok(),
        None => None,
    };
    let image = match (&frozen, &memory) {
        (Some(id), _) | (None, Some(MemoryRecord::Image(id))) => Some(id.clone()),
        _ => None,
    };
    // Without a QEMU a machine can still be looked at.
    let features = host.features();
    let (accelerator, why) = match &features {
        Ok(features) => (features.accelerator.name().to_owned(), features.why_not_kvm.clone()),
        Err(error) => ("none".to_owned(), Some(error.to_string())),
    };
    let disks = host.disks().all()?;
    let mut value = definition(&defined);
    let console = process.is_some().then(|| machine.run().console());
    let extra = json!({
        "state": state, "pid": process.as_ref().map(vm::qemu::process::Process::pid),
        "qemu": features.as_ref().ok().map(|features| &features.version),
        "accelerator": accelerator, "why_not_kvm": why, "console": console,
        "monitor": process.is_some().then(|| machine.run().monitor()),
        "agent": process.is_some().then(|| machine.run().agent()),
        "console_log": machine.run().console_log(), "log": machine.run().errors(),
        "snapshots": records.iter().map(|record| snapshot(name, record)).collect::<Vec<Value>>(),
        "frozen": frozen, "image": image,
        "children": children.iter().map(|(at, child)| json!({ "snapshot": at, "name": child })).collect::<Vec<Value>>(),
        "folder": machine.folder(),
    });
    if let (Some(value), Some(extra)) = (value.as_object_mut(), extra.as_object()) {
        value.extend(extra.clone());
    }
    let mut facts = vec![
        ("name", defined.name.clone()),
        ("uuid", defined.uuid.to_string()),
        ("state", process.as_ref().map_or(state.to_owned(), |process| format!("{state} (process {})", process.pid()))),
        ("accelerator", why.map_or(accelerator.clone(), |why| format!("{accelerator}: {why}"))),
        ("cpus", defined.cpus.to_string()),
        ("memory", memory_text(defined.memory, memory.as_ref())),
    ];
    if let Some(boot) = &defined.boot {
        facts.push(("kernel", boot.kernel.display().to_string()));
    }
    let mut several = |title: &'static str, values: Vec<String>| {
        for (index, value) in values.into_iter().enumerate() {
            facts.push((if index == 0 { title } else { "" }, value));
        }
    };
    let disk = |name: &String| match disks.get(name) {
        Some(facts) => format!("{name} ({})", human::size(facts.capacity)),
        None => format!("{name} (MISSING)"),
    };
    several("disks", defined.disks.iter().map(|it| disk(&it.name)).collect());
    several("networks", defined.networks.iter().map(|it| format!("{} on {}", it.mac, link(&it.link))).collect());
    several("console", console.iter().map(|path| path.display().to_string()).collect());
    several("clone of", defined.origin.iter().map(origin).collect());
    several("snapshots", records.iter().map(|it| format!("{} ({})", it.name, it.consistency)).collect());
    several("image", image.into_iter().collect());
    several("children", children.iter().map(|(at, child)| format!("{child} (on {at})")).collect());
    print(form, &value, |out| print_facts(out, &facts))
}

fn memory_text(size: u64, memory: Option<&MemoryRecord>) -> String {
    let size = human::size(size);
    match memory {
        Some(MemoryRecord::Own(_)) => format!("{size}, in a file of its own"),
        Some(MemoryRecord::Image(_)) => format!("{size}, shared copy-on-write"),
        _ => size,
    }
}
