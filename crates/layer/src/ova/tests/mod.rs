//! Archives that lamina makes, archives that `tar` makes from the usual parts, and invalid ones.

mod damage;
mod outside;

use super::*;
use crate::proving::{Folder, Random, compressible, memory_file, pattern, read_all};
use crate::stream::Stream;
use crate::{Layer, SECTOR};
use std::io::Cursor;

fn descriptor(capacity: u64) -> Vec<u8> {
    format!(
        "# Disk DescriptorFile\nversion=1\nCID=12345678\nparentCID=ffffffff\ncreateType=\"streamOptimized\"\n\n\
         # Extent description\nRW {} SPARSE \"disk.vmdk\"\n\n# The Disk Data Base\n#DDB\n\nddb.virtualHWVersion = \"4\"\n\
         ddb.geometry.cylinders = \"20\"\nddb.geometry.heads = \"16\"\nddb.geometry.sectors = \"63\"\n\
         ddb.adapterType = \"ide\"\n",
        capacity / SECTOR
    )
    .into_bytes()
}

fn machine(controller: Controller) -> Machine {
    Machine {
        name: "web & <db>".to_owned(),
        processors: 2,
        memory_mib: 4096,
        hardware: "vmx-13".to_owned(),
        system: 101,
        controller,
        networks: vec![Network { name: "VM \"Network\"".to_owned(), adapter: "VmxNet3".to_owned(), mac: None }],
        settings: Vec::new(),
    }
}

fn options(algorithm: Algorithm) -> OvaOptions {
    OvaOptions { algorithm, level: 6, threads: 2, time: 1_700_000_000 }
}

/// An archive with these disks.
fn made(disks: &[Vec<u8>], algorithm: Algorithm, controller: Controller) -> Vec<u8> {
    let planned = (1..).zip(disks).map(|(number, bytes)| PlannedDisk {
        file: format!("web-disk{number}.vmdk"),
        capacity: bytes.len() as u64,
        descriptor: descriptor(bytes.len() as u64),
    });
    let out = Cursor::new(Vec::new());
    let mut writer = OvaWriter::new(out, "web", machine(controller), planned.collect(), options(algorithm)).unwrap();
    for disk in disks {
        writer
            .add_disk(|stream| disk.chunks(1 << 20).zip(0..).try_for_each(|(part, at)| stream.write(at << 20, part)))
            .unwrap();
    }
    writer.finish().unwrap().into_inner()
}

fn no_progress(_: u64) -> Result<()> {
    Ok(())
}

#[test]
fn a_written_archive_reads_back() {
    for (algorithm, controller) in [
        (Algorithm::Sha256, Controller::ParaVirtual),
        (Algorithm::Sha1, Controller::Ide),
        (Algorithm::Sha512, Controller::Sata),
    ] {
        let disks = [compressible(1, 5 << 20), vec![0; 1 << 20], pattern(3, (3 << 20) + 512)];
        let bytes = made(&disks, algorithm, controller);
        let ova = Ova::open(memory_file(&bytes), "web.ova").unwrap();
        assert!(ova.warnings().is_empty(), "{:?}", ova.warnings());
        assert_eq!(ova.machine(), Some("web & <db>"));
        assert_eq!(ova.hardware(), Hardware { processors: Some(2), memory: Some(4 << 30) });
        assert_eq!(ova.disks().len(), 3);
        for (disk, model) in ova.disks().iter().zip(&disks) {
            assert_eq!(disk.capacity, model.len() as u64);
            assert!(disk.format.ends_with("#streamOptimized"));
            let layer = Stream::open(ova.file(&disk.file).unwrap(), &disk.file).unwrap();
            assert!(read_all(&layer, None) == *model && layer.warnings().is_empty());
            assert_eq!(layer.format(), "streamoptimized");
        }
        let mut read = 0;
        ova.verify(&mut |bytes| {
            read += bytes;
            Ok(())
        })
        .unwrap();
        let disks_and_text: u64 =
            ova.members().iter().filter(|member| member.name() != "web.mf").map(Member::size).sum();
        assert_eq!(read, disks_and_text);
        let stop = ova.verify(&mut |_| Err(Error::new(ErrorKind::Interrupted, "enough")));
        assert_eq!(stop.unwrap_err().kind(), ErrorKind::Interrupted);
        let names: Vec<&str> = ova.members().iter().map(Member::name).collect();
        assert_eq!(names, ["web.ovf", "web.mf", "web-disk1.vmdk", "web-disk2.vmdk", "web-disk3.vmdk"]);
    }
}

#[test]
fn forty_disks_are_attached_to_several_controllers() {
    let disks = vec![pattern(1, 4096); 40];
    for controller in [Controller::LsiLogic, Controller::Sata] {
        let ova = Ova::open(memory_file(&made(&disks, Algorithm::Sha256, controller)), "web.ova").unwrap();
        assert_eq!(ova.disks().len(), 40);
        let text = String::from_utf8(ova.descriptor().unwrap()).unwrap();
        let places = text.matches("<rasd:HostResource>").count();
        assert_eq!(places, 40);
        let kind = if controller == Controller::LsiLogic { "<rasd:ResourceType>6<" } else { "<rasd:ResourceType>20<" };
        assert_eq!(text.matches(kind).count(), if controller == Controller::LsiLogic { 3 } else { 2 });
        assert!(
            !text.contains("<rasd:AddressOnParent>7</rasd:AddressOnParent>\n        <rasd:ElementName>Hard disk 8<")
                || controller == Controller::Sata
        );
    }
}

#[test]
fn an_unfinished_archive_is_invalid() {
    let planned = PlannedDisk { file: "d.vmdk".to_owned(), capacity: 1 << 20, descriptor: descriptor(1 << 20) };
    let two = vec![planned.clone(), PlannedDisk { file: "e.vmdk".to_owned(), ..planned.clone() }];
    let mut out = Cursor::new(Vec::new());
    let mut writer =
        OvaWriter::new(&mut out, "web", machine(Controller::Ide), two, options(Algorithm::Sha256)).unwrap();
    writer.add_disk(|stream| stream.write(0, &[1; 65_536])).unwrap();
    assert_eq!(writer.finish().err().unwrap().kind(), ErrorKind::Invalid);
    let error = Ova::open(memory_file(out.get_ref()), "web.ova").err().unwrap();
    assert!(error.to_string().contains("no OVF descriptor"), "{error}");

    for (name, stem) in [("../d.vmdk", "web"), ("d.vmdk", "a/b"), ("web.ovf", "web"), (&"x".repeat(200), "web")] {
        let disk = PlannedDisk { file: name.to_owned(), ..planned.clone() };
        let out = Cursor::new(Vec::new());
        let made = OvaWriter::new(out, stem, machine(Controller::Ide), vec![disk], options(Algorithm::Sha256));
        assert!(made.is_err(), "{name} {stem}");
    }
}
