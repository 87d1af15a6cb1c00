//! Refused conversions leave no file.

use super::*;

/// Runs a conversion that must fail, and checks that it leaves no file.
fn refused(conversion: &Conversion, kind: ErrorKind, words: &str) -> Error {
    let Address::Path(to) = &conversion.to else { panic!("a path") };
    let before = names(to.parent().unwrap());
    let error = conversion.run(None, &NoProgress).err().unwrap();
    assert!(error.kind() == kind && error.to_string().contains(words), "{:?}: {error}", error.kind());
    assert_eq!(names(to.parent().unwrap()), before, "{error}");
    error
}

#[test]
fn a_changed_parent_is_refused_unless_forced() {
    let outer = folder();
    let path = outer.path();
    let levels = make_chain(path, ImageKind::Thin, ImageKind::VmfsSparse, 2, 9);
    // Writes directly to the base, which changes its content ID.
    let options = layer::image::OpenOptions { writable: true, ..Default::default() };
    let opened = open_chain(Place::local(&levels[0].0, &[]).unwrap(), &options).unwrap();
    opened.images()[0].layer().write(0, &[&[0x11; 4096]]).unwrap();
    opened.images()[0].layer().close().unwrap();
    drop(opened);
    let mut conversion = conversion(&levels[2].0, &path.join("out.vmdk"), TargetFormat::Image(ImageKind::Thin));
    refused(&conversion, ErrorKind::Corrupt, "changed");
    let info = images::show(&levels[2].0, &ImageOptions::default()).unwrap();
    assert!(info.levels.len() == 1 && info.problem.unwrap().contains("changed"));
    let check = images::check(&levels[2].0, &ImageOptions::default(), false, &NoProgress).unwrap();
    assert_eq!(check.problems, 1, "{check:?}");
    conversion.options.force_parent = true;
    let converted = conversion.run(None, &NoProgress).unwrap();
    assert_eq!(converted.warnings.len(), 1);
}

#[test]
fn paths_do_not_escape() {
    let outer = folder();
    let path = outer.path();
    let (own, other) = (path.join("own"), path.join("other"));
    std::fs::create_dir(&own).unwrap();
    std::fs::create_dir(&other).unwrap();
    let levels = make_chain(&other, ImageKind::Thin, ImageKind::SeSparse, 1, 4);
    // A child in another folder names its parent by an absolute path.
    let child = NewImage {
        path: own.join("child.vmdk"),
        capacity: None,
        format: "sesparse".into(),
        parent: Some(levels[1].0.clone()),
        adapter: None,
    };
    let allowed = ImageOptions { permitted: vec![other.clone()], ..ImageOptions::default() };
    images::create(&child, &allowed, &NoProgress).unwrap();
    let mut escape = conversion(&child.path, &own.join("out.vmdk"), TargetFormat::Image(ImageKind::Thin));
    let error = refused(&escape, ErrorKind::Invalid, "outside its folder");
    assert!(error.to_string().contains(other.canonicalize().unwrap().to_str().unwrap()), "{error}");
    escape.options = allowed;
    escape.run(None, &NoProgress).unwrap();
    assert!(content(&own.join("out.vmdk"), None) == levels[1].1);
    // Extents in another folder are refused as well.
    let text = "# Disk DescriptorFile\nversion=1\nCID=1\nparentCID=ffffffff\ncreateType=\"vmfs\"\n\
                RW 8 VMFS \"../other/vm-flat.vmdk\"\n";
    std::fs::write(own.join("evil.vmdk"), text).unwrap();
    let evil = conversion(&own.join("evil.vmdk"), &own.join("out.raw"), TargetFormat::Image(ImageKind::Raw));
    refused(&evil, ErrorKind::Invalid, "outside its folder");
}

#[test]
fn an_extent_without_descriptor_is_opened_if_its_format_is_given() {
    let outer = folder();
    let path = outer.path();
    let mut model = vec![0; ODD as usize];
    scribble(&mut model, &mut Random(9), |_, _| {});
    std::fs::write(path.join("a.raw"), &model).unwrap();
    let kinds = [
        (ImageKind::VmfsSparse, "-delta", SourceFormat::VmfsSparse),
        (ImageKind::SeSparse, "-sesparse", SourceFormat::SeSparse),
        (ImageKind::VsanSparse, "-vsan", SourceFormat::VsanSparse),
        (ImageKind::SplitSparse, "-s001", SourceFormat::MonolithicSparse),
    ];
    for (kind, tail, format) in kinds {
        let descriptor = path.join(format!("{kind}.vmdk"));
        convert(&path.join("a.raw"), &descriptor, TargetFormat::Image(kind)).unwrap();
        std::fs::remove_file(&descriptor).unwrap();
        let extent = path.join(format!("{kind}{tail}.vmdk"));
        let mut conversion =
            conversion(&extent, &path.join(format!("{kind}.raw")), TargetFormat::Image(ImageKind::Raw));
        refused(&conversion, ErrorKind::Invalid, &format!("--from {format}"));
        conversion.options.format = Some(format);
        conversion.run(None, &NoProgress).unwrap();
        assert!(std::fs::read(path.join(format!("{kind}.raw"))).unwrap() == model, "{kind}");
    }
}

#[test]
fn file_names_may_end_in_vmdk_in_capitals() {
    let outer = folder();
    let path = outer.path();
    std::fs::write(path.join("a.raw"), vec![7; MIB as usize]).unwrap();
    for kind in [ImageKind::Thin, ImageKind::MonolithicSparse] {
        let image = path.join(format!("{kind}.VMDK"));
        convert(&path.join("a.raw"), &image, TargetFormat::Image(kind)).unwrap();
        assert!(content(&image, None) == vec![7; MIB as usize], "{kind}");
    }
}

#[test]
fn a_dirty_journal_is_refused_unless_replayed() {
    let outer = folder();
    let path = outer.path();
    let mut model = vec![0; ODD as usize];
    scribble(&mut model, &mut Random(3), |_, _| {});
    std::fs::write(path.join("a.raw"), &model).unwrap();
    let image = path.join("vm.vmdk");
    convert(&path.join("a.raw"), &image, TargetFormat::Image(ImageKind::SeSparse)).unwrap();
    // An image in the state that a crash of ESXi leaves: marked as dirty, with one journal transaction that is applied
    // already.
    let extent = path.join("vm-sesparse.vmdk");
    let mut bytes = std::fs::read(&extent).unwrap();
    const TABLE: u64 = 6144;
    let words = [0x00c0_ffee, 1, 0, 2, 0x1234, 7, u64::MAX, 99];
    let slot = 2048 * 512;
    for (index, word) in words.iter().enumerate() {
        bytes[slot + index * 8..][..8].copy_from_slice(&u64::to_le_bytes(*word));
    }
    bytes[slot + 128..][..8].copy_from_slice(&TABLE.to_le_bytes());
    bytes[slot + 136..][..8].copy_from_slice(&1u64.to_le_bytes());
    let sector = bytes[TABLE as usize * 512..][..512].to_vec();
    bytes[slot + 512..][..512].copy_from_slice(&sector);
    bytes[512 + 16..][..8].copy_from_slice(&7u64.to_le_bytes());
    bytes[512 + 24..][..8].copy_from_slice(&1u64.to_le_bytes());
    std::fs::write(&extent, &bytes).unwrap();

    let mut conversion = conversion(&image, &path.join("out.vmdk"), TargetFormat::Image(ImageKind::VmfsSparse));
    let error = refused(&conversion, conversion.run(None, &NoProgress).err().unwrap().kind(), "journal");
    assert!(images::show(&image, &ImageOptions::default()).is_err());
    assert!(matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::Busy | ErrorKind::Unsupported | ErrorKind::Invalid));
    conversion.options.replay_journal = true;
    conversion.run(None, &NoProgress).unwrap();
    assert!(content(&path.join("out.vmdk"), None) == model);
    // Reading the image has not changed it.
    assert!(std::fs::read(&extent).unwrap() == bytes);
}

#[test]
fn an_existing_target_is_not_overwritten() {
    let outer = folder();
    let path = outer.path();
    std::fs::write(path.join("a.raw"), vec![7; MIB as usize]).unwrap();
    let from = path.join("a.raw");
    for format in TargetFormat::all().filter(|format| *format != TargetFormat::Native) {
        let to = path.join(file_of(format, "there"));
        std::fs::write(&to, "mine").unwrap();
        refused(&conversion(&from, &to, format), ErrorKind::Exists, "there");
        assert_eq!(std::fs::read(&to).unwrap(), b"mine");
        std::fs::remove_file(&to).unwrap();
    }
    // An existing extent file is not overwritten, because another descriptor may name it.
    std::fs::write(path.join("vm-flat.vmdk"), "mine").unwrap();
    refused(&conversion(&from, &path.join("vm.vmdk"), TargetFormat::Image(ImageKind::Thin)), ErrorKind::Exists, "vm");
    assert_eq!(std::fs::read(path.join("vm-flat.vmdk")).unwrap(), b"mine");
    for (to, format, kind) in [
        ("no/such/folder.vmdk", TargetFormat::Image(ImageKind::Thin), ErrorKind::NotFound),
        ("name", TargetFormat::Image(ImageKind::Thin), ErrorKind::Invalid),
        ("name.vmdk", TargetFormat::Ova, ErrorKind::Invalid),
        ("name.vmdk", TargetFormat::Native, ErrorKind::Invalid),
    ] {
        let before = names(path);
        let error = convert(&from, &path.join(to), format).err().unwrap();
        assert_eq!(error.kind(), kind, "{error}");
        assert_eq!(names(path), before);
    }
    let missing = conversion(&path.join("none.vmdk"), &path.join("x.vmdk"), TargetFormat::Image(ImageKind::Thin));
    refused(&missing, ErrorKind::NotFound, "none");
}

#[test]
fn archives_are_checked() {
    let outer = folder();
    let path = outer.path();
    let mut model = vec![0; ODD as usize];
    scribble(&mut model, &mut Random(3), |_, _| {});
    std::fs::write(path.join("a.raw"), &model).unwrap();
    let ova = path.join("vm.ova");
    convert(&path.join("a.raw"), &ova, TargetFormat::Ova).unwrap();
    let mut options = ImageOptions { member: Some("vm-disk1.vmdk".into()), ..ImageOptions::default() };
    assert_eq!(images::show(&ova, &options).unwrap().levels[0].format, "streamoptimized");
    options.member = Some("other.vmdk".into());
    assert!(images::show(&ova, &options).err().unwrap().to_string().contains("vm-disk1.vmdk"));
    // Changes one byte of the disk in the archive.
    let mut bytes = std::fs::read(&ova).unwrap();
    let at = bytes.len() / 2;
    bytes[at] ^= 1;
    std::fs::write(&ova, bytes).unwrap();
    refused(
        &conversion(&ova, &path.join("x.vmdk"), TargetFormat::Image(ImageKind::Thin)),
        ErrorKind::Corrupt,
        "SHA256",
    );
}
