//! Certificates of a test authority, created with openssl.

use crate::process::tool;
use std::path::Path;

/// Creates an authority with certificates for a server and a client, in files named as libnbd and QEMU expect.
pub fn authority(folder: &Path) {
    std::fs::create_dir(folder).unwrap();
    let path = |name: &str| folder.join(name).to_str().unwrap().to_string();
    let key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"];
    let run = |arguments: &[&str]| tool("openssl", &[&["req"], &key[..], arguments].concat());
    let (ca, ca_key) = (path("ca-cert.pem"), path("ca-key.pem"));
    let extensions = ["-addext", "basicConstraints=critical,CA:TRUE", "-addext", "keyUsage=critical,keyCertSign"];
    run(&[&["-x509", "-subj", "/CN=test authority", "-keyout", &ca_key, "-out", &ca], &extensions[..]].concat());
    for (name, usage) in [("server", "serverAuth"), ("client", "clientAuth")] {
        let (request, certificate) = (path(&format!("{name}.csr")), path(&format!("{name}-cert.pem")));
        let subject = format!("/CN={name}");
        run(&["-subj", &subject, "-keyout", &path(&format!("{name}-key.pem")), "-out", &request]);
        std::fs::write(
            path("extensions"),
            format!("subjectAltName=DNS:localhost,IP:127.0.0.1\nextendedKeyUsage={usage}\nbasicConstraints=CA:FALSE\n"),
        )
        .unwrap();
        let sign = ["x509", "-req", "-days", "2", "-in", &request, "-CA", &ca, "-CAkey", &ca_key, "-CAcreateserial"];
        tool("openssl", &[&sign[..], &["-extfile", &path("extensions"), "-out", &certificate]].concat());
    }
}
