//! TLS without a proxy: published clients that trust the gateway's authority are served, and others do not talk to it.

use std::process::Command;

use vramq_tests::authority::Authority;

use crate::foreign::python;
use crate::harness::{ECHO, Setup, until};

#[test]
fn clients_that_trust_the_authority_are_served_and_others_are_not() {
    let mut setup = Setup::new();
    setup.worker(&[ECHO], &[]);
    let (known, other) = (Authority::new().unwrap(), Authority::new().unwrap());
    let file = |name: &str, text: &str| {
        let path = setup.folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().expect("UTF-8").to_owned()
    };
    let (ca, wrong) = (file("ca.pem", &known.ca), file("wrong.pem", &other.ca));
    let options = [
        format!("http.tls_certificate={}", file("chain.pem", &known.certificate)),
        format!("http.tls_key={}", file("key.pem", &known.key)),
    ];
    for _ in 0..2 {
        let gateway = setup.tls_gateway(&["--set", &options[0], "--set", &options[1]]);
        let curl = |ca: &str, url: &str| {
            let mut curl = Command::new("curl");
            curl.args(["--silent", "--show-error", "--fail", "--cacert", ca]);
            curl.arg(format!("{url}/v1/models")).output().expect("curl")
        };
        until("the model is served", || {
            let listed = curl(&ca, &gateway.url);
            String::from_utf8_lossy(&listed.stdout).contains("\"echo\"").then_some(())
        });
        // 60: the peer's certificate cannot be verified with known authorities.
        assert_eq!(curl(&wrong, &gateway.url).status.code(), Some(60));
        assert!(!curl(&ca, &gateway.url.replace("https:", "http:")).status.success(), "without TLS");
        python(&["tls_client.py", &gateway.url, &ca, &wrong]);
    }
}
