//! A headless Chromium of one test, driven through WebDriver. It loads nothing but the worker's page.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;

use order_timeout_testkit::linux::{self, Signal, children_of};
use order_timeout_testkit::paths::repository;
use order_timeout_testkit::skip::skipped;
use order_timeout_testkit::wait_for;
use serde_json::{Value, json};
use thirtyfour::cdp::domains::emulation::{MediaFeature, SetDeviceMetricsOverride, SetEmulatedMedia};
use thirtyfour::common::keys::Key;
use thirtyfour::error::WebDriverErrorInner;
use thirtyfour::extensions::query::ElementQueryable;
use thirtyfour::{By, ChromiumLikeCapabilities, DesiredCapabilities, WebDriver};

/// Pixels, as a small laptop has.
const DESKTOP: (u32, u32) = (1_100, 900);
/// CSS pixels of a usual phone.
pub const PHONE: (u32, u32) = (390, 844);
/// Elements that Tab reaches on one page at most.
const MOST_STOPS: usize = 80;

/// Ends the driver, and browsers that it left behind.
struct Chromedriver(Child);

impl Chromedriver {
    /// Starts it at a free port, which it prints.
    fn start() -> (Self, u16) {
        let mut command = Command::new("chromedriver");
        let child = command.arg("--port=0").stdout(Stdio::piped()).stderr(Stdio::null()).spawn();
        let mut driver = Self(child.expect("chromedriver starts"));
        let lines = BufReader::new(driver.0.stdout.take().expect("its output")).lines();
        let port = lines.map_while(Result::ok).find_map(|line| {
            let (_, port) = line.split_once("successfully on port ")?;
            port.trim_end_matches('.').parse().ok()
        });
        (driver, port.expect("chromedriver says its port"))
    }
}

impl Drop for Chromedriver {
    fn drop(&mut self) {
        for browser in children_of(self.0.id()).unwrap_or_default() {
            let _ = linux::signal(browser, Signal::KILL);
        }
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A window with the page. Its driver ends it.
pub struct Browser {
    _driver: Chromedriver,
    window: WebDriver,
    site: String,
    /// The test that it belongs to, for reports of what was skipped.
    test: &'static str,
}

fn is_on_path(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| folder.join(program).is_file())
}

/// Whether the tests write the pictures in `docs/images`.
pub fn are_pictures_wanted() -> bool {
    std::env::var_os("ORDER_TIMEOUT_SCREENSHOTS").is_some()
}

/// Whether this machine has a browser; reports the test as skipped if not.
pub fn is_installed(test: &str) -> bool {
    let missing = ["chromium", "chromedriver"].into_iter().find(|program| !is_on_path(program));
    if let Some(program) = missing {
        skipped(
            test,
            &format!("{program} is not installed; `scripts/services install chromium chromium-driver` does that"),
        );
    }
    missing.is_none()
}

impl Drop for Browser {
    fn drop(&mut self) {
        // The library would ask the driver to close the window, and block this thread until it answers.
        let _ = self.window.clone().leak();
    }
}

impl Browser {
    /// Opens a window for the page at this address.
    pub async fn open(site: SocketAddr, test: &'static str) -> Self {
        let (driver, port) = Chromedriver::start();
        let mut wanted = DesiredCapabilities::chrome();
        for argument in [
            "--headless=new",
            // As root, as which CI runs, Chromium refuses to start with its sandbox; it loads our own page only.
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            "--disable-component-update",
            "--no-first-run",
        ] {
            wanted.add_arg(argument).unwrap();
        }
        let window = WebDriver::new(format!("http://127.0.0.1:{port}"), wanted).await.expect("a window");
        let browser = Self { window, _driver: driver, site: format!("http://{site}"), test };
        browser.resize(DESKTOP, false).await;
        browser
    }

    async fn resize(&self, (width, height): (u32, u32), mobile: bool) {
        let metrics = SetDeviceMetricsOverride {
            width,
            height,
            device_scale_factor: 1.0,
            mobile,
            scale: None,
            screen_orientation: None,
        };
        self.window.cdp().send(metrics).await.unwrap();
    }

    /// As on a phone.
    pub async fn be_phone(&self) {
        self.resize(PHONE, true).await;
    }

    /// As with the system's dark scheme.
    pub async fn be_dark(&self, is_dark: bool) {
        let value = if is_dark { "dark" } else { "light" }.to_owned();
        let scheme = MediaFeature { name: "prefers-color-scheme".to_owned(), value };
        self.window.cdp().send(SetEmulatedMedia { media: None, features: Some(vec![scheme]) }).await.unwrap();
    }

    /// Loads a page of the worker.
    pub async fn visit(&self, path: &str) {
        self.window.goto(format!("{}{path}", self.site)).await.unwrap();
    }

    /// Marks the page as it is now: one that is loaded again has no mark.
    pub async fn mark(&self) {
        self.run("window.isFirst = true;", Vec::new()).await;
    }

    /// The marked page was not loaded again.
    pub async fn assert_not_loaded_again(&self) {
        assert_eq!(self.run("return window.isFirst === true;", Vec::new()).await, json!(true));
    }

    /// The address's part behind the host.
    pub async fn path(&self) -> String {
        let url = self.window.current_url().await.unwrap();
        url.as_str().strip_prefix(&self.site).unwrap_or(url.as_str()).to_owned()
    }

    /// What is visible of the first element that the selector finds; empty if there is none.
    pub async fn text(&self, selector: &str) -> String {
        let script = "const found = document.querySelector(arguments[0]); return found ? found.innerText : '';";
        self.run(script, vec![json!(selector)]).await.as_str().unwrap_or_default().to_owned()
    }

    /// Waits until the element shows this text.
    pub async fn wait_for_text(&self, selector: &str, text: &str) {
        wait_for(text, async || self.text(selector).await.contains(text)).await;
    }

    /// Runs a script in the page.
    pub async fn run(&self, script: &str, arguments: Vec<Value>) -> Value {
        self.window.execute(script.to_owned(), arguments).await.unwrap().json().clone()
    }

    /// Clicks the first element that the selector finds. The page replaces its sections when something changes, also
    /// between finding an element and clicking on it.
    pub async fn click(&self, selector: &str) {
        wait_for(selector, async || {
            let found = self.window.query(By::Css(selector)).first().await.unwrap();
            match found.click().await {
                Err(error) if matches!(error.as_inner(), WebDriverErrorInner::StaleElementReference(_)) => false,
                clicked => {
                    clicked.unwrap();
                    true
                }
            }
        })
        .await;
    }

    /// Types into the element that has the focus.
    pub async fn type_text(&self, text: &str) {
        self.window.action_chain().send_keys(text).perform().await.unwrap();
    }

    /// Presses a key.
    pub async fn press(&self, key: Key) {
        self.type_text(&char::from(key).to_string()).await;
    }

    /// What a screen reader would call the element with the focus, about.
    pub async fn focused(&self) -> String {
        let script = "const e = document.activeElement; const label = e.labels && e.labels[0];
            return e.getAttribute('aria-label') || (label && label.innerText) || e.innerText || e.name || e.tagName;";
        self.run(script, Vec::new()).await.as_str().unwrap_or_default().trim().to_owned()
    }

    /// Presses Tab until the element of this name has the focus, which must be visible then.
    pub async fn tab_to(&self, name: &str) {
        let mut passed = Vec::new();
        for _ in 0..MOST_STOPS {
            self.press(Key::Tab).await;
            let focused = self.focused().await;
            if focused == name {
                let outline = "return getComputedStyle(document.activeElement).outlineStyle;";
                assert_ne!(self.run(outline, Vec::new()).await, json!("none"), "{name} does not show its focus");
                return;
            }
            passed.push(focused);
        }
        panic!("Tab does not reach {name:?}, only {passed:?}");
    }

    /// The width that a phone would have to scroll to.
    pub async fn overhang(&self) -> i64 {
        self.run("return document.documentElement.scrollWidth - window.innerWidth;", Vec::new()).await.as_i64().unwrap()
    }

    /// Errors in the browser's console, such as what the page's policy has refused.
    pub async fn console_errors(&self) -> Vec<String> {
        let entries = self.window.browser_log().await.unwrap();
        let errors = entries.into_iter().filter(|entry| format!("{:?}", entry.level).to_uppercase().contains("SEVERE"));
        errors.map(|entry| entry.message).collect()
    }

    /// Writes a picture of the whole page into `docs/images`, if [`are_pictures_wanted`].
    pub async fn picture(&self, name: &str) {
        self.picture_of_top(&format!("page-{name}"), u32::MAX).await;
    }

    /// The same of so many pixels from its top at most.
    pub async fn picture_of_top(&self, file: &str, height: u32) {
        if !are_pictures_wanted() {
            return;
        }
        let size = self.run("return [window.innerWidth, document.documentElement.scrollHeight];", Vec::new()).await;
        let side = |at: usize| u32::try_from(size[at].as_u64().unwrap()).unwrap();
        let is_phone = side(0) == PHONE.0;
        self.resize((side(0), side(1).min(height)), is_phone).await;
        self.window.screenshot(&repository().join(format!("docs/images/{file}.png"))).await.unwrap();
        self.resize(if is_phone { PHONE } else { DESKTOP }, is_phone).await;
    }

    /// Has axe-core look for barriers in the page as it is now: there must be no serious or critical one.
    pub async fn assert_accessible(&self) {
        let Some(axe) = axe(self.test) else { return };
        self.run(&format!("{axe}; return true;"), Vec::new()).await;
        let script = "const done = arguments[arguments.length - 1];
            axe.run(document, { resultTypes: ['violations'] }).then(found => done(found.violations.map(one =>
                [one.impact, one.id, one.help, one.nodes.map(node => node.html).slice(0, 3)])));";
        let found = self.window.execute_async(script.to_owned(), Vec::new()).await.unwrap().json().clone();
        let serious = |one: &&Value| ["serious", "critical"].contains(&one[0].as_str().unwrap_or("critical"));
        let barriers: Vec<_> = found.as_array().expect("a list").iter().filter(serious).collect();
        assert!(barriers.is_empty(), "{}: {barriers:#?}", self.path().await);
    }
}

/// axe-core's text, fetched once; `None`, and the test reported as skipped in part, if it cannot be had.
fn axe(test: &str) -> Option<&'static str> {
    static AXE: OnceLock<Result<String, String>> = OnceLock::new();
    let fetch = || {
        let output = Command::new(repository().join("scripts/axe")).output().map_err(|error| error.to_string())?;
        let say = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
        match output.status.success() {
            true => std::fs::read_to_string(Path::new(&say(&output.stdout))).map_err(|error| error.to_string()),
            false => Err(say(&output.stderr).lines().last().unwrap_or_default().to_owned()),
        }
    };
    match AXE.get_or_init(fetch) {
        Ok(text) => Some(text),
        Err(why) => {
            skipped(test, &format!("axe-core could not be fetched, so nothing looked for barriers: {why}"));
            None
        }
    }
}
