//! Descriptors: golden texts, refused texts, a hundred thousand mutations, and power cuts.

use super::storage::{self, NEW_SUFFIX, Pending};
use super::*;
use backend::simulated::{SimulatedDisk, SimulatedOptions};
use backend::{Access as FileAccess, Directory, IoMode};
use std::time::{Duration, Instant};
pub(crate) use testkit::Random;

mod sharing;

const BASE: &str = "# Disk DescriptorFile\nversion=1\nencoding=\"UTF-8\"\nCID=fffffffe\nparentCID=ffffffff\n\
isNativeSnapshot=\"no\"\ncreateType=\"vmfs\"\n\n# Extent description\nRW 83886080 VMFS \"web-flat.vmdk\"\n\n\
# The Disk Data Base \n#DDB\n\nddb.adapterType = \"lsilogic\"\nddb.geometry.cylinders = \"5221\"\n\
ddb.geometry.heads = \"255\"\nddb.geometry.sectors = \"63\"\n\
ddb.longContentID = \"1c4a2f5a3ed3bd5c1c1fd63dfffffffe\"\nddb.thinProvisioned = \"1\"\n\
ddb.uuid = \"60 00 C2 9a 1d 7b 49 44-dc 53 e6 d3 e5 89 7b 0d\"\nddb.virtualHWVersion = \"14\"\n";

const DELTA: &str = "# Disk DescriptorFile\nversion=1\nencoding=\"UTF-8\"\nCID=8f67ca74\nparentCID=0172e8a4\n\
isNativeSnapshot=\"no\"\ncreateType=\"vmfsSparse\"\nparentFileNameHint=\"vm.vmdk\"\n# Extent description\n\
RW 4096 VMFSSPARSE \"vm-000001-delta.vmdk\"\n\n# The Disk Data Base \n#DDB\n\n\
ddb.longContentID = \"4b98b55ba6a6bc2e8fd6eb368f67ca74\"\n";

/// A text as QEMU and VMware Workstation write it, with the variations that occur.
const HOSTED: &str = "# Disk DescriptorFile\r\nversion=1\r\nCID=7b1234\r\nparentCID=ffffffff\r\n\
createType=\"twoGbMaxExtentFlat\"\r\n\r\n# Extent description\r\nRW 4194304 FLAT \"a b-f001.vmdk\" 0\r\n\
RW 2048 FLAT \"a b-f002.vmdk\" 128 \r\nRDONLY 64 ZERO\r\n\r\n# The Disk Data Base\r\n#DDB\r\n\r\n\
ddb.virtualHWVersion = \"4\"\r\nddb.geometry.cylinders = \"4161\"\r\nddb.toolsVersion = \"2147483647\"\r\n";

fn parse(text: &str) -> Result<Descriptor> {
    Descriptor::parse(text.as_bytes())
}

fn parsed(text: &str) -> Descriptor {
    parse(text).unwrap()
}

fn refused(text: &str) -> (ErrorKind, String) {
    let error = parse(text).expect_err(text);
    (error.kind(), error.to_string())
}

#[test]
fn descriptors_written_by_vmware_are_encoded_unchanged() {
    for text in [BASE, DELTA] {
        let descriptor = parsed(text);
        assert_eq!(String::from_utf8(descriptor.to_bytes().unwrap()).unwrap(), text);
    }
    let base = parsed(BASE);
    assert_eq!(base.capacity(), 40 << 30);
    assert_eq!((base.content, base.parent_content), (ContentId::INITIAL, None));
    assert!(base.thin());
    let delta = parsed(DELTA);
    assert_eq!(delta.parent_content, ContentId::new(0x0172_e8a4));
    assert_eq!(delta.parent_hint.as_deref(), Some("vm.vmdk"));
    assert_eq!(delta.create_type, CreateType::VmfsSparse);
    assert_eq!(delta.extents, [ExtentLine::whole(ExtentKind::VmfsSparse, 4096, "vm-000001-delta.vmdk")]);
}

#[test]
fn a_new_descriptor_equals_one_of_vmware() {
    let mut numbers = [0x1c4a_2f5a_3ed3_bd5c, 0x1c1f_d63d_1c1f_d63d].into_iter().cycle();
    let random = &mut || numbers.next().unwrap();
    let extent = ExtentLine::whole(ExtentKind::Vmfs, 83_886_080, "web-flat.vmdk");
    let mut disk = Descriptor::base(CreateType::Vmfs, vec![extent]);
    disk.native_snapshot = Some(false);
    let uuid = Uuid::parse("60 00 C2 9a 1d 7b 49 44-dc 53 e6 d3 e5 89 7b 0d").unwrap();
    disk.database.set_disk(Adapter::LsiLogic, disk.sectors(), uuid);
    disk.database.set_long_content(disk.content, random);
    disk.set_thin(true);
    assert_eq!(String::from_utf8(disk.to_bytes().unwrap()).unwrap(), BASE);
    let extent = ExtentLine::whole(ExtentKind::SeSparse, 83_886_080, "web-000001-sesparse.vmdk");
    let delta = Descriptor::delta(&disk, "web.vmdk", CreateType::SeSparse, vec![extent], random);
    assert_eq!(delta.parent_content, Some(disk.content));
    assert_eq!(delta.database.get("ddb.grain"), Some("8"));
    assert_eq!(parsed(std::str::from_utf8(&delta.to_bytes().unwrap()).unwrap()), delta);
}

#[test]
fn descriptors_of_other_programs_are_parsed() {
    let hosted = parsed(HOSTED);
    assert_eq!(hosted.content, ContentId::new(0x7b_1234).unwrap());
    assert_eq!(hosted.sectors(), 4_194_304 + 2048 + 64);
    assert_eq!(hosted.extents[1].offset, 128);
    assert_eq!(hosted.extents[1].file.as_deref(), Some("a b-f002.vmdk"));
    assert_eq!((hosted.extents[2].kind, hosted.extents[2].access), (ExtentKind::Zero, Access::ReadOnly));
    let keys: Vec<String> = hosted.database.iter().map(|(key, _)| key.to_owned()).collect();
    assert_eq!(keys, ["ddb.virtualHWVersion", "ddb.geometry.cylinders", "ddb.toolsVersion"]);
    // Upper and lower case, blanks, a byte order mark, comments and lines with unknown keys.
    let loud = BASE
        .replace("version=1", "\u{feff}  # c\n \nVERSION = 3 \nfuture=\"x\"\nsomething else")
        .replace("# Disk DescriptorFile\n", "")
        .replace("createType", "CREATETYPE")
        .replace("RW 8", "rw   8");
    let loud = parsed(loud.trim_start());
    assert_eq!(loud.version, 3);
    assert_eq!(loud.extents, parsed(BASE).extents);
    for (name, kind) in [("2gbmaxextentflat", CreateType::TwoGbMaxExtentFlat), ("vmfsThin", CreateType::Vmfs)] {
        assert_eq!(parsed(&BASE.replace("\"vmfs\"", name)).create_type, kind);
    }
    let custom = parsed(&BASE.replace("\"vmfs\"", "\"partitionedDevice\""));
    assert_eq!(custom.create_type.name(), "partitionedDevice");
    let device = BASE.replace("VMFS \"web-flat.vmdk\"", "FLAT \"disk\" 63 1234-5678 t10.dev");
    assert!(String::from_utf8(parsed(&device).to_bytes().unwrap()).unwrap().contains("63 1234-5678 t10.dev\n"));
}

#[test]
fn ambiguous_descriptors_are_refused() {
    let cases = [
        ("", "does not begin with its version"),
        ("CID=1\nversion=1\n", "does not begin with its version"),
        (&BASE.replace("version=1", "version=5"), "version '5'"),
        (&BASE.replace("version=1", "version=1.0"), "version '1.0'"),
        (&BASE.replace("CID=fffffffe\n", "CID=fffffffe\nCID=00000001\n"), "remove the wrong line"),
        (&BASE.replace("CID=fffffffe\n", ""), "no CID line"),
        (&BASE.replace("CID=fffffffe", "CID=ffffffff"), "means that there is no content"),
        (&BASE.replace("CID=fffffffe", "CID=123456789"), "hexadecimal number"),
        (&BASE.replace("CID=fffffffe", "CID=+1"), "hexadecimal number"),
        (&BASE.replace("parentCID=ffffffff\n", ""), "no parentCID line"),
        (&BASE.replace("createType=\"vmfs\"\n", ""), "no createType line"),
        (&BASE.replace("createType=\"vmfs\"", "createType=\"\""), "createType is empty"),
        (&BASE.replace("=\"no\"", "=\"perhaps\""), "neither yes nor no"),
        (&BASE.replace("RW 83886080 VMFS", "RW 0 VMFS"), "size that no disk has"),
        (&BASE.replace("RW 83886080 VMFS", "RW 99999999999999999999 VMFS"), "no number of sectors"),
        (&BASE.replace("RW 83886080 VMFS", "RW -5 VMFS"), "no number of sectors"),
        (&BASE.replace("RW 83886080 VMFS", "RW VMFS"), "no number of sectors"),
        (&BASE.replace("RW 83886080 VMFS", "WO 83886080 VMFS"), "access of unknown kind"),
        (&BASE.replace("RW 83886080 VMFS", "RW 83886080 NEWKIND"), "unknown type 'NEWKIND'"),
        (&BASE.replace("\"web-flat.vmdk\"", ""), "names no file"),
        (&BASE.replace("\"web-flat.vmdk\"", "web-flat.vmdk"), "without quotes"),
        (&BASE.replace("\"web-flat.vmdk\"", "\"\" 0"), "empty or too long"),
        (&BASE.replace("\"web-flat.vmdk\"", "\"a\" 18446744073709551615"), "past the end of any file"),
        (&BASE.replace("\"web-flat.vmdk\"", "\"a\" x"), "offset that is no number"),
        (&BASE.replace("RW 83886080", "RW 137438953472\u{20}"), ""),
        (&BASE.replace("UTF-8", "no name\u{7}"), "no name of an encoding"),
        (&DELTA.replace("vm.vmdk", "v\"m.vmdk"), "holds a quote"),
        (&(BASE.to_owned() + "encryptionKeys=\"vmware:key/list/(pair/(x))\"\n"), "is encrypted by VMware"),
        (&(BASE.to_owned() + "ddb.iofilters = \"vmwarelwd,VMwareVMcrypt\"\n"), "is encrypted by VMware"),
    ];
    for (text, wanted) in cases {
        if wanted.is_empty() {
            assert_eq!(parsed(text).capacity(), crate::CAPACITY_MAX);
            continue;
        }
        let (kind, message) = refused(text);
        assert!(message.contains(wanted), "{message} / {wanted}");
        assert!(matches!(kind, ErrorKind::Corrupt | ErrorKind::Unsupported), "{message}");
    }
    parsed(&(BASE.to_owned() + "ddb.iofilters = \"vmwarelwd\"\n"));
    let twice = BASE.replace("RW 83886080", "RW 137438953472 VMFS \"a\"\nRW 1");
    assert!(refused(&twice).1.contains("64 TiB"));
}

#[test]
fn limits_of_descriptors_are_enforced() {
    let many = |count: usize| BASE.replace("RW 83886080 VMFS", &"RW 1 ZERO\n".repeat(count)).replace("\"web-", "# \"");
    assert_eq!(parsed(&many(EXTENTS_MAX)).extents.len(), EXTENTS_MAX);
    assert!(refused(&many(EXTENTS_MAX + 1)).1.contains("8192 extents"));
    let entries = |count: usize| format!("{BASE}{}", "ddb.x=\"y\"\n".repeat(count));
    let own = parsed(BASE).database.iter().count();
    assert_eq!(parsed(&entries(DATABASE_MAX - own)).database.iter().count(), DATABASE_MAX);
    assert!(refused(&entries(DATABASE_MAX)).1.contains("4096 ddb entries"));
    assert!(refused(&format!("{BASE}{}", "x".repeat(LINE_MAX + 1))).1.contains("line of more than"));
    assert!(refused(&format!("{BASE}{}", "# comment\n".repeat(TEXT_MAX / 10))).1.contains("longer than"));
    let long_name = BASE.replace("web-flat", &"n".repeat(PATH_MAX));
    assert!(refused(&long_name).1.contains("empty or too long"));
}

#[test]
fn worst_case_descriptors_are_parsed_in_bounded_time() {
    let begin = Instant::now();
    let head = b"version=1\nencoding=\"GBK\"\nCID=1\nparentCID=ffffffff\ncreateType=\"vmfs\"\n".to_vec();
    for filler in
        [&b"=\n"[..], b"\n", b"#\n", b"RW ", b"ddb.=\n", b"a=b\n", b"\"", b" ", b"CID=1\n", b"\xff", b"RW 1\t\n"]
    {
        let mut text = head.clone();
        text.extend(filler.iter().copied().cycle().take(TEXT_MAX - head.len()));
        let _ = Descriptor::parse(&text);
        text.resize(8 * TEXT_MAX, b'x');
        assert!(Descriptor::parse(&text).is_err());
    }
    // Twenty-two texts of a megabyte and more; a quadratic pass over one of them would take minutes.
    assert!(begin.elapsed() < Duration::from_secs(20), "{:?}", begin.elapsed());
}

#[test]
fn mutated_descriptors_fail_or_are_encoded_unchanged() {
    let begin = Instant::now();
    let mut random = Random(0xd15c);
    let seeds = [BASE, DELTA, HOSTED];
    let words: Vec<&[u8]> = vec![
        b"RW",
        b"RDONLY",
        b"FLAT",
        b"ZERO",
        b"\"",
        b"=",
        b"\n",
        b"ddb.",
        b"CID=",
        b"parentCID=",
        b"ffffffff",
        b"\0",
        b"4294967296",
        b"18446744073709551616",
        b"createType=\"",
        b"encoding=\"windows-1252\"\n",
        b"encoding=\"Big5\"\n",
        b"\xe4\xf6\x80",
        b"\r",
        b"../../etc/passwd",
        b"isNativeSnapshot=\"yes\"\n",
        b"changeTrackPath=\"c-ctk.vmdk\"\n",
        b"#",
        b" ",
        b"version=2\n",
    ];
    let (mut good, mut bad) = (0, 0);
    for round in 0..100_000 {
        let mut text = seeds[(round % 3) as usize].as_bytes().to_vec();
        for _ in 0..=random.below(4) {
            let at = random.below(text.len() as u64 + 1) as usize;
            match random.below(7) {
                0 if at < text.len() => text[at] ^= 1 << random.below(8),
                1 if at < text.len() => text[at] = random.next() as u8,
                2 => text.truncate(at),
                3 => {
                    let end = (at + random.below(24) as usize).min(text.len());
                    text.drain(at..end);
                }
                4 => {
                    let end = (at + random.below(64) as usize).min(text.len());
                    let part = text[at..end].to_vec();
                    let to = random.below(text.len() as u64 + 1) as usize;
                    text.splice(to..to, part);
                }
                _ => {
                    let word = words[random.below(words.len() as u64) as usize];
                    text.splice(at..at, word.iter().copied());
                }
            }
        }
        match Descriptor::parse(&text) {
            Ok(descriptor) => {
                good += 1;
                let again = descriptor.to_bytes().expect("a parsed descriptor can be written");
                assert_eq!(Descriptor::parse(&again).unwrap(), descriptor, "round {round}: {}", again.escape_ascii());
                let padded = descriptor.to_embedded_bytes(again.len() + 700).unwrap();
                assert_eq!(Descriptor::parse(&padded).unwrap(), descriptor);
            }
            Err(error) => {
                bad += 1;
                let message = error.to_string();
                assert!(message.len() < 1000 && !message.contains(char::is_control), "{message}");
            }
        }
    }
    assert!(good > 10_000 && bad > 10_000, "{good} valid, {bad} invalid: too few of either");
    assert!(begin.elapsed() < Duration::from_secs(60), "{:?}", begin.elapsed());
}

#[test]
fn names_are_decoded_and_other_text_stays_as_bytes() {
    let latin = |name: &[u8], encoding: &str| {
        let text = BASE.replace("UTF-8", encoding);
        let (before, after) = text.split_once("web-flat").unwrap();
        let mut bytes = [before.as_bytes(), name, after.as_bytes()].concat();
        bytes.extend_from_slice(b"ddb.comment = \"\xb2\xe2\xca\xd4\"\n");
        bytes
    };
    let western = latin(b"caf\xe9\x80\x81", "windows-1252");
    let descriptor = Descriptor::parse(&western).unwrap();
    assert_eq!(descriptor.extents[0].file.as_deref(), Some("café€\u{81}.vmdk"));
    assert_eq!(descriptor.to_bytes().unwrap(), western);
    // ASCII is the same in all encodings. Other names are refused; other values are passed through.
    let chinese = latin(b"web-flat", "GBK");
    assert_eq!(Descriptor::parse(&chinese).unwrap().to_bytes().unwrap(), chinese);
    for encoding in ["GBK", "Big5", "Shift_JIS"] {
        let error = Descriptor::parse(&latin(b"\xb2\xe2", encoding)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.to_string().contains(encoding) && error.to_string().contains("'\\xb2\\xe2.vmdk'"), "{error}");
    }
    assert_eq!(Descriptor::parse(&latin(b"\xb2\xe2", "UTF-8")).unwrap_err().kind(), ErrorKind::Invalid);
    let mut descriptor = Descriptor::parse(&western).unwrap();
    descriptor.extents[0].file = Some("測試.vmdk".to_owned());
    assert!(descriptor.to_bytes().unwrap_err().to_string().contains("cannot be written in windows-1252"));
    for byte in 0..=255u8 {
        let text = Encoding::Windows1252.decode(&[byte], "a byte").unwrap();
        assert_eq!(*Encoding::Windows1252.encode(&text).unwrap(), [byte]);
    }
}

#[test]
fn names_with_quotes_or_line_ends_are_not_written() {
    for bad in ["", "a\nRW 1 ZERO", "a\"b", "a\0b"] {
        let mut descriptor = parsed(DELTA);
        descriptor.extents[0].file = Some(bad.to_owned());
        assert_eq!(descriptor.to_bytes().unwrap_err().kind(), ErrorKind::Invalid);
        let mut descriptor = parsed(DELTA);
        descriptor.parent_hint = Some(bad.to_owned());
        assert_eq!(descriptor.to_bytes().unwrap_err().kind(), ErrorKind::Invalid);
    }
    let mut descriptor = parsed(BASE);
    descriptor.database.set("ddb.\"x\n", "1\n\"2");
    assert_eq!(parsed(std::str::from_utf8(&descriptor.to_bytes().unwrap()).unwrap()).database.get("ddb.x"), Some("12"));
    descriptor.extents.clear();
    descriptor.extents.push(ExtentLine::whole(ExtentKind::Flat, 0, "x"));
    assert!(descriptor.to_bytes().is_err());
}

#[test]
fn a_new_content_id_ends_change_tracking_and_updates_both_places() {
    let mut random = Random(7);
    let tracked = BASE.replace("version=1", "version=3").replace(
        "\n# The Disk Data Base",
        "\n# Change Tracking File\nchangeTrackPath=\"web-ctk.vmdk\"\n\n# The Disk Data Base",
    );
    let mut descriptor = parsed(&tracked);
    assert_eq!(descriptor.to_bytes().unwrap(), tracked.as_bytes());
    let mut seen = std::collections::BTreeSet::new();
    for _ in 0..100 {
        descriptor.renew_content(&mut || random.next());
        assert!(seen.insert(descriptor.content) && descriptor.content != ContentId::INITIAL);
        let long = descriptor.database.get("ddb.longContentID").unwrap();
        assert!(long.len() == 32 && long.ends_with(&descriptor.content.to_string()));
    }
    assert_eq!((descriptor.version, descriptor.change_tracking), (1, None));
    for stuck in [0, u64::MAX, 0xffff_fffe, 0x1_0000_0001] {
        let content = ContentId::random(&mut || stuck);
        assert!(!matches!(content.number(), 0 | 0xffff_fffe | 0xffff_ffff));
    }
}

#[test]
fn the_geometry_equals_that_of_vmware() {
    let of = |adapter, sectors| {
        let geometry = Geometry::of(adapter, sectors);
        (geometry.cylinders, geometry.heads, geometry.sectors)
    };
    assert_eq!(of(Adapter::LsiLogic, 4096), (2, 64, 32));
    assert_eq!(of(Adapter::LsiLogic, 83_886_080), (5221, 255, 63));
    assert_eq!(of(Adapter::BusLogic, 3 << 20), (768, 128, 32));
    assert_eq!(of(Adapter::Ide, 4_194_304), (4161, 16, 63));
    assert_eq!(of(Adapter::Ide, u64::MAX).0, 16_383);
    assert_eq!(of(Adapter::LsiLogic, 62 << 31).0, 65_535);
}

#[test]
fn uuids_have_the_textual_form_of_vmware() {
    let text = "60 00 C2 9a 1d 7b 49 44-dc 53 e6 d3 e5 89 7b 0d";
    assert_eq!(Uuid::parse(text).unwrap().to_string(), text);
    assert_eq!(Uuid::parse(&text.to_lowercase()).unwrap().to_string(), text);
    for bad in ["", "60", &text[1..], &format!("{text} 00"), &text.replace("dc", "+c")] {
        assert_eq!(Uuid::parse(bad), None);
    }
    let mut random = Random(3);
    let made = Uuid::random(&mut || random.next()).to_string();
    assert!(made.starts_with("60 00 C2 9"), "{made}");
    assert_eq!(Uuid::parse(&made).unwrap().to_string(), made);
}

fn write_plain(directory: &dyn Directory, name: &str, bytes: &[u8]) {
    let file = directory.create(name, IoMode::Buffered).unwrap();
    file.write_at(&[bytes], 0, false).unwrap();
    file.sync().unwrap();
    directory.sync().unwrap();
}

fn load_named(directory: &dyn Directory, name: &str) -> Result<Descriptor> {
    let file = directory.open_foreign(name, IoMode::Buffered, FileAccess::Read).map_err(|e| Error::io("open", e))?;
    storage::load(&*file, name)
}

#[test]
fn a_power_cut_leaves_the_old_descriptor_or_the_new_one() {
    let (old, mut new) = (parsed(BASE), parsed(BASE));
    let mut outcomes = [0, 0];
    for seed in 0..40 {
        let mut random = Random(seed);
        new.renew_content(&mut || random.next());
        for cut in 0.. {
            let disk = SimulatedDisk::new(seed * 1000 + cut, SimulatedOptions::default());
            write_plain(&*disk.directory(), "web.vmdk", BASE.as_bytes());
            disk.cut_after(disk.operations() + cut);
            let finished = storage::replace(&*disk.directory(), "web.vmdk", &new).is_ok();
            for _ in 0..4 {
                let after = disk.crash();
                let found = load_named(&*after.directory(), "web.vmdk").unwrap();
                assert!(found == old || found == new, "seed {seed} cut {cut}");
                assert!(
                    !finished || found == new,
                    "seed {seed} cut {cut}: the old descriptor after a completed replacement"
                );
                outcomes[usize::from(found == new)] += 1;
                // Whichever text survived, a sweep removes all other files, and the next replacement succeeds.
                storage::sweep(&*after.directory()).unwrap();
                assert_eq!(after.directory().list().unwrap(), ["web.vmdk"]);
                storage::replace(&*disk.crash().directory(), "web.vmdk", &old).unwrap();
            }
            if finished {
                break;
            }
        }
    }
    assert!(outcomes[0] > 100 && outcomes[1] > 100, "{outcomes:?}: too few cuts left the old or the new descriptor");
}

#[test]
fn a_failed_replacement_leaves_the_old_descriptor() {
    let mut new = parsed(BASE);
    new.set_thin(false);
    for number in 0..5 {
        let disk = SimulatedDisk::new(number, SimulatedOptions::default());
        let directory = disk.directory();
        write_plain(&*directory, "web.vmdk", BASE.as_bytes());
        disk.fail_operation(disk.operations() + number);
        let outcome = storage::replace(&*directory, "web.vmdk", &new);
        let found = load_named(&*directory, "web.vmdk").unwrap();
        assert!(found == if outcome.is_ok() { new.clone() } else { parsed(BASE) } || number == 4);
        storage::sweep(&*directory).unwrap();
        assert_eq!(directory.list().unwrap(), ["web.vmdk"]);
    }
}

#[test]
fn sweeping_removes_unfinished_disks_and_nothing_else() {
    let disk = SimulatedDisk::new(1, SimulatedOptions::default());
    let directory = disk.directory();
    let with = |files: &[&str]| {
        let extents = files.iter().map(|file| ExtentLine::whole(ExtentKind::Flat, 8, *file)).collect();
        Descriptor::base(CreateType::TwoGbMaxExtentFlat, extents).to_bytes().unwrap()
    };
    // Four disks: a finished one, one being created, one with a text that names files of another disk, and one with a
    // descriptor that was being replaced at the crash.
    write_plain(&*directory, "done.vmdk", &with(&["done-flat.vmdk"]));
    write_plain(&*directory, "new.vmdk.lamina-new", &with(&["new-flat.vmdk", "new-f001.vmdk", "new-s0002.vmdk"]));
    let claims =
        ["done-flat.vmdk", "evil.vmdk", "evil-flat-flat.vmdk", "evil-x001.vmdk", "passwd", "../evil-flat.vmdk"];
    write_plain(&*directory, "evil.vmdk.lamina-new", &with(&claims));
    write_plain(&*directory, "done.vmdk.lamina-new", &with(&["done-flat.vmdk"]));
    write_plain(&*directory, "torn.vmdk.lamina-new", b"version=");
    write_plain(&*directory, "disk.img.lamina-new", &[0; 512]);
    let kept = ["done-flat.vmdk", "evil-flat-flat.vmdk", "evil-x001.vmdk", "evil.vmdk", "passwd", "torn-flat.vmdk"];
    for name in kept.iter().chain(&["new-flat.vmdk", "new-f001.vmdk", "new-s0002.vmdk"]) {
        write_plain(&*directory, name, b"x");
    }
    let removed = storage::sweep(&*directory).unwrap();
    assert_eq!(removed.len(), 8, "{removed:?}");
    let mut left = kept.to_vec();
    left.push("done.vmdk");
    left.sort_unstable();
    assert_eq!(directory.list().unwrap(), left);
}

#[test]
fn creating_refuses_existing_and_invalid_names() {
    let disk = SimulatedDisk::new(1, SimulatedOptions::default());
    let directory = disk.directory();
    let descriptor = parsed(BASE);
    let pending = Pending::begin(&*directory, "a.vmdk", &descriptor).unwrap();
    assert_eq!(Pending::begin(&*directory, "a.vmdk", &descriptor).err().unwrap().kind(), ErrorKind::Exists);
    pending.commit().unwrap();
    assert_eq!(Pending::begin(&*directory, "a.vmdk", &descriptor).err().unwrap().kind(), ErrorKind::Exists);
    Pending::begin(&*directory, "b.vmdk", &descriptor).unwrap().abandon();
    assert_eq!(directory.list().unwrap(), ["a.vmdk"]);
    assert!(!format!("a.vmdk{NEW_SUFFIX}").ends_with(".vmdk"));
    for bad in ["", ".vmdk", "a", "a/b.vmdk", "a\\b.vmdk", "a\nb.vmdk", "a\"b.vmdk", "-a.vmdk", "..vmdk"] {
        assert_eq!(storage::check_name(bad).unwrap_err().kind(), ErrorKind::Invalid, "{bad}");
    }
    assert!(storage::check_name(&format!("{}.vmdk", "n".repeat(storage::NAME_MAX + 1))).is_err());
}

/// A hosted sparse extent with only the fields that locate its descriptor.
fn embedded(text: &[u8], start: u64, sectors: u64) -> Vec<u8> {
    let mut bytes = vec![0; 64 * 512];
    bytes[..4].copy_from_slice(b"KDMV");
    bytes[28..36].copy_from_slice(&start.to_le_bytes());
    bytes[36..44].copy_from_slice(&sectors.to_le_bytes());
    bytes[512..512 + text.len()].copy_from_slice(text);
    bytes
}

#[test]
fn embedded_descriptors_are_found_and_rewritten_in_place() {
    let disk = SimulatedDisk::new(1, SimulatedOptions::default());
    let directory = disk.directory();
    let mut random = Random(11);
    for (index, text) in [BASE, DELTA, HOSTED].into_iter().enumerate() {
        let name = format!("{index}");
        write_plain(&*directory, &name, &embedded(text.as_bytes(), 1, 20));
        let file = directory.open(&name, IoMode::Buffered).unwrap();
        let (place, descriptor) = storage::load_embedded(&*file).unwrap().unwrap();
        assert_eq!((place.clone(), &descriptor), (512..21 * 512, &parsed(text)));
        for _ in 0..50 {
            let before = storage::load_embedded(&*file).unwrap().unwrap().1;
            let renewed = storage::renew_embedded(&*file, place.clone(), &mut || random.next()).unwrap();
            assert_ne!(renewed.content, before.content);
            assert_eq!(storage::load_embedded(&*file).unwrap().unwrap().1, renewed);
            // Only the digits have changed.
            let mut same = renewed.clone();
            same.content = descriptor.content;
            if let Some(long) = descriptor.database.get("ddb.longContentID") {
                assert!(renewed.database.get("ddb.longContentID").unwrap().ends_with(&renewed.content.to_string()));
                same.database.set("ddb.longContentID", long);
            }
            assert_eq!(same, descriptor);
        }
        let mut changed = descriptor.clone();
        changed.parent_content = ContentId::new(5);
        storage::write_embedded(&*file, place.clone(), &changed).unwrap();
        assert_eq!(storage::load_embedded(&*file).unwrap().unwrap().1, changed);
        assert_eq!(storage::write_embedded(&*file, 512..600, &changed).unwrap_err().kind(), ErrorKind::NoSpace);
    }
}

#[test]
fn offsets_of_embedded_descriptors_are_checked() {
    let disk = SimulatedDisk::new(1, SimulatedOptions::default());
    let directory = disk.directory();
    let cases = [(1, 0), (0, 20), (1, 64), (64, 1), (u64::MAX, 1), (1, u64::MAX), (u64::MAX / 512, 2), (1 << 55, 1)];
    for (index, (start, sectors)) in cases.into_iter().enumerate() {
        let name = format!("{index}");
        write_plain(&*directory, &name, &embedded(BASE.as_bytes(), start, sectors));
        let file = directory.open(&name, IoMode::Buffered).unwrap();
        match storage::load_embedded(&*file) {
            Ok(None) => assert!(start == 0 || sectors == 0),
            Ok(Some(_)) => panic!("{start} {sectors}"),
            Err(error) => assert_eq!(error.kind(), ErrorKind::Corrupt),
        }
    }
    write_plain(&*directory, "empty", &embedded(b"", 1, 20));
    assert!(storage::load_embedded(&*directory.open("empty", IoMode::Buffered).unwrap()).unwrap().is_none());
    write_plain(&*directory, "other", b"COWD");
    assert!(storage::load_embedded(&*directory.open("other", IoMode::Buffered).unwrap()).is_err());
}
