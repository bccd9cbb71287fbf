//! The names under which the API and the page are served. A page of another site can point a name of its own at this
//! worker's address (DNS rebinding): the browser then sends that name as `Host`, and would hand it what it reads here.
//!
//! Decides; answers nothing itself. Probes and `/metrics` are not asked for by it.

use std::net::IpAddr;

use axum::http::header::HOST;
use axum::http::uri::Authority;
use axum::http::{HeaderMap, Uri};
use url::Host;

use crate::config::{HostName, HttpSettings};

/// Why a request is refused.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(in crate::http) enum Misdirected {
    /// HTTP/1.1 demands one; a browser always sends it.
    #[error("the request names no host; send the header `Host` with the worker's address")]
    NoHost,
    /// It may be another site's.
    #[error(
        "page and API are not served under the name \"{0}\"; ask by the address in http.listen or by localhost, or add the name to http.hosts"
    )]
    OtherHost(String),
}

/// Every host that the request names must be one of ours: those in `Host`, and the one in its target, if it has one.
pub(in crate::http) fn check(settings: &HttpSettings, uri: &Uri, headers: &HeaderMap) -> Result<(), Misdirected> {
    let target = uri.authority().map(|authority| authority.as_str().to_owned());
    let given = headers.get_all(HOST).iter().map(|value| String::from_utf8_lossy(value.as_bytes()).into_owned());
    let mut named = target.into_iter().chain(given).peekable();
    named.peek().ok_or(Misdirected::NoHost)?;
    named.find(|text| !is_ours(settings, text)).map_or(Ok(()), |other| Err(Misdirected::OtherHost(other)))
}

/// With or without a port: a proxy or a forwarded port has another one than `http.listen`.
fn is_ours(settings: &HttpSettings, text: &str) -> bool {
    let authority = text.parse::<Authority>().ok().filter(|_| !text.contains('@'));
    let Some(name) = authority.and_then(|authority| HostName::new(authority.host())) else { return false };
    settings.hosts.contains(&name)
        || match &name.0 {
            Host::Domain(name) => name == "localhost" || name.ends_with(".localhost"),
            Host::Ipv4(address) => is_address(settings, (*address).into()),
            Host::Ipv6(address) => is_address(settings, IpAddr::from(*address).to_canonical()),
        }
}

/// No DNS answer leads to an address in `Host`, so whichever this machine or a network in front has is as good where the
/// worker listens at all of them.
fn is_address(settings: &HttpSettings, address: IpAddr) -> bool {
    let listen = settings.listen.0.map(|listen| listen.ip());
    address.is_loopback() || listen.is_some_and(|listen| listen.is_unspecified() || listen == address)
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;
    use crate::config::Settings;

    fn asked(listen: &str, target: &str, hosts: &[&'static str]) -> Result<(), Misdirected> {
        let sets = [format!("http.listen={listen}"), "http.hosts=ops.example,bücher.example".to_owned()];
        let settings = Settings::load_with_environment(None, config::Map::new(), &sets).unwrap();
        let mut headers = HeaderMap::new();
        hosts.iter().for_each(|host| _ = headers.append(HOST, HeaderValue::from_static(host)));
        check(&settings.http, &target.parse().unwrap(), &headers)
    }

    #[test]
    fn own_names_are_served() {
        for host in [
            "127.0.0.1:9394",
            "127.0.0.1",
            "127.0.0.2:80",
            "localhost",
            "LOCALHOST:8080",
            "localhost.",
            "shop.localhost",
            "[::1]:9394",
            "[::1]",
            "[::ffff:127.0.0.1]",
            "10.1.2.3:9394",
            "ops.example",
            "OPS.example.:443",
            "xn--bcher-kva.example",
        ] {
            assert_eq!(asked("10.1.2.3:9394", "/", &[host]), Ok(()), "{host}");
        }
        assert_eq!(asked("0.0.0.0:9394", "/", &["192.0.2.7:9394"]), Ok(()), "it listens at every address");
        assert_eq!(asked("[::]:9394", "/", &["[2001:db8::7]:9394"]), Ok(()));
        assert_eq!(asked("127.0.0.1:9394", "http://localhost:9394/", &["localhost:9394"]), Ok(()));
    }

    #[test]
    fn other_names_are_refused() {
        for host in [
            "evil.example",
            "evil.example:9394",
            "localhost.evil.example",
            "evil-localhost",
            "127.0.0.1.evil.example",
            "ops.example.evil.example",
            "sub.ops.example",
            "192.0.2.7",
            "[2001:db8::7]",
            "0.0.0.0",
            "",
            " ",
            "evil.example@127.0.0.1",
            "127.0.0.1@evil.example",
            "[::1",
            "localhost/",
            "..",
        ] {
            assert_eq!(asked("127.0.0.1:9394", "/", &[host]), Err(Misdirected::OtherHost(host.into())), "{host}");
        }
        assert_eq!(asked("127.0.0.1:9394", "/", &[]), Err(Misdirected::NoHost));
        let other = Err(Misdirected::OtherHost("evil.example".into()));
        assert_eq!(asked("127.0.0.1:9394", "http://evil.example/", &["localhost"]), other);
        assert_eq!(asked("127.0.0.1:9394", "http://localhost/", &["evil.example"]), other);
        assert_eq!(asked("127.0.0.1:9394", "/", &["localhost", "evil.example"]), other);
        assert_eq!(asked("0.0.0.0:9394", "/", &["evil.example"]), other);
    }
}
