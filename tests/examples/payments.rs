//! The payment callback that docs/PAYMENTS.md prints runs against a real database, with the client library of its
//! language. A library that cannot be had on this machine is reported as skipped.

use std::process::Command;
use std::time::Duration;

use order_timeout_testkit::TestEnv;
use order_timeout_testkit::away::meanwhile;
use order_timeout_testkit::skip::skipped;
use secrecy::ExposeSecret;

use crate::listeners::{Listener, python_with};
use crate::root;

/// Sends a callback; returns the answer's status line.
fn call(port: &str, body: &str) -> String {
    use std::io::{Read, Write};
    let mut stream = std::net::TcpStream::connect(format!("127.0.0.1:{port}")).unwrap();
    write!(stream, "POST /callback HTTP/1.0\r\nContent-Length: {}\r\n\r\n{body}", body.len()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer.lines().next().unwrap_or_default().to_owned()
}

#[test]
fn python_callback_reports_payment_once() {
    let mut command: Command = match python_with("psycopg", "psycopg[binary]") {
        Ok(command) => command,
        Err(why) => return skipped("payments::python_callback_reports_payment_once", &why),
    };
    TestEnv::builder().run(async move |env| {
        let order = env.order(Duration::from_secs(600)).await;
        command.arg(root().join("examples/payments/callback.py"));
        command.env("DATABASE_URL", env.settings.database.url.expose_secret()).env("PORT", "0");
        let callback = Listener::start(&mut command);
        let port = callback.line().replace("listening: ", "");
        let body = |amount: &str| {
            format!(r#"{{"order_id":"{}","reference":"r1","amount_minor":{amount},"currency":"EUR"}}"#, order.id)
        };
        for _ in 0..3 {
            let answer = meanwhile(|| call(&port, &body("500")));
            assert!(answer.contains(" 200 "), "{answer}");
        }
        let answer = meanwhile(|| call(&port, &body("501")));
        assert!(answer.contains(" 200 "), "another amount for the same reference is final: {answer}");
        assert_eq!(callback.line(), format!("{} paid 0", order.id));
        assert_eq!(env.status(&order).await, "paid");
        assert_eq!(env.count("SELECT count(*) FROM received_payments").await, 1);
    });
}
