//! Certificates of a test authority, created with openssl.

use crate::process::tool;
use std::path::Path;

const KEY: [&str; 7] = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"];

fn request(arguments: &[&str]) {
    tool("openssl", &[&["req"], &KEY[..], arguments].concat());
}

/// Creates an authority with certificates for a server and a client, in files named as libnbd and QEMU expect.
pub fn authority(folder: &Path) {
    std::fs::create_dir(folder).unwrap();
    let path = |name: &str| folder.join(name).to_str().unwrap().to_string();
    let (ca, ca_key) = (path("ca-cert.pem"), path("ca-key.pem"));
    let extensions = ["-addext", "basicConstraints=critical,CA:TRUE", "-addext", "keyUsage=critical,keyCertSign"];
    let authority = ["-x509", "-subj", "/CN=test authority", "-keyout", &ca_key, "-out", &ca];
    request(&[&authority, &extensions[..]].concat());
    for (name, usage) in [("server", "serverAuth"), ("client", "clientAuth")] {
        certify(folder, name, "DNS:localhost,IP:127.0.0.1", usage);
    }
}

/// Creates NAME-cert.pem and NAME-key.pem in the folder of an authority. `names` are the certificate's subject
/// alternative names.
pub fn certify(folder: &Path, name: &str, names: &str, usage: &str) {
    let path = |name: &str| folder.join(name).to_str().unwrap().to_string();
    let (ca, ca_key) = (path("ca-cert.pem"), path("ca-key.pem"));
    let (wanted, certificate) = (path(&format!("{name}.csr")), path(&format!("{name}-cert.pem")));
    let subject = format!("/CN={name}");
    request(&["-subj", &subject, "-keyout", &path(&format!("{name}-key.pem")), "-out", &wanted]);
    let extensions = format!("subjectAltName={names}\nextendedKeyUsage={usage}\nbasicConstraints=CA:FALSE\n");
    std::fs::write(path("extensions"), extensions).unwrap();
    let sign = ["x509", "-req", "-days", "2", "-in", &wanted, "-CA", &ca, "-CAkey", &ca_key, "-CAcreateserial"];
    tool("openssl", &[&sign[..], &["-extfile", &path("extensions"), "-out", &certificate]].concat());
}
