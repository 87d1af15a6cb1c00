//! QEMU's programs: qemu-io, qemu-img, and qemu-nbd as a proxy.

use crate::libnbd::{Proxy, image, service};
use crate::matrix::Line;
use crate::operation::{DATA_END, Operation, SIZE, WRITTEN};
use crate::program::Generation;
use crate::served::Target;

type Outcome = Result<(), String>;

/// Exit status of `timeout` when its program was killed.
const KILLED: &str = "signal: 9 (SIGKILL)";

/// Commands of qemu-io for an operation, including reads that compare with a pattern.
fn commands(operation: Operation) -> Vec<String> {
    let (offset, length) = operation.range();
    let half = DATA_END / 2;
    match operation {
        Operation::Read => vec![
            format!("read -P 0x11 0 {half}"),
            format!("read -P 0x22 {half} {half}"),
            format!("read -P 0 {DATA_END} {}", SIZE - DATA_END),
        ],
        Operation::Write => vec![
            format!("write -P {WRITTEN} {offset} {length}"),
            format!("read -P {WRITTEN} {offset} {length}"),
            "flush".into(),
        ],
        // qemu-io is killed afterwards, because it flushes when it exits.
        Operation::Fua => vec![
            format!("write -f -P {WRITTEN} {offset} {length}"),
            format!("read -P {WRITTEN} {offset} {length}"),
            "sigraise 9".into(),
        ],
        Operation::Trim => vec![format!("discard {offset} {length}"), format!("read -P 0 {offset} {length}")],
        Operation::Zero => vec![format!("write -z {offset} {length}"), format!("read -P 0 {offset} {length}")],
        Operation::FastZero => {
            vec![format!("write -z -n -u {offset} {length}"), format!("read -P 0 {offset} {length}")]
        }
        Operation::BlockStatus | Operation::Cache | Operation::Resize => unreachable!("no command of qemu-io"),
    }
}

fn qemu_io(generation: Generation, operation: Operation, connection: &[&str]) -> Outcome {
    let commands = commands(operation);
    let mut arguments = vec!["--discard", "unmap"];
    arguments.extend(connection);
    commands.iter().for_each(|command| arguments.extend(["-c", command]));
    let text = match generation.run("qemu-io", &arguments) {
        Err(message) if operation == Operation::Fua && message.contains(KILLED) => message,
        outcome => outcome?,
    };
    let failed = ["failed", "rror"].iter().any(|word| text.contains(word));
    if failed { Err(text) } else { Ok(()) }
}

/// The first arguments of a program: `objects` and `--image-opts`.
fn arguments<'a>(objects: &'a [String], image: &'a str) -> Vec<&'a str> {
    objects.iter().map(String::as_str).chain(["--image-opts", image]).collect()
}

pub fn io(generation: Generation, target: &Target, line: &Line) -> Outcome {
    let (objects, image) = (target.objects(), target.image());
    qemu_io(generation, line.operation, &arguments(&objects, &image))
}

/// qemu-img: converts, compares and maps images.
pub fn img(generation: Generation, target: &Target, line: &Line) -> Outcome {
    let (objects, export) = (target.objects(), target.image());
    let objects: Vec<&str> = objects.iter().map(String::as_str).collect();
    if line.operation == Operation::BlockStatus {
        return map(generation, target);
    }
    let path = target.served.scratch().join("image");
    image(&path, &line.operation.content());
    let raw = format!("driver=raw,file.driver=file,file.filename={}", path.display());
    if line.operation != Operation::Read {
        let convert = ["convert", "-n", "--image-opts", "--target-image-opts"];
        generation.run("qemu-img", &[&convert[..], &objects, &[&raw, &export]].concat())?;
    }
    generation.run("qemu-img", &[&["compare", "--image-opts"][..], &objects, &[&raw, &export]].concat()).map(drop)
}

fn map(generation: Generation, target: &Target) -> Outcome {
    let (objects, image) = (target.objects(), target.image());
    let text = generation.run("qemu-img", &[&["map", "--output=json"][..], &arguments(&objects, &image)].concat())?;
    let map: serde_json::Value = serde_json::from_str(&text).map_err(|e| format!("{e}: {text}"))?;
    let extents: Vec<(u64, u64, bool, bool)> = map
        .as_array()
        .into_iter()
        .flatten()
        .map(|e| {
            let number = |key: &str| e[key].as_u64().unwrap_or(u64::MAX);
            (number("start"), number("length"), e["data"] == true, e["zero"] == true)
        })
        .collect();
    let (data, all) = (DATA_END as u64, SIZE as u64);
    if extents == [(0, data, true, false), (data, all - data, false, true)] { Ok(()) } else { Err(text) }
}

/// qemu-nbd as a proxy. qemu-io of the same generation connects to the proxy.
pub fn nbd(generation: Generation, target: &Target, line: &Line) -> Outcome {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("proxy");
    let (objects, image) = (target.objects(), target.image());
    let mut command = service(generation, "qemu-nbd");
    command.args(["--persistent", "--discard=unmap", "--socket"]).arg(&socket);
    command.args(arguments(&objects, &image));
    let proxy = Proxy::listening(command, folder)?;
    let through = format!("driver=nbd,server.type=unix,server.path={}", socket.display());
    if line.operation == Operation::BlockStatus {
        let text = generation.run("qemu-img", &["map", "--output=json", "--image-opts", &through])?;
        let zero = format!("\"start\": {DATA_END}, \"length\": {}", SIZE - DATA_END);
        return if text.contains(&zero) { Ok(()) } else { Err(text) };
    }
    qemu_io(generation, line.operation, &["--image-opts", &through])?;
    proxy.stop(if line.operation == Operation::Fua { "KILL" } else { "TERM" });
    Ok(())
}
