//! Compares the policies on short generated traffics.

use std::panic::resume_unwind;
use std::thread;

use vmmgraph_elastic_sim::metrics::Row;
use vmmgraph_elastic_sim::report::{picture, table};
use vmmgraph_elastic_sim::run::{Kind, Setup};
use vmmgraph_elastic_sim::traffic::{GENERATORS, Generator};

const SECONDS: f64 = 30.0;

fn rows(generator: &Generator) -> [Row; 6] {
    let setup = Setup::default();
    let requests = generator.requests(SECONDS, 1);
    let row = |kind: Kind| -> Row {
        let outcome = setup.run(kind, &requests, &mut |_| ()).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(outcome.requests.len(), requests.len(), "all are over");
        assert!(
            outcome.checks as usize > outcome.exposed.len()
                && outcome.preempted < outcome.exposed.len() as u64
        );
        outcome.row(generator.name, kind.name())
    };
    let [split, demand, alike, policies, leases, oracle] =
        [Kind::Static, Kind::OnDemand, Kind::NothingAhead, Kind::Policies, Kind::Lending, Kind::Oracle]
            .map(row);
    let all = [&split, &demand, &alike, &policies, &leases, &oracle];
    let name = generator.name;
    assert!(all.iter().all(|row| row.refused == 0), "{name}: all serve everybody");
    // Less than half of the exposed mapping without work ahead.
    for other in [&demand, &alike] {
        assert!(policies.exposed_mean_us < other.exposed_mean_us / 2.0, "{name}: {policies:?} {other:?}");
        assert!(
            policies.exposed_p99_us < other.exposed_p99_us && policies.stalled < other.stalled,
            "{name}: {policies:?} {other:?}"
        );
        assert!(policies.twice < other.twice, "{name}: {policies:?} {other:?}");
    }
    assert!(oracle.exposed_mean_us == 0.0 && oracle.stalled == 0 && split.maps == 0);
    assert!(demand.attained <= policies.attained, "{name}: {demand:?} {policies:?}");
    // The oracle is the best of many schedules: it may miss a request or two.
    assert!(policies.attained <= 1.01 * oracle.attained, "{name}: {policies:?} {oracle:?}");
    assert!(policies.attained >= 0.9 * oracle.attained, "{name}: {policies:?} {oracle:?}");
    assert!(policies.peak_gib <= 12.0 && demand.peak_gib <= 12.0 && leases.peak_gib <= 12.0);
    // With leases, allowing for one request: three percent of the 33 long contexts.
    let one = 1.0 / requests.len() as f64;
    assert!(
        demand.attained <= leases.attained && leases.attained + one >= 0.9 * oracle.attained,
        "{name}: {demand:?} {leases:?}"
    );
    all.map(Clone::clone)
}

#[test]
fn policies_lie_between_on_demand_and_an_oracle_on_every_traffic() {
    let rows: Vec<Row> = thread::scope(|scope| {
        let running = GENERATORS.each_ref().map(|generator| scope.spawn(|| rows(generator)));
        running
            .into_iter()
            .flat_map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic)))
            .collect()
    });
    let (text, svg) = (table(&rows), picture(&rows));
    assert_eq!(text.lines().count(), 2 + rows.len());
    assert!(svg.starts_with("<svg") && svg.matches("<title>").count() == 2 * rows.len());
}

#[test]
fn the_same_seed_leads_to_the_same_run() {
    let setup = Setup::default();
    let requests = GENERATORS[5].requests(15.0, 3);
    let run = || {
        let row = setup.run(Kind::Policies, &requests, &mut |_| ()).unwrap().row("", "");
        serde_json::to_string(&row).unwrap()
    };
    assert_eq!(run(), run());
}

#[test]
fn planes_apart_cost_more_calls_and_the_policies_hide_more_of_them() {
    let setup = Setup { layout: vmmgraph::KvLayout::ByPlane, audit: false, ..Setup::default() };
    let requests = GENERATORS[0].requests(6.0, 1);
    let row = |kind: Kind| setup.run(kind, &requests, &mut |_| ()).unwrap().row("", "");
    let (demand, policies) = (row(Kind::OnDemand), row(Kind::Policies));
    assert!(policies.exposed_mean_us < demand.exposed_mean_us / 2.0, "{policies:?} {demand:?}");
    assert!(policies.attained >= demand.attained, "{policies:?} {demand:?}");
}
