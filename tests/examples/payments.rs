//! The payment callback that docs/PAYMENTS.md names runs against a real database, with the client library of its
//! language. A library that cannot be had on this machine is reported as skipped.

use std::process::Command;
use std::time::Duration;

use order_timeout_testkit::TestEnv;
use order_timeout_testkit::away::meanwhile;
use order_timeout_testkit::skip::skipped;
use secrecy::ExposeSecret;

use crate::listeners::{Listener, python};
use crate::root;

/// Signs as docs.stripe.com/webhooks says.
fn signature(secret: &str, body: &str) -> String {
    let program = "import hashlib, hmac, sys, time; seconds = int(time.time()); \
                   text = f'{seconds}.{sys.argv[2]}'.encode(); \
                   print(f't={seconds},v1={hmac.new(sys.argv[1].encode(), text, hashlib.sha256).hexdigest()}', end='')";
    let signed = Command::new("python3").args(["-c", program, secret, body]).output().unwrap();
    String::from_utf8(signed.stdout).unwrap()
}

/// Sends a callback that is signed with this secret; returns the answer's status line.
fn call(port: &str, secret: &str, body: &str) -> String {
    use std::io::{Read, Write};
    let mut stream = std::net::TcpStream::connect(format!("127.0.0.1:{port}")).unwrap();
    let (length, signature) = (body.len(), signature(secret, body));
    write!(stream, "POST / HTTP/1.0\r\nStripe-Signature: {signature}\r\nContent-Length: {length}\r\n\r\n{body}")
        .unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer.lines().next().unwrap_or_default().to_owned()
}

#[test]
fn python_callback_reports_payment_once() {
    let mut command: Command = match python() {
        Ok(command) => command,
        Err(why) => return skipped("payments::python_callback_reports_payment_once", &why),
    };
    TestEnv::builder().run(async move |env| {
        let order = env.order(Duration::from_secs(600)).await;
        command.arg(root().join("examples/payments/callback.py"));
        command.env("DATABASE_URL", env.settings.database.url.expose_secret()).env("PORT", "0");
        command.env("STRIPE_WEBHOOK_SECRET", "whsec_1");
        let callback = Listener::start(&mut command);
        let port = callback.line().replace("listening: ", "");
        let body = |amount: &str| {
            let intent = format!(
                r#"{{"id":"pi_1","amount_received":{amount},"currency":"eur","metadata":{{"order_id":"{}"}}}}"#,
                order.id
            );
            format!(r#"{{"type":"payment_intent.succeeded","data":{{"object":{intent}}}}}"#)
        };
        let answer = meanwhile(|| call(&port, "whsec_2", &body("500")));
        assert!(answer.contains(" 400 "), "another secret: {answer}");
        for _ in 0..3 {
            let answer = meanwhile(|| call(&port, "whsec_1", &body("500")));
            assert!(answer.contains(" 200 "), "{answer}");
        }
        let answer = meanwhile(|| call(&port, "whsec_1", &body("501")));
        assert!(answer.contains(" 200 "), "another amount for the same reference is final: {answer}");
        assert_eq!(callback.line(), format!("{} paid 0", order.id));
        assert_eq!(env.status(&order).await, "paid");
        assert_eq!(env.count("SELECT count(*) FROM received_payments").await, 1);
    });
}
