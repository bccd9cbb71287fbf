//! The example payment service answers the provider as the contract says.

use std::process::Stdio;
use std::time::Duration;

use order_timeout_core::payment::Answer;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};

use crate::documents::root;
use crate::setup::{HMAC_KEY, Setup, euros, why};

/// The example, and its address. Killed when dropped.
async fn start(key: &str) -> (Child, String) {
    let mut child = Command::new("python3")
        .arg(root().join("examples/provider_server/server.py"))
        .env("PORT", "0")
        .env("HMAC_KEY", key)
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .expect("the example needs python3");
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let line = tokio::time::timeout(Duration::from_secs(20), lines.next_line()).await.unwrap().unwrap().unwrap();
    let url = line.split_whitespace().last().unwrap().to_owned();
    (child, url)
}

#[tokio::test]
async fn example_server_keeps_contract() {
    let (_child, url) = start(HMAC_KEY).await;
    let setup = Setup::new("http", &url, "");
    assert_eq!(setup.ask("att-open").await, Answer::Open);
    assert_eq!(setup.ask("att-paid").await, Answer::Paid { money: Some(euros(1_999)) });
    assert_eq!(setup.ask("att-refunded").await, Answer::Refunded);
    assert_eq!(setup.ask("att-none").await, Answer::Absent);
    for _ in 0..2 {
        assert_eq!(setup.cancel("att-open").await, Answer::Closed);
    }
    assert_eq!(setup.ask("att-open").await, Answer::Closed);
    assert_eq!(setup.cancel("att-paid").await, Answer::Paid { money: Some(euros(1_999)) });
    assert_eq!(setup.cancel("att-none").await, Answer::Closed, "it can refuse what comes later");
}

#[tokio::test]
async fn example_server_refuses_other_keys() {
    let (_child, url) = start("another key of thirty-two characters").await;
    let said = Setup::new("http", &url, "").cancel("att-open").await;
    assert!(why(&said).contains("HTTP 401"), "{said:?}");
}
