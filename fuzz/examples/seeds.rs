//! Creates the seeds of the targets that damage images: `cargo run --example seeds -- seeds`.
//!
//! For each base image the seeds have an input that uses the undamaged image. Images made by qemu-img are added
//! completely.

use lamina_fuzz::files::Sectors;
use std::fs;
use std::path::Path;
use std::process::Command;

/// Images from QEMU: target, name, arguments of qemu-img, and commands for qemu-io.
const FOREIGN: [(&str, &str, &str, &[&str]); 8] = [
    ("hosted", "qemu-sparse", "create -q -f vmdk IMAGE 33M", &["write -q -P 7 0 1k", "write -q -P 8 32M 1k"]),
    (
        "qcow2",
        "qemu-v3",
        "create -q -f qcow2 -o cluster_size=4k IMAGE 16M",
        &["write -q -P 1 0 12k", "write -q -z 8M 8k"],
    ),
    ("qcow2", "qemu-v2", "create -q -f qcow2 -o cluster_size=512,compat=0.10 IMAGE 1M", &["write -q -P 2 0 2k"]),
    (
        "qcow2",
        "qemu-compressed",
        "create -q -f qcow2 -o cluster_size=8k IMAGE 4M",
        &["write -q -c -P 3 0 8k", "write -q -c -P 4 64k 8k"],
    ),
    ("qcow2", "qemu-zstd", "create -q -f qcow2 -o compression_type=zstd IMAGE 4M", &["write -q -c -P 3 0 64k"]),
    (
        "qcow2",
        "qemu-extended",
        "create -q -f qcow2 -o extended_l2=on,cluster_size=16k IMAGE 4M",
        &["write -q -P 6 512 1k", "write -q -z 4k 2k"],
    ),
    ("qcow2", "qemu-backing", "create -q -f qcow2 -b d.qcow2 -F vmdk -u -o cluster_size=4k IMAGE 1M", &[]),
    ("stream", "qemu-stream", "convert -q -f raw -O vmdk -o subformat=streamOptimized SOURCE IMAGE", &[]),
];

fn run(program: &str, arguments: &[&str]) {
    let status = Command::new(program).args(arguments).status().expect("qemu's tools");
    assert!(status.success(), "{program} {arguments:?}");
}

/// Operations on an open image: for reading, then for writing with four changes. See `layers::exercise`.
const USES: [&[u8]; 3] = [
    &[0, 0, 4, 0, 0, 9, 64, 0, 3, 0, 0, 0, 0, 0, 7, 4, 1, 6],
    &[1, 5, 0, 0, 0, 0, 0, 0, 7, 8, 3, 1, 12, 2, 7, 0, 132, 1, 6, 7, 1, 0, 0, 8, 5, 1, 9],
    &[0, 0, 7, 5, 1, 3, 4, 1, 7, 4, 7, 1, 0, 1, 4, 7, 2, 6, 24, 0, 1],
];

/// Folders for the target `image`: its options, then files by index of name and of base.
const FOLDERS: [(&str, u8, &[(u8, u8)]); 6] = [
    ("flat", 0, &[(0, 1), (3, 6)]),
    ("three-levels", 0, &[(0, 4), (2, 3), (1, 1), (3, 6), (4, 7), (6, 10)]),
    ("forced", 1, &[(0, 4), (2, 3), (1, 1), (3, 6), (4, 8), (6, 11)]),
    ("two-levels", 1, &[(0, 2), (1, 1), (3, 6), (5, 9)]),
    ("above-qcow2", 1, &[(0, 5), (7, 17), (3, 6)]),
    ("embedded", 0, &[(0, 13)]),
];

const TEXTS: [(&str, &str); 3] = [
    (
        "esxi",
        "# Disk DescriptorFile\nversion=3\nencoding=\"UTF-8\"\nCID=a2b3c4d5\nparentCID=ffffffff\nisNativeSnapshot=\"no\"\n\
         createType=\"vmfs\"\n\n# Extent description\nRW 2048 VMFS \"vm-flat.vmdk\"\n\n# Change Tracking File\n\
         changeTrackPath=\"vm-ctk.vmdk\"\n\n# The Disk Data Base \n#DDB\n\nddb.adapterType = \"lsilogic\"\n\
         ddb.longContentID = \"00112233445566778899aabba2b3c4d5\"\nddb.thinProvisioned = \"1\"\n\
         ddb.uuid = \"60 00 C2 9a 00 11 22 33-44 55 66 77 88 99 aa bb\"\n",
    ),
    (
        "delta",
        "# Disk DescriptorFile\nversion=1\nCID=1\nparentCID=fffffffe\ncreateType=\"seSparse\"\n\
         parentFileNameHint=\"../vm/vm.vmdk\"\nRW 2048 SESPARSE \"vm-000001-sesparse.vmdk\"\nddb.grain = \"8\"\n",
    ),
    (
        "windows",
        "# Disk DescriptorFile\r\nversion=1\r\nencoding=\"windows-1252\"\r\nCID=12345678\r\nparentCID=ffffffff\r\n\
         createType=\"twoGbMaxExtentFlat\"\r\nRW 10 FLAT \"vm-f001.vmdk\" 0\r\nRDONLY 5 ZERO\r\n\
         NOACCESS 3 FLAT \"C:\\vm f002.vmdk\" 7\r\n",
    ),
];

const LINES: [(&str, &str); 5] = [
    ("cancel", r#"{"version":4,"message":"cancel"}"#),
    (
        "create",
        r#"{"version":4,"message":{"request":{"disk":{"create":{"name":"a","capacity":1048576,"provisioning":"thin"}}}}}"#,
    ),
    (
        "diff",
        r#"{"version":4,"message":{"request":{"snapshot":{"diff":{"disk":"a","from":{"snapshot":"s"},"to":"head"}}}}}"#,
    ),
    ("progress", r#"{"version":4,"message":{"progress":{"done":1,"total":18446744073709551615}}}"#),
    ("error", r#"{"version":4,"message":{"error":{"kind":"busy","message":"why"}}}"#),
];

const LIST: &str = ".encoding = \"UTF-8\"\nsnapshot.lastUID = \"2\"\nsnapshot.current = \"2\"\nsnapshot0.uid = \"1\"\n\
snapshot0.filename = \"vm-Snapshot1.vmsn\"\nsnapshot0.displayName = \"a|22b\"\nsnapshot0.createTimeHigh = \"388745\"\n\
snapshot0.createTimeLow = \"-1991180826\"\nsnapshot0.numDisks = \"1\"\nsnapshot0.disk0.fileName = \"vm.vmdk\"\n\
snapshot0.disk0.node = \"scsi0:0\"\nsnapshot.numSnapshots = \"2\"\nsnapshot1.uid = \"2\"\nsnapshot1.parent = \"1\"\n\
snapshot1.numDisks = \"0\"\n";

const MIGRATION: &str = r#"{"id":"0f0e0d0c-0b0a-4908-8706-050403020100","stage":"copying","disk":"vm","source":{"native":{"object":7}},
"target":{"images":{"folder":"vm"}},"uuid":"0f0e0d0c-0b0a-4908-8706-050403020101","created":1,"peer":"/srv/other"}"#;

const REFERENCES: [&str; 9] = ["a", "b/a", "./a", "c/a", "d", "f/out/a", "$/allowed/a", "h2/c/a", "..\\in\\e\\a"];

fn keep(seeds: &Path, target: &str, name: &str, bytes: &[u8]) {
    let folder = seeds.join(target);
    fs::create_dir_all(&folder).expect("the folder of the seeds can be created");
    fs::write(folder.join(name), bytes).expect("the seed can be written");
}

fn main() {
    let seeds = std::env::args().nth(1).expect("the first argument is the folder of the seeds");
    let seeds = Path::new(&seeds);
    for (target, bases) in [("vmfssparse", 8), ("sesparse", 5), ("vsansparse", 4), ("hosted", 5)] {
        for base in 1..=bases {
            for (number, uses) in USES.iter().enumerate() {
                keep(seeds, target, &format!("base-{base}-{number}"), &[&[0, base, 0], *uses].concat());
            }
        }
    }
    for (target, bases) in [("stream", 2), ("ova", 2)] {
        for base in 1..=bases {
            keep(seeds, target, &format!("base-{base}"), &[base, 0, 1, 7]);
        }
    }
    for base in 1..=6 {
        keep(seeds, "qcow2", &format!("base-{base}"), &[0, base, 0, 1, 7]);
    }
    for (name, flags, files) in FOLDERS {
        let mut bytes = vec![flags, files.len() as u8 - 1];
        files.iter().for_each(|(name, base)| bytes.extend([*name, *base, 0]));
        keep(seeds, "image", name, &bytes);
    }
    TEXTS.iter().for_each(|(name, text)| keep(seeds, "descriptor", name, text.as_bytes()));
    LINES.iter().for_each(|(name, line)| keep(seeds, "control", name, line.as_bytes()));
    keep(seeds, "vmsd", "two", LIST.as_bytes());
    keep(seeds, "migration", "copying", &[&[0], MIGRATION.as_bytes()].concat());
    for base in 0..4 {
        for operation in 0..8 {
            keep(
                seeds,
                "vmdk_disk",
                &format!("base-{base}-{operation}"),
                &[0, base, 0, 0, 2, 1, operation, 2, 7, 0, 4],
            );
        }
    }
    for (number, reference) in REFERENCES.iter().enumerate() {
        keep(seeds, "reference", &format!("{number}"), reference.as_bytes());
    }
    let work = std::env::temp_dir().join(format!("lamina-seeds-{}", std::process::id()));
    fs::create_dir_all(&work).expect("a folder for temporary files");
    let (image, source) = (work.join("image"), work.join("source"));
    let (image_name, source_name) = (image.to_string_lossy(), source.to_string_lossy());
    let mut bytes = vec![0u8; 1 << 20];
    bytes[..512].fill(1);
    bytes[1 << 19..][..512].fill(2);
    fs::write(&source, &bytes).expect("a folder for temporary files");
    for (target, name, arguments, writes) in FOREIGN {
        let _ = fs::remove_file(&image);
        let words = arguments.split(' ').map(|word| match word {
            "IMAGE" => &image_name,
            "SOURCE" => &source_name,
            word => word,
        });
        run("qemu-img", &words.collect::<Vec<_>>());
        for write in writes {
            let format = if target == "hosted" { "vmdk" } else { "qcow2" };
            run("qemu-io", &["-f", format, "-c", write, &image_name]);
        }
        let file = Sectors::from_bytes(&fs::read(&image).expect("qemu's image"));
        // The target `stream` reads no flags byte; for the other targets it is 0.
        let spelled = file.spell();
        keep(seeds, target, name, &if target == "stream" { spelled } else { [vec![0], spelled].concat() });
    }
    fs::remove_dir_all(&work).expect("a folder of ours");
}
