//! Which clients may send disks, and to which servers clients send.

use crate::site::{Keys, Site, options, remote};
use disk::NoProgress;
use disk::transfer::SEGMENT;
use error::ErrorKind;
use replication::{NoAttachments, Receiver, ReceiverConfig, send};
use std::sync::Arc;

fn here() -> Site {
    let here = Site::new();
    drop(here.disk("web", SEGMENT));
    here.snapshot("web", "monday");
    here
}

#[test]
fn only_clients_with_the_right_certificate_are_admitted() {
    let (keys, here, there) = (Keys::new(), here(), Site::new());
    let receiver = there.receiver_for(&keys, &["client.example"]);
    let attempt = |tls: connections::ClientTls, name: &str| {
        let mut options = options(&keys, 2);
        options.tls = tls;
        send(&here.shipment(&[("web", "monday", name)]), &remote(&receiver), &options, &NoProgress)
    };
    attempt(keys.client("client"), "good").unwrap();

    let error = attempt(keys.client("guest"), "guest").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    assert!(error.to_string().contains("--receive-from"), "{error}");

    let mut anonymous = keys.client("client");
    anonymous.identity = None;
    let error = attempt(anonymous, "anonymous").unwrap_err();
    assert!(error.to_string().contains("TLS"), "{error}");

    let mut stranger = keys.client("client");
    stranger.identity = Some((keys.path("other-ca-client"), keys.path("other-ca-client-key")));
    let error = attempt(stranger, "stranger").unwrap_err();
    assert!(error.to_string().contains("TLS"), "{error}");
    assert_eq!(there.datastore.disks().unwrap().len(), 1);
}

#[test]
fn a_server_needs_a_certificate_for_its_name() {
    let (keys, here, there) = (Keys::new(), here(), Site::new());
    let receiver = there.receiver(&keys);
    let mut options = options(&keys, 2);
    let mut attempt = |name: Option<&str>, authorities: &str| {
        options.tls.server_name = name.map(str::to_owned);
        options.tls.authorities = keys.path(authorities);
        send(&here.shipment(&[("web", "monday", "web")]), &remote(&receiver), &options, &NoProgress)
    };
    for (name, authorities) in [(Some("elsewhere.example"), "ca"), (None, "other-ca")] {
        let error = attempt(name, authorities).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        assert!(error.to_string().contains("certificate"), "{error}");
    }
    attempt(Some("localhost"), "ca").unwrap();
}

#[test]
fn a_receiver_without_client_names_is_refused() {
    let (keys, there) = (Keys::new(), Site::new());
    let start = |listen: &str, authorities: bool, clients: &[&str]| {
        let mut tls = keys.server();
        tls.client_authorities = tls.client_authorities.filter(|_| authorities);
        let clients = clients.iter().map(|name| (*name).to_owned()).collect();
        let config = ReceiverConfig { listen: listen.parse().unwrap(), tls, clients };
        Receiver::start(&config, Arc::clone(&there.datastore), Arc::new(NoAttachments)).map(drop)
    };
    assert!(start("0.0.0.0:0", false, &[]).unwrap_err().to_string().contains("--tls-client-ca"));
    assert!(start("127.0.0.1:0", false, &["a.example"]).is_err());
    assert!(start("127.0.0.1:0", true, &["not a name"]).is_err());
    start("127.0.0.1:0", false, &[]).unwrap();
    start("0.0.0.0:0", true, &["a.example"]).unwrap();
}
