//! Three RabbitMQ nodes that form a cluster, created and removed by `scripts/cluster`.

use std::path::{Path, PathBuf};
use std::process::Command;

use uuid::Uuid;

/// Removed when dropped.
pub struct Cluster {
    dir: PathBuf,
    /// The ports of the nodes 1, 2 and 3.
    pub ports: Vec<u16>,
    /// The first node's; the account is the same on the others.
    pub url: String,
}

impl Cluster {
    pub fn start() -> Self {
        let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("cluster-{}", Uuid::now_v7().simple()));
        let mut cluster = Self { dir, ports: Vec::new(), url: String::new() };
        let printed = cluster.call("start", &[]);
        let port = |url: &str| url::Url::parse(url).ok().and_then(|url| url.port()).expect("an address with a port");
        cluster.ports = printed.lines().map(port).collect();
        assert_eq!(cluster.ports.len(), 3, "an address for each node");
        cluster.url = printed.lines().next().expect("three lines").to_owned();
        cluster
    }

    /// The release of the running nodes.
    pub fn version(&self) -> String {
        self.call("version", &[]).trim().to_owned()
    }

    /// The node, 1 to 3, that leads this quorum queue.
    pub fn leader(&self, queue: &str) -> usize {
        self.call("leader", &[queue]).trim().parse().expect("a node's number")
    }

    /// kill -9.
    pub fn kill(&self, node: usize) {
        self.call("kill", &[&node.to_string()]);
    }

    /// The queues with dead letters that are not handed over, and their counts.
    pub fn stuck(&self) -> Vec<(String, usize)> {
        let printed = self.call("stuck", &[]);
        let queue = |line: &str| line.split_once(' ').map(|(name, count)| (name.to_owned(), count.parse().unwrap()));
        printed.lines().filter_map(queue).collect()
    }

    /// Makes another node the leader of this queue.
    pub fn move_leader(&self, queue: &str) {
        self.call("move-leader", &[queue]);
    }

    /// Restarts a node, and waits until every queue has all its members again.
    pub fn bring_back(&self, node: usize) {
        self.call("restart", &[&node.to_string()]);
        self.call("await-whole", &[]);
    }

    /// The ports, with this node's first.
    pub fn ports_from(&self, node: usize) -> Vec<u16> {
        let mut ports = self.ports.clone();
        ports.rotate_left(node - 1);
        ports
    }

    fn call(&self, verb: &str, arguments: &[&str]) -> String {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/cluster");
        let output = Command::new(script).arg(verb).arg(&self.dir).args(arguments).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "scripts/cluster {verb} failed: {stderr}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/cluster");
        let _ = Command::new(script).arg("remove").arg(&self.dir).output();
    }
}
