//! What the tests share: providers of every kind that talk to a server of the test, and attempts.
//!
//! Has no test of its own.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use order_timeout_core::payment::{Answer, Attempt, Currency, Money};
use order_timeout_providers::{Provider, Providers, ProvidersSettings};
use ring::rand::SystemRandom;
use ring::signature::{RSA_PKCS1_2048_8192_SHA256, RSA_PKCS1_SHA256, RsaKeyPair, UnparsedPublicKey};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{PrivatePkcs8KeyDer, SubjectPublicKeyInfoDer};
use tempfile::TempDir;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;

/// The secrets that the tests write into files. None may appear in an answer.
pub const SECRETS: [&str; 4] =
    ["sk_test_51SecretOfStripe", "secret-of-paypal-app", "AQESecretOfAdyen", "bearer-token-of-own-service"];

/// The key that requests to a payment service of the shop's own are signed with.
pub const HMAC_KEY: &str = "0123456789abcdef0123456789abcdef";

pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// One provider in a folder with its keys.
pub struct Setup {
    pub provider: Arc<dyn Provider>,
    pub name: &'static str,
    _folder: TempDir,
}

impl Setup {
    /// A provider of this kind whose server is at `url`, with more settings as TOML.
    pub fn new(kind: &'static str, url: &str, more: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let provider = Providers::new(&settings(folder.path(), kind, url, more)).unwrap().get(kind).unwrap().clone();
        Self { provider, name: kind, _folder: folder }
    }

    pub fn attempt(&self, reference: &str) -> Attempt {
        attempt(self.name, reference)
    }

    pub async fn ask(&self, reference: &str) -> Answer {
        self.provider.ask(&self.attempt(reference)).await
    }

    pub async fn cancel(&self, reference: &str) -> Answer {
        self.provider.cancel(&self.attempt(reference)).await
    }
}

/// The settings of one provider, with its key files in this folder.
pub fn settings(folder: &Path, kind: &str, url: &str, more: &str) -> ProvidersSettings {
    let file = |name: &str, content: &str| {
        let path = folder.join(name);
        std::fs::write(&path, format!("{content}\n")).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let fixture = |name: &str| fixture(name).to_str().unwrap().to_owned();
    let own = match kind {
        "http" => {
            format!("bearer_token_file = {:?}\nhmac_key_file = {:?}", file("token", SECRETS[3]), file("hmac", HMAC_KEY))
        }
        "stripe" => format!("secret_key_file = {:?}", file("stripe", SECRETS[0])),
        "wechat" => format!(
            "merchant_id = \"1900000001\"\ncertificate_serial = \"5157F09EFDC096DE\"\nprivate_key_file = {:?}",
            fixture("ours.key.pem")
        ),
        "alipay" => format!(
            "app_id = \"2014072300007148\"\nprivate_key_file = {:?}\nalipay_public_key_file = {:?}",
            fixture("ours.key.pem"),
            fixture("theirs.public.pem")
        ),
        "paypal" => format!("client_id = \"client\"\nclient_secret_file = {:?}", file("paypal", SECRETS[1])),
        "adyen" => format!("api_key_file = {:?}", file("adyen", SECRETS[2])),
        other => panic!("{other}"),
    };
    // What a provider must have and some tests choose otherwise.
    let missing = match kind {
        "wechat" if !more.contains("platform_keys") => {
            format!("platform_keys = [{{ file = {:?}, id = \"PUB_KEY_ID_01\" }}]\n", fixture("theirs.public.pem"))
        }
        "paypal" if !more.contains("shop_captures") => "shop_captures_only_open_orders = false\n".to_owned(),
        _ => String::new(),
    };
    toml::from_str(&format!("[{kind}]\nkind = \"{kind}\"\nurl = \"{url}\"\n{own}\n{missing}{more}")).unwrap()
}

pub fn attempt(provider: &str, reference: &str) -> Attempt {
    Attempt { provider: provider.to_owned(), reference: reference.to_owned(), money: euros(1_999) }
}

pub fn euros(amount_minor: i64) -> Money {
    Money { amount_minor, currency: Currency::new("EUR").unwrap() }
}

pub fn yuan(amount_minor: i64) -> Money {
    Money { amount_minor, currency: Currency::new("CNY").unwrap() }
}

/// Why an answer is unknown; checks that no secret is in it.
pub fn why(answer: &Answer) -> &str {
    let Answer::Unknown(unknown) = answer else { panic!("{answer:?} is not unknown") };
    for secret in SECRETS.into_iter().chain([HMAC_KEY]) {
        assert!(!unknown.why.contains(secret), "{}", unknown.why);
    }
    assert!(unknown.why.len() < 400 && !unknown.why.contains('\n'), "{}", unknown.why);
    &unknown.why
}

/// Signs as a provider does, with a key of the fixtures.
pub fn sign(key: &str, message: &[u8]) -> String {
    let key = PrivatePkcs8KeyDer::from_pem_file(fixture(&format!("{key}.key.pem"))).unwrap();
    let key = RsaKeyPair::from_pkcs8(key.secret_pkcs8_der()).unwrap();
    let mut signature = vec![0; key.public().modulus_len()];
    key.sign(&RSA_PKCS1_SHA256, &SystemRandom::new(), message, &mut signature).unwrap();
    STANDARD.encode(signature)
}

/// Whether our own key made this signature, as a provider checks it.
pub fn is_ours(message: &[u8], signature: &str) -> bool {
    let der = SubjectPublicKeyInfoDer::from_pem_file(fixture("ours.public.pem")).unwrap();
    // The key is the content of the last field of the structure (RFC 5280, section 4.1): 24 bytes before it for 2048 bits.
    let key = UnparsedPublicKey::new(&RSA_PKCS1_2048_8192_SHA256, &der[24..]);
    STANDARD.decode(signature).is_ok_and(|signature| key.verify(message, &signature).is_ok())
}
