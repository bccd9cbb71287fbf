//! A broker cluster that loses the leader of a queue, twice, under load: no alarm is lost, none closes an order twice
//! or early. Once without a sweep, which would hide a lost alarm, and once as deployed, for the figures.

use std::sync::Arc;
use std::time::{Duration, Instant};

use order_timeout::Settings;
use order_timeout_core::delay::Lane;
use order_timeout_testkit::away::keep_events;
use order_timeout_testkit::process::WorkerProcess;
use order_timeout_testkit::{TIMEOUT, TestEnv, alarms_alone, wait_promised, with_parts};
use time::OffsetDateTime;

use crate::cluster::Cluster;
use crate::forwarder::Forwarder;
use crate::traffic::{Taken, Traffic, assert_each_closed_once, by_sweep, database_time, print_lateness, unpaid};

const SECOND: Duration = Duration::from_secs(1);
/// Nine of ten through the lane, one through the wheel.
const DELAYS: [Duration; 10] = {
    let mut delays = [Duration::from_secs(10); 10];
    delays[9] = Duration::from_secs(8);
    delays
};
/// Orders that fall due within this time after a kill may be late because of it.
const AFTERMATH: Duration = Duration::from_secs(15);

/// Twice the longest time after which a queue's client repeats a request.
const BROKER_TIMEOUT: Duration = Duration::from_secs(20);

/// Alarms wait in the lane for eight seconds, so that thousands are in it at any moment.
fn one_busy_lane(settings: &mut Settings) {
    settings.delay.lanes = vec![Lane::try_from("10s".to_owned()).unwrap()];
    settings.delay.lead = 2 * SECOND;
    settings.worker.hold_max = 6 * SECOND;
}

/// Whether the sweep is enabled.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Sweep {
    /// The order of a lost alarm is never closed.
    Off,
    /// It keeps broker failures from making orders late.
    AsDeployed,
}

#[test]
fn lost_queue_leader_loses_no_alarm() {
    with_cluster(Sweep::Off);
}

#[test]
fn lost_queue_leader_closes_orders_once() {
    with_cluster(Sweep::AsDeployed);
}

fn with_cluster(sweep: Sweep) {
    let cluster = Arc::new(Cluster::start());
    // The queues are declared through node 1, which becomes their leader.
    let front = Arc::new(Forwarder::start(cluster.ports_from(1)));
    let (url, port) = (cluster.url.clone().into(), front.port);
    // Kept until the test environment is cleaned up.
    let _outlive = (cluster.clone(), front.clone());
    TestEnv::builder()
        .settings(|settings| {
            settings.amqp.url = with_parts(&url, None, Some(&format!("127.0.0.1:{port}")), None);
            one_busy_lane(settings);
            match sweep {
                Sweep::Off => alarms_alone(settings),
                Sweep::AsDeployed => settings.sweep = Settings::defaults().sweep,
            }
        })
        .run(async move |env| {
            lose_leaders(&env, &cluster, &front).await;
            assert!(sweep == Sweep::AsDeployed || by_sweep(&env).await == 0, "the sweep was off");
        });
}

async fn lose_leaders(env: &Arc<TestEnv>, cluster: &Cluster, front: &Forwarder) {
    // All connections use node 2: the first kill only causes an election.
    front.set_servers(cluster.ports_from(2));
    let workers = [WorkerProcess::start(&env.settings), WorkerProcess::start(&env.settings)];
    let kept_events = keep_events(env).await;
    let traffic = Traffic::start(env.clone(), &DELAYS).await;
    tokio::time::sleep(15 * SECOND).await;

    let queues = env.settings.topology().queues;
    let lane = queues.iter().find(|queue| queue.name.contains(".delay.10s")).expect("the lane's first queue");
    let first = kill_leader(env, cluster, &lane.name, "a lane").await;
    tokio::time::sleep(AFTERMATH).await;
    tokio::task::block_in_place(|| cluster.bring_back(first.node));

    // All connections move to the leader of the processing queue: the second kill ends them too.
    let processing = env.names().timeout();
    let leader = tokio::task::block_in_place(|| cluster.leader(&processing));
    front.set_servers(cluster.ports_from(leader));
    front.cut();
    tokio::time::sleep(15 * SECOND).await;
    let second = kill_leader(env, cluster, &processing, "the processing queue").await;
    assert_eq!(second.node, leader, "the node with all connections");
    tokio::time::sleep(AFTERMATH).await;

    let taken = traffic.stop().await;
    tokio::task::block_in_place(|| cluster.bring_back(leader));
    release_stuck_dead_letters(env, cluster).await;
    assert_each_closed_once(env, &taken, &kept_events).await;
    print(env, cluster, &taken, &[first, second]).await;
    for worker in workers {
        assert_eq!(worker.terminate(TIMEOUT), 0, "a worker drained in time");
    }
    env.reconnected().await.assert_drained().await;
}

/// A broker may stop handing over dead letters when the target loses its leader (docs/operating/deploy.md, "RabbitMQ
/// cluster"): they are safe, but nothing moves them until the source queue's leader changes.
async fn release_stuck_dead_letters(env: &TestEnv, cluster: &Cluster) {
    let began = Instant::now();
    while unpaid(env).await != Some(0) && began.elapsed() < BROKER_TIMEOUT {
        tokio::time::sleep(SECOND).await;
    }
    for (queue, dead_letters) in tokio::task::block_in_place(|| cluster.stuck()) {
        println!(
            "\n  {dead_letters} dead letters in {queue} were left alone by the broker, and wait for another leader"
        );
        tokio::task::block_in_place(|| cluster.move_leader(&queue));
    }
    let processing = env.names().timeout();
    let env = env.reconnected().await;
    wait_promised(BROKER_TIMEOUT, "every dead letter handed over and taken", async || {
        tokio::task::block_in_place(|| cluster.stuck()).is_empty() && env.depth(&processing).await == 0
    })
    .await;
}

struct Kill {
    what: &'static str,
    node: usize,
    at: OffsetDateTime,
}

async fn kill_leader(env: &TestEnv, cluster: &Cluster, queue: &str, what: &'static str) -> Kill {
    let node = tokio::task::block_in_place(|| cluster.leader(queue));
    let at = database_time(env).await;
    tokio::task::block_in_place(|| cluster.kill(node));
    Kill { what, node, at }
}

async fn print(env: &TestEnv, cluster: &Cluster, taken: &Taken, kills: &[Kill]) {
    println!(
        "\nRabbitMQ {}, three nodes: {} orders taken, {} alarms scheduled again after an error; each closed once, {} by the sweep",
        tokio::task::block_in_place(|| cluster.version()),
        taken.orders.len(),
        taken.scheduled_again,
        by_sweep(env).await
    );
    for kill in kills {
        print_lateness(env, &format!("before the leader of {} died", kill.what), kill.at - AFTERMATH, kill.at).await;
        let what = format!("{AFTERMATH:?} after (node {})", kill.node);
        print_lateness(env, &what, kill.at, kill.at + AFTERMATH).await;
    }
}
