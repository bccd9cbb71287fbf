//! The section `providers` of the settings: one table per provider, named as `payment_attempts.provider` names it.
//!
//! Reads no file and opens no connection. It has the defaults of a provider itself, because a file of settings names only
//! the providers that a shop has.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use order_timeout_core::{InvalidSetting, duration};
use serde::de::Error;
use serde::{Deserialize, Deserializer};
use url::{Host, Url};

/// The longest name of a provider, in bytes; the table `payment_attempts` checks the same.
const MAX_NAME_BYTES: usize = 40;

/// All providers by name.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
pub struct ProvidersSettings(pub BTreeMap<String, ProviderSettings>);

/// One provider; `kind` says which.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum ProviderSettings {
    /// A payment service of the shop's own, behind the contract in `docs/PROVIDERS.md`.
    Http(HttpSettings),
    /// Stripe: payment intents and checkout sessions.
    Stripe(StripeSettings),
    /// WeChat Pay, API v3.
    Wechat(WechatSettings),
    /// Alipay, `alipay.trade.query` and `alipay.trade.close`.
    Alipay(AlipaySettings),
    /// PayPal, orders v2.
    Paypal(PaypalSettings),
    /// Adyen, payment links.
    Adyen(AdyenSettings),
}

/// How much one provider may be asked, and how long it may take.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LimitsSettings {
    /// So many calls are under way at a time: 1 to 1000.
    #[serde(deserialize_with = "written")]
    pub concurrency: u32,
    /// So many requests a second, evenly spaced: 1 to 10000.
    #[serde(deserialize_with = "written")]
    pub requests_per_s: u32,
    /// How long one request may take, from connecting to the last byte of the answer: 100 ms to 5 minutes.
    #[serde(deserialize_with = "duration::read")]
    pub timeout: Duration,
    /// How long a call, and each of its requests, may wait for its turn: 100 ms to 1 hour.
    #[serde(deserialize_with = "duration::read")]
    pub queue_timeout: Duration,
    /// So many failures in a row open the circuit breaker: 1 to 1000.
    #[serde(deserialize_with = "written")]
    pub failures_to_open: u32,
    /// How long the provider is left alone then: 100 ms to 1 hour.
    #[serde(deserialize_with = "duration::read")]
    pub open_for: Duration,
}

impl Default for LimitsSettings {
    /// Stripe, the most generous of the providers here that publish a limit, allows 25 requests a second in a sandbox and
    /// 100 in production (docs.stripe.com/rate-limits); the shop itself needs its share.
    fn default() -> Self {
        Self {
            concurrency: 16,
            requests_per_s: 20,
            timeout: Duration::from_secs(10),
            queue_timeout: Duration::from_secs(30),
            failures_to_open: 5,
            open_for: Duration::from_secs(30),
        }
    }
}

/// A payment service of the shop's own.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HttpSettings {
    /// What `/ask` and `/cancel` are appended to.
    pub url: String,
    /// A file with the token that is sent as `Authorization: Bearer`.
    pub bearer_token_file: Option<PathBuf>,
    /// A file with the key that requests are signed with.
    pub hmac_key_file: Option<PathBuf>,
    /// A PEM file with the only CAs to trust, instead of the system's.
    pub ca_file: Option<PathBuf>,
    /// See [`LimitsSettings`].
    #[serde(default)]
    pub limits: LimitsSettings,
}

/// Stripe.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StripeSettings {
    /// A file with the secret key, or with a restricted one that may write payment intents and checkout sessions and read
    /// charges.
    pub secret_key_file: PathBuf,
    /// The connected account that the payments belong to (`acct_…`), if the key is its platform's.
    pub account: Option<String>,
    /// Stripe's address.
    #[serde(default = "stripe_url")]
    pub url: String,
    /// A PEM file with the only CAs to trust, instead of the system's.
    pub ca_file: Option<PathBuf>,
    /// See [`LimitsSettings`].
    #[serde(default)]
    pub limits: LimitsSettings,
}

/// WeChat Pay.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WechatSettings {
    /// The merchant number (`mchid`).
    #[serde(deserialize_with = "written")]
    pub merchant_id: String,
    /// The serial number of the merchant's API certificate.
    #[serde(deserialize_with = "written")]
    pub certificate_serial: String,
    /// A PEM file with the key of that certificate (`apiclient_key.pem`).
    pub private_key_file: PathBuf,
    /// What answers are verified with; several while WeChat Pay changes its certificate.
    pub platform_keys: Vec<PlatformKeySettings>,
    /// Whether the merchant is one outside of mainland China, whose payments have another address and path.
    #[serde(default, deserialize_with = "written")]
    pub global: bool,
    /// Another address than WeChat Pay's.
    pub url: Option<String>,
    /// A PEM file with the only CAs to trust, instead of the system's.
    pub ca_file: Option<PathBuf>,
    /// See [`LimitsSettings`].
    #[serde(default)]
    pub limits: LimitsSettings,
}

/// A public key of WeChat Pay.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlatformKeySettings {
    /// A PEM file with a public key, or with a platform certificate.
    pub file: PathBuf,
    /// The public key's id (`PUB_KEY_ID_…`); a certificate has its serial number itself.
    pub id: Option<String>,
}

/// Alipay, with keys (not with certificates).
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AlipaySettings {
    /// The application's id.
    #[serde(deserialize_with = "written")]
    pub app_id: String,
    /// A file with the application's private key, as PEM or as Alipay's key tool writes it.
    pub private_key_file: PathBuf,
    /// A file with Alipay's public key (not the application's), as PEM or as the console shows it.
    pub alipay_public_key_file: PathBuf,
    /// Alipay's gateway.
    #[serde(default = "alipay_url")]
    pub url: String,
    /// A PEM file with the only CAs to trust, instead of the system's.
    pub ca_file: Option<PathBuf>,
    /// See [`LimitsSettings`].
    #[serde(default)]
    pub limits: LimitsSettings,
}

/// PayPal.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PaypalSettings {
    /// The client id of the REST app.
    pub client_id: String,
    /// A file with that app's secret.
    pub client_secret_file: PathBuf,
    /// Whether the shop promises that its server captures or authorises a PayPal order only while its own order is open.
    /// PayPal has no call that closes an order which was not authorised, so nothing but this promise keeps it from being
    /// paid. Without it such an order stays unresolved.
    #[serde(deserialize_with = "written")]
    pub shop_captures_only_open_orders: bool,
    /// PayPal's address.
    #[serde(default = "paypal_url")]
    pub url: String,
    /// A PEM file with the only CAs to trust, instead of the system's.
    pub ca_file: Option<PathBuf>,
    /// See [`LimitsSettings`].
    #[serde(default)]
    pub limits: LimitsSettings,
}

/// Adyen.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AdyenSettings {
    /// A file with the API key.
    pub api_key_file: PathBuf,
    /// The address of the Checkout API up to its version, which is the merchant's own in production:
    /// `https://PREFIX-checkout-live.adyenpayments.com/checkout/v72`.
    pub url: String,
    /// A PEM file with the only CAs to trust, instead of the system's.
    pub ca_file: Option<PathBuf>,
    /// See [`LimitsSettings`].
    #[serde(default)]
    pub limits: LimitsSettings,
}

/// A value in the type that a file of settings has for it, or as the text that an environment and a command line have: serde
/// passes on what it has read for a tagged enum as it is, so that the worker's loader converts nothing.
fn written<'de, D: Deserializer<'de>, T: FromStr<Err: fmt::Display>>(deserializer: D) -> Result<T, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "a list or a table is no value of this setting; write one value")]
    enum Written {
        Truth(bool),
        Number(i64),
        Text(String),
    }
    let text = match Written::deserialize(deserializer)? {
        Written::Truth(truth) => truth.to_string(),
        Written::Number(number) => number.to_string(),
        Written::Text(text) => text,
    };
    text.trim().parse().map_err(D::Error::custom)
}

fn stripe_url() -> String {
    "https://api.stripe.com".into()
}

impl WechatSettings {
    /// WeChat Pay's address, unless another is given.
    #[must_use]
    pub fn url(&self) -> &str {
        let own = if self.global { "https://apihk.mch.weixin.qq.com" } else { "https://api.mch.weixin.qq.com" };
        self.url.as_deref().unwrap_or(own)
    }
}

fn alipay_url() -> String {
    "https://openapi.alipay.com/gateway.do".into()
}

fn paypal_url() -> String {
    "https://api-m.paypal.com".into()
}

/// The key of a provider's table, such as `providers.stripe`.
pub(crate) fn section(name: &str) -> String {
    format!("providers.{name}")
}

impl ProvidersSettings {
    /// Checks every rule. Reads no file.
    ///
    /// # Errors
    /// [`InvalidSetting`] for the first rule that is broken.
    pub fn validate(&self) -> Result<(), InvalidSetting> {
        self.0.iter().try_for_each(|(name, settings)| {
            let is_name = name.len() <= MAX_NAME_BYTES
                && name.bytes().all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'_' | b'-'))
                && name.starts_with(|first: char| first.is_ascii_lowercase());
            if !is_name {
                let why = format!(
                    "{name:?} is not a provider's name; write 1 to {MAX_NAME_BYTES} of a-z, 0-9, _ and -, and begin with a letter"
                );
                return Err(InvalidSetting::new("providers", why));
            }
            settings.validate(&section(name))
        })
    }
}

impl ProviderSettings {
    /// The limits of this provider.
    #[must_use]
    pub fn limits(&self) -> &LimitsSettings {
        match self {
            Self::Http(own) => &own.limits,
            Self::Stripe(own) => &own.limits,
            Self::Wechat(own) => &own.limits,
            Self::Alipay(own) => &own.limits,
            Self::Paypal(own) => &own.limits,
            Self::Adyen(own) => &own.limits,
        }
    }

    /// Where it is asked.
    #[must_use]
    pub fn url(&self) -> &str {
        match self {
            Self::Http(own) => &own.url,
            Self::Stripe(own) => &own.url,
            Self::Wechat(own) => own.url(),
            Self::Alipay(own) => &own.url,
            Self::Paypal(own) => &own.url,
            Self::Adyen(own) => &own.url,
        }
    }

    fn validate(&self, section: &str) -> Result<(), InvalidSetting> {
        base_url(section, self.url())?;
        self.limits().validate(section)?;
        let plain = |key: &str, value: &str| plain_text(section, key, value);
        match self {
            Self::Http(own) if own.bearer_token_file.is_none() && own.hmac_key_file.is_none() => {
                let why = "is missing, and so is bearer_token_file; name at least one, so that the payment service can refuse requests of others";
                Err(InvalidSetting::new(format!("{section}.hmac_key_file"), why))
            }
            Self::Stripe(own) => own.account.as_deref().map_or(Ok(()), |account| plain("account", account)),
            Self::Http(_) | Self::Adyen(_) => Ok(()),
            Self::Wechat(own) => {
                plain("merchant_id", &own.merchant_id)?;
                plain("certificate_serial", &own.certificate_serial)?;
                if own.platform_keys.is_empty() {
                    let why = "is empty; name at least one public key or platform certificate of WeChat Pay, or no answer can be verified";
                    return Err(InvalidSetting::new(format!("{section}.platform_keys"), why));
                }
                Ok(())
            }
            Self::Alipay(own) => plain("app_id", &own.app_id),
            Self::Paypal(own) => plain("client_id", &own.client_id),
        }
    }
}

/// Requests of the longest call: a cancel at PayPal gets a token, reads the order, voids its authorization, and reads the
/// order again.
const MOST_REQUESTS: u32 = 4;

impl LimitsSettings {
    /// How long a call may take after it has got its turn.
    #[must_use]
    pub fn longest_call(&self) -> Duration {
        self.queue_timeout + self.timeout * MOST_REQUESTS
    }

    fn validate(&self, section: &str) -> Result<(), InvalidSetting> {
        let key = |name: &str| format!("{section}.limits.{name}");
        InvalidSetting::between(&key("concurrency"), self.concurrency, 1, 1_000)?;
        InvalidSetting::between(&key("requests_per_s"), self.requests_per_s, 1, 10_000)?;
        InvalidSetting::between(&key("failures_to_open"), self.failures_to_open, 1, 1_000)?;
        let least = Duration::from_millis(100);
        InvalidSetting::within(&key("timeout"), self.timeout, least, Duration::from_secs(300))?;
        InvalidSetting::within(&key("queue_timeout"), self.queue_timeout, least, Duration::from_secs(3_600))?;
        InvalidSetting::within(&key("open_for"), self.open_for, least, Duration::from_secs(3_600))
    }
}

/// What goes into headers, addresses and signatures as it is.
fn plain_text(section: &str, key: &str, value: &str) -> Result<(), InvalidSetting> {
    if !value.is_empty() && value.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_-.".contains(&byte)) {
        return Ok(());
    }
    let why = "is not letters, digits, \"_\", \"-\" and \".\"; write it as the provider's console shows it";
    Err(InvalidSetting::new(format!("{section}.{key}"), why))
}

/// Reads the address of a provider.
///
/// # Errors
/// As of [`checked_url`].
pub(crate) fn base_url(section: &str, text: &str) -> Result<Url, InvalidSetting> {
    checked_url(text).map_err(|why| InvalidSetting::new(format!("{section}.url"), why))
}

/// The example in the sentences about an address.
pub const URL_EXAMPLE: &str = "https://payments.example.com/orders";

/// Reads an address that requests with keys are sent to.
///
/// # Errors
/// Why it is refused, if it is not `https`, or `http` to this machine, or has an account, a query or a fragment. Repeats
/// no part of it.
pub(crate) fn checked_url(text: &str) -> Result<Url, &'static str> {
    let Ok(url) = Url::parse(text) else {
        return Err("is not an address; write it like https://payments.example.com/orders");
    };
    let is_loopback = match url.host() {
        Some(Host::Domain(name)) => name == "localhost",
        Some(Host::Ipv4(address)) => address.is_loopback(),
        Some(Host::Ipv6(address)) => address.is_loopback(),
        None => false,
    };
    match url.scheme() {
        "https" => {}
        "http" if is_loopback => {}
        "http" => {
            return Err("begins with http:// and is not this machine, so keys would be readable; write https://");
        }
        _ => return Err("does not begin with https://; write it like https://payments.example.com/orders"),
    }
    if !url.username().is_empty() || url.password().is_some() {
        return Err("has an account; put keys into their files");
    }
    if url.query().is_some() || url.fragment().is_some() {
        return Err("has a ? or a #; write it without them");
    }
    Ok(url)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<ProvidersSettings, String> {
        let settings: ProvidersSettings = toml::from_str(text).map_err(|error| error.message().to_owned())?;
        settings.validate().map_err(|error| error.to_string())?;
        Ok(settings)
    }

    #[test]
    fn reads_providers_by_name() {
        let settings = read(
            r#"
            [card]
            kind = "stripe"
            secret_key_file = "/run/secrets/stripe"
            [card.limits]
            requests_per_s = 50
            timeout = "5s"
            [own-service]
            kind = "http"
            url = "http://127.0.0.1:8080/payments"
            hmac_key_file = "/run/secrets/payments"
            [wallet]
            kind = "wechat"
            merchant_id = "1900000001"
            certificate_serial = "5157F09EFDC096DE15EBE81A47057A72"
            private_key_file = "key.pem"
            platform_keys = [{ file = "public.pem", id = "PUB_KEY_ID_0114" }]
            "#,
        )
        .unwrap();
        let ProviderSettings::Stripe(card) = &settings.0["card"] else { panic!() };
        assert_eq!(card.url, "https://api.stripe.com");
        assert_eq!((card.limits.requests_per_s, card.limits.concurrency), (50, 16));
        assert_eq!(settings.0.len(), 3);
    }

    /// The worker reads its settings with this crate, whose values have other types than those of toml.
    #[test]
    fn worker_can_read_section() {
        #[derive(Deserialize)]
        struct Settings {
            providers: ProvidersSettings,
        }
        let load = |text: &str| {
            let source = config::File::from_str(text, config::FileFormat::Toml);
            config::Config::builder().add_source(source).build().unwrap().try_deserialize::<Settings>()
        };
        let stripe = "[providers.card]\nkind = \"stripe\"\nsecret_key_file = \"k\"\n";
        let limits = "[providers.card.limits]\nrequests_per_s = 50\nopen_for = \"1m\"";
        let settings = load(&format!("{stripe}{limits}")).unwrap().providers;
        assert_eq!(settings.0["card"].limits().open_for, Duration::from_secs(60));
        for (text, why) in [
            (format!("{stripe}secret_key = \"k\""), "unknown field `secret_key`"),
            (format!("{stripe}limits = {{ timeout = \"soon\" }}"), "a duration"),
            ("[providers.card]\nkind = \"cash\"".to_owned(), "unknown variant `cash`"),
        ] {
            let fault = load(&text).map(drop).unwrap_err().to_string();
            assert!(fault.contains(why) && fault.contains("for key `providers.card"), "{fault}");
        }
    }

    #[test]
    fn refusals_name_their_key() {
        let stripe = "[stripe]\nkind = \"stripe\"\nsecret_key_file = \"k\"\n";
        for (text, begins) in [
            ("[Stripe]\nkind = \"stripe\"\nsecret_key_file = \"k\"".to_owned(), "providers: \"Stripe\" is not"),
            (format!("{stripe}url = \"http://api.stripe.com\""), "providers.stripe.url: begins with http://"),
            (format!("{stripe}url = \"ftp://api.stripe.com\""), "providers.stripe.url: does not begin"),
            (format!("{stripe}url = \"https://u:p@api.stripe.com\""), "providers.stripe.url: has an account"),
            (format!("{stripe}url = \"https://api.stripe.com?a\""), "providers.stripe.url: has a ?"),
            (format!("{stripe}url = \"stripe\""), "providers.stripe.url: is not an address"),
            (format!("{stripe}limits = {{ concurrency = 0 }}"), "providers.stripe.limits.concurrency: 0 is not between"),
            (
                format!("{stripe}limits = {{ requests_per_s = 0 }}"),
                "providers.stripe.limits.requests_per_s: 0 is not between 1 and 10000",
            ),
            (format!("{stripe}limits = {{ timeout = \"1ms\" }}"), "providers.stripe.limits.timeout: 1ms is not between"),
            (
                "[own]\nkind = \"http\"\nurl = \"https://example.com\"".to_owned(),
                "providers.own.hmac_key_file: is missing, and so is bearer_token_file",
            ),
            (
                "[w]\nkind = \"wechat\"\nmerchant_id = \"1\"\ncertificate_serial = \"1\"\nprivate_key_file = \"k\"\nplatform_keys = []".to_owned(),
                "providers.w.platform_keys: is empty",
            ),
            (
                "[p]\nkind = \"paypal\"\nclient_id = \"a b\"\nclient_secret_file = \"s\"\nshop_captures_only_open_orders = true".to_owned(),
                "providers.p.client_id: is not letters",
            ),
            (format!("{stripe}secret_key = \"sk_live\""), "unknown field `secret_key`"),
            ("[stripe]\nkind = \"stripe\"".to_owned(), "missing field `secret_key_file`"),
            ("[stripe]\nkind = \"strpe\"".to_owned(), "unknown variant `strpe`, expected one of `http`, `stripe`"),
            (
                "[p]\nkind = \"paypal\"\nclient_id = \"a\"\nclient_secret_file = \"s\"".to_owned(),
                "missing field `shop_captures_only_open_orders`",
            ),
        ] {
            let why = read(&text).unwrap_err();
            assert!(why.starts_with(begins), "{text}\n{why}");
            assert!(!why.contains("u:p") && !why.contains("sk_live"), "{why}");
        }
    }
}
