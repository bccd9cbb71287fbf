//! A worker's HTTP pages, and the metrics on one of them.

use std::collections::BTreeMap;

use order_timeout::Settings;
use order_timeout::config::Listen;
use order_timeout::http::{self, METRICS};

use crate::{RunningWorker, TIMEOUT, wait_for};

/// Has the worker serve its pages at a free port.
pub fn serve_http(settings: &mut Settings) {
    settings.http.listen = Listen(Some(([127, 0, 0, 1], 0).into()));
}

/// A page of the worker, as status and body.
pub async fn get(worker: &RunningWorker, path: &str) -> (u16, String) {
    http::get(worker.http.expect("the worker serves its pages"), path, TIMEOUT).await.unwrap()
}

/// The values of `/metrics` by series.
pub struct Figures {
    /// The page.
    pub text: String,
    series: BTreeMap<String, f64>,
}

impl Figures {
    /// What the worker says now.
    pub async fn of(worker: &RunningWorker) -> Self {
        let (status, text) = get(worker, METRICS).await;
        assert_eq!(status, 200, "{text}");
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        let series = lines.map(|line| line.rsplit_once(' ').expect("a value after each series"));
        let series =
            series.map(|(name, value)| (without_default_kind(name), value.parse().expect("a number"))).collect();
        Self { text, series }
    }

    /// The value of this series, named without the prefix `order_timeout_`, and without the label `kind` if that is `order`.
    pub fn get(&self, series: &str) -> f64 {
        self.find(series).unwrap_or_else(|| panic!("no order_timeout_{series} in\n{}", self.text))
    }

    /// Like [`Self::get`]; `None` if the series is absent.
    pub fn find(&self, series: &str) -> Option<f64> {
        self.series.get(&format!("order_timeout_{series}")).copied()
    }
}

fn without_default_kind(series: &str) -> String {
    let label = "kind=\"order\"";
    let shortened = series.replace(&format!("{label},"), "").replace(&format!(",{label}"), "");
    shortened.replace(&format!("{{{label}}}"), "")
}

/// Waits until the worker has this series, with an expected value.
pub async fn wait_for_figure(worker: &RunningWorker, series: &str, expected: impl Fn(f64) -> bool) {
    wait_for(series, async || Figures::of(worker).await.find(series).is_some_and(&expected)).await;
}
