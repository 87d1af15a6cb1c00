//! Invalid archives: wrong digests, sizes, XML that is expensive to parse, and mutations.

use super::*;
use crate::proving::{damages, memory_since, mutate, peak_memory};

#[test]
fn the_error_for_a_member_says_what_is_wrong_with_its_name() {
    for (name, why) in [
        ("a\u{1b}[2J.vmdk", "it contains control characters"),
        ("../a.vmdk", "it would lead out of the archive"),
        (&*"a".repeat(256), "it has 256 bytes, at most 255 are allowed"),
    ] {
        let error = archive::plain_name(name).unwrap_err().to_string();
        assert!(error.ends_with(&format!("is no plain file name: {why}")) && !error.contains('\u{1b}'), "{error}");
    }
    assert_eq!(archive::plain_name("a.vmdk").unwrap(), "a.vmdk");
}

#[test]
fn a_wrong_byte_is_found_and_its_grain_reported() {
    let bytes = made(&[compressible(1, 1 << 20), pattern(2, 1 << 20)], Algorithm::Sha256, Controller::Ide);
    let ova = Ova::open(memory_file(&bytes), "web.ova").unwrap();
    let place =
        |name: &str| bytes.windows(512).position(|w| w.starts_with(name.as_bytes()) && w[257..].starts_with(b"ustar"));
    let mut damaged = bytes.clone();
    damaged[place("web-disk2.vmdk").unwrap() + 512 + 100_000] ^= 1;
    let ova_damaged = Ova::open(memory_file(&damaged), "web.ova").unwrap();
    let error = ova_damaged.verify(&mut no_progress).unwrap_err();
    assert!(error.kind() == ErrorKind::Corrupt && error.to_string().contains("web-disk2.vmdk is not what"), "{error}");
    let mut out = Vec::new();
    let error = ova_damaged.reader("web-disk2.vmdk").unwrap().read_to_end(&mut out).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    assert!(ova_damaged.reader("web-disk1.vmdk").unwrap().read_to_end(&mut out).is_ok());
    // The digest of the descriptor is checked when the archive is opened.
    let mut damaged = bytes.clone();
    let at = damaged.windows(11).position(|w| w == b"Hard disk 1").unwrap();
    damaged[at] = b'h';
    let error = Ova::open(memory_file(&damaged), "web.ova").err().unwrap();
    assert!(error.to_string().contains("web.ovf is not what"), "{error}");
    // An archive truncated in the middle of a disk.
    let cut = Ova::open(memory_file(&bytes[..bytes.len() - 2000]), "web.ova").err().unwrap();
    assert!(cut.to_string().contains("the archive is truncated"), "{cut}");
    assert_eq!(ova.file("web.exe").err().unwrap().kind(), ErrorKind::NotFound);
}

#[test]
fn descriptors_that_take_long_to_parse_are_refused_early() {
    let start = std::time::Instant::now();
    let envelope = |inside: &str| format!("<Envelope>{inside}</Envelope>");
    let attributes: String = (0..200_000).map(|number| format!(" a{number}='>'")).collect();
    let cases = [
        envelope(&"<a>".repeat(1_000_000)),
        envelope(&("<a>".repeat(200_000) + &"</a>".repeat(200_000))),
        envelope(&format!("<a{attributes}/>")),
        "<!DOCTYPE a [<!ENTITY b \"bbbb\"><!ENTITY c \"&b;&b;&b;\">]><Envelope>&c;</Envelope>".to_owned(),
        envelope("<VirtualSystem><Name>&c;</Name></VirtualSystem>"),
        envelope("<Disk>") + "</Disk>",
        String::new(),
        "<Envelope/><Envelope/>".to_owned(),
        "<Package/>".to_owned(),
    ];
    for case in cases {
        let error = Description::read(case.as_bytes(), "web.ovf").err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    }
    let wide = envelope(&"<a b='c'/>".repeat(400_000));
    Description::read(wide.as_bytes(), "web.ovf").unwrap();
    assert!(start.elapsed().as_secs() < 20, "{:?}", start.elapsed());
}

#[test]
fn ovf_capacities_are_parsed_or_refused() {
    let capacity = |attributes: &str| {
        let text = format!(
            "<Envelope><References><File href='d.vmdk' id='f'/></References><DiskSection>\
             <Disk diskId='d' fileRef='f' {attributes}/></DiskSection></Envelope>"
        );
        Description::read(text.as_bytes(), "web.ovf").map(|description| description.disks[0].capacity)
    };
    for (attributes, expected) in [
        ("capacity='512'", 512),
        ("capacity='1000'", 1024),
        ("capacity='2' capacityAllocationUnits='byte * 2^30'", 2 << 30),
        ("capacity='2' capacityAllocationUnits='byte*2^10'", 2048),
        ("capacity='7' capacityAllocationUnits='GigaBytes'", 7 << 30),
        ("capacity='64' capacityAllocationUnits='byte * 2^40'", 64 << 40),
    ] {
        assert_eq!(capacity(attributes).unwrap(), expected, "{attributes}");
    }
    for attributes in [
        "",
        "capacity=''",
        "capacity='0'",
        "capacity='-1'",
        "capacity='65' capacityAllocationUnits='byte * 2^40'",
        "capacity='2' capacityAllocationUnits='byte * 2^64'",
        "capacity='2' capacityAllocationUnits='byte * 9^999999999'",
        "capacity='2' capacityAllocationUnits='furlong'",
        "capacity='18446744073709551615' capacityAllocationUnits='byte * 2^1'",
    ] {
        assert_eq!(capacity(attributes).unwrap_err().kind(), ErrorKind::Corrupt, "{attributes}");
    }
    assert_eq!(capacity("capacity='${size}'").unwrap_err().kind(), ErrorKind::Unsupported);
}

#[test]
fn manifests_of_other_programs_are_parsed() {
    let digest = "00".repeat(20);
    let good = format!("SHA1(a (1).vmdk)= {digest}\r\n\nsha1 (./b.ovf) ={digest}\n");
    let manifest = Manifest::parse(good.as_bytes()).unwrap();
    assert_eq!(manifest.names().collect::<Vec<_>>(), ["a (1).vmdk", "b.ovf"]);
    for (bad, kind) in [
        (format!("SHA1(a)= {}", &digest[1..]), ErrorKind::Corrupt),
        (format!("SHA256(a)= {digest}"), ErrorKind::Corrupt),
        (format!("MD5(a)= {digest}"), ErrorKind::Unsupported),
        (format!("SHA1(../a)= {digest}"), ErrorKind::Invalid),
        (format!("SHA1(a)= {digest}\nSHA1(a)= {digest}"), ErrorKind::Corrupt),
        ("hello".to_owned(), ErrorKind::Corrupt),
        ("\u{0}SHA1(a= é".to_owned(), ErrorKind::Corrupt),
    ] {
        assert_eq!(Manifest::parse(bad.as_bytes()).err().unwrap().kind(), kind, "{bad}");
    }
}

#[test]
fn mutated_images_cause_errors_and_no_panic() {
    let image = made(&[compressible(1, 40_000 / 512 * 512), vec![3; 4096]], Algorithm::Sha1, Controller::Ide);
    let text = 512..4096;
    let weak = [0..512, 0..512, text.clone(), text, 0..image.len()];
    let start = std::time::Instant::now();
    let memory = peak_memory();
    for seed in damages() {
        let mut random = Random::new(seed);
        let mut bytes = image.clone();
        mutate(&mut random, &mut bytes, &weak);
        if random.percent(50) {
            // The header gets the right checksum, so that it is accepted. If the name of the manifest is changed, the
            // OVF is read without a digest.
            let sum: u32 = bytes
                .iter()
                .take(512)
                .enumerate()
                .map(|(at, byte)| match at {
                    148..156 => 32,
                    _ => u32::from(*byte),
                })
                .sum();
            if bytes.len() > 512 {
                bytes[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
            }
            if let Some(at) = bytes.windows(3).position(|w| w == b".mf") {
                bytes[at + 1] = b'n';
            }
        }
        let Ok(ova) = Ova::open(memory_file(&bytes), "web.ova") else { continue };
        let _ = ova.verify(&mut no_progress);
        for disk in ova.disks() {
            let Ok(file) = ova.file(&disk.file) else { continue };
            let Ok(layer) = Stream::open(file, &disk.file) else { continue };
            let _ = crate::proving::read(&layer, 0..layer.capacity().min(4096), None);
        }
    }
    assert!(memory_since(memory) < 1 << 30, "{} bytes more", memory_since(memory));
    assert!(start.elapsed().as_secs() < 600, "{:?}", start.elapsed());
}
