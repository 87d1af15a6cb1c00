//! Interoperation: tar unpacks lamina's archives, QEMU reads the disks, and lamina reads archives made by tar.

use super::*;

#[test]
fn tar_and_qemu_read_what_we_make() {
    let folder = Folder::new();
    let disks = [compressible(5, 3 << 20), pattern(6, 2 << 20)];
    folder.write("web.ova", &made(&disks, Algorithm::Sha256, Controller::LsiLogic));
    folder.run("tar", &["-xf", "web.ova"]);
    for (number, model) in (1..).zip(&disks) {
        let name = format!("web-disk{number}.vmdk");
        folder.run("qemu-img", &["convert", "-f", "vmdk", "-O", "raw", &name, "out.raw"]);
        assert!(folder.read("out.raw") == *model);
    }
    // The manifest in the form that `sha256sum --check` reads.
    let manifest = String::from_utf8(folder.read("web.mf")).unwrap();
    let lines: String = manifest
        .lines()
        .map(|line| {
            let (name, digest) = line.strip_prefix("SHA256(").unwrap().split_once(")= ").unwrap();
            format!("{digest}  {name}\n")
        })
        .collect();
    folder.write("sums", lines.as_bytes());
    folder.run("sha256sum", &["-c", "sums"]);
    let parse = "import sys, xml.dom.minidom; xml.dom.minidom.parse(sys.argv[1])";
    folder.run("python3", &["-c", parse, "web.ovf"]);
}

/// A descriptor in the style of other programs: default namespaces, gigabytes, a property.
const FOREIGN: &str = r#"<?xml version='1.0' encoding='UTF-8'?>
<ovf:Envelope xmlns:ovf="http://schemas.dmtf.org/ovf/envelope/1" xmlns="http://schemas.dmtf.org/ovf/envelope/1">
  <!-- <References><File ovf:href="../nowhere"/></References> -->
  <References><File ovf:href="disk.vmdk" ovf:id="f1"/></References>
  <DiskSection><Info>disks</Info>
    <Disk ovf:capacity="3" ovf:capacityAllocationUnits="byte * 2^20" ovf:diskId="d1" ovf:fileRef="f1" ovf:format="x#streamOptimized"/>
    <Disk ovf:capacity="${size}" ovf:diskId="empty"/>
  </DiskSection>
  <VirtualSystemCollection ovf:id="all"><VirtualSystem ovf:id="first"><Name>one &amp;&#32;only</Name>
    <VirtualHardwareSection><Item><AllocationUnits>MegaBytes</AllocationUnits><ResourceType>4</ResourceType>
      <VirtualQuantity>512</VirtualQuantity></Item></VirtualHardwareSection>
  </VirtualSystem><VirtualSystem ovf:id="second"><Name>two</Name></VirtualSystem></VirtualSystemCollection>
</ovf:Envelope>
"#;

#[test]
fn we_read_what_tar_puts_together() {
    let folder = Folder::new();
    let model = compressible(8, 3 << 20);
    folder.write("in.raw", &model);
    let convert = ["convert", "-O", "vmdk", "-o", "subformat=streamOptimized", "in.raw", "disk.vmdk"];
    folder.run("qemu-img", &convert);
    folder.write("vm.ovf", FOREIGN.as_bytes());
    folder.run(
        "sh",
        &["-c", "for f in vm.ovf disk.vmdk; do echo \"SHA1($f)= $(sha1sum $f | cut -d' ' -f1)\"; done > vm.mf"],
    );
    for format in ["ustar", "gnu", "pax", "v7"] {
        let format = format!("--format={format}");
        folder.run("tar", &[&format, "-cf", "vm.ova", "./vm.ovf", "vm.mf", "disk.vmdk"]);
        let ova = Ova::open(folder.file("vm.ova"), "vm.ova").unwrap();
        assert!(ova.warnings().is_empty(), "{:?}", ova.warnings());
        assert_eq!((ova.machine(), ova.disks().len()), (Some("one & only"), 1));
        assert_eq!(ova.hardware().memory, Some(512 << 20));
        assert_eq!((ova.disks()[0].capacity, ova.disks()[0].file.as_str()), (3 << 20, "disk.vmdk"));
        ova.verify(&mut no_progress).unwrap();
        let layer = Stream::open(ova.file("disk.vmdk").unwrap(), "disk.vmdk").unwrap();
        assert!(read_all(&layer, None) == model);
        let mut out = Vec::new();
        ova.reader("disk.vmdk").unwrap().read_to_end(&mut out).unwrap();
        assert!(out == folder.read("disk.vmdk"));
    }
}

#[test]
fn links_and_paths_are_refused_as_members() {
    let folder = Folder::new();
    folder.write("vm.ovf", FOREIGN.as_bytes());
    std::os::unix::fs::symlink("/etc/passwd", folder.path.path().join("disk.vmdk")).unwrap();
    folder.run("tar", &["-cf", "vm.ova", "vm.ovf", "disk.vmdk"]);
    let error = Ova::open(folder.file("vm.ova"), "vm.ova").err().unwrap();
    assert!(error.to_string().contains("no plain file"), "{error}");
    folder.run("tar", &["-P", "--transform=s,vm.ovf,../vm.ovf,", "-cf", "up.ova", "vm.ovf"]);
    let error = Ova::open(folder.file("up.ova"), "up.ova").err().unwrap();
    assert!(error.to_string().contains("out of the archive"), "{error}");
    for href in ["../disk.vmdk", "/etc/passwd", "http://host/disk.vmdk", "a\\b", ""] {
        folder.write("vm.ovf", FOREIGN.replace("\"disk.vmdk\"", &format!("\"{href}\"")).as_bytes());
        folder.run("tar", &["-cf", "vm.ova", "vm.ovf"]);
        let error = Ova::open(folder.file("vm.ova"), "vm.ova").err().unwrap();
        assert!(error.to_string().contains("out of the archive"), "{href}: {error}");
    }
}
