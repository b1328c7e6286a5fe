//! Random operations of the simulated memory against a simple model, also with every driver call
//! failing once.

use std::collections::BTreeSet;
use std::sync::Arc;

use proptest::prelude::*;
use vmmgraph::driver::HostDriver;
use vmmgraph::{Device, HostOptions, KvLayout};
use vmmgraph_elastic_sim::memory::{Hint, Lent, Memory, Paged, Settings, Way};
use vmmgraph_elastic_sim::model::Model;
use vmmgraph_testkit::{FaultyDriver, MIB};

const PAGES: u64 = 24;
const PAGE: u64 = 18 * MIB;

#[derive(Clone, Debug)]
enum Step {
    /// A prefill: activations in pages, blocks, and the hint about the next prefill.
    Prefill(u64, u64, u64, u64),
    /// A decode step with this many new blocks, and the hint about the next prefill.
    Decode(u64, u64, u64),
    /// A sequence ends.
    End(usize),
    /// No work for this long.
    Idle(u64),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        4 => (0..PAGES + 2, 1_u64..90, 0..PAGES, 0_u64..60).prop_map(|(a, b, c, d)| Step::Prefill(a, b, c, d)),
        4 => (0_u64..12, 0..PAGES, 0_u64..60).prop_map(|(a, b, c)| Step::Decode(a, b, c)),
        3 => (0_usize..8).prop_map(Step::End),
        1 => (1_u64..20).prop_map(Step::Idle),
    ];
    prop::collection::vec(step, 1..40)
}

#[derive(Default)]
struct Twin {
    sequences: Vec<Vec<u64>>,
}

impl Twin {
    fn used(&self) -> impl Iterator<Item = u64> {
        self.sequences.iter().flatten().copied()
    }

    fn pages(&self) -> (u64, u64) {
        let pages: BTreeSet<u64> = self.used().map(|block| block / 8).collect();
        (pages.len() as u64, pages.len() as u64 * 8 - self.used().count() as u64)
    }

    fn fits(&self, activations: u64, blocks: u64) -> bool {
        let (pages, room) = self.pages();
        pages + activations + blocks.saturating_sub(room).div_ceil(8) <= PAGES
    }

    fn takes(&mut self, blocks: Vec<u64>, count: u64) {
        assert_eq!(blocks.len() as u64, count, "granted blocks are there");
        let used: BTreeSet<u64> = self.used().collect();
        assert!(blocks.iter().all(|block| !used.contains(block)), "a block for two");
        self.sequences.push(blocks);
    }
}

#[derive(Clone, Copy, Debug)]
enum Held {
    By(Way),
    /// With leases of graphs with up to this many pages.
    Leases(u64),
}

fn quick() -> Settings {
    Settings { residence: 3, lead: 2, ..Settings::default() }
}

fn make(driver: Arc<FaultyDriver>, way: Held, layout: KvLayout) -> (Box<dyn Memory>, Arc<Device>) {
    let (model, budget) = (Model::default(), PAGES * PAGE);
    match way {
        Held::By(way) => {
            let memory = Paged::new(driver, &model, budget, layout, way).unwrap();
            let device = memory.device().clone();
            (Box::new(memory), device)
        }
        Held::Leases(pages) => {
            let memory = Lent::new(driver, &model, budget, pages * PAGE, quick()).unwrap();
            let device = memory.device().clone();
            (Box::new(memory), device)
        }
    }
}

/// Runs steps with failing driver calls; returns the number of calls.
fn run(steps: &[Step], way: Held, layout: KvLayout, fail: &[u64]) -> u64 {
    let host = Arc::new(
        HostDriver::new(0, HostOptions { memory_bytes: PAGES * PAGE, ..HostOptions::default() }).unwrap(),
    );
    let faulty = FaultyDriver::new(host.clone());
    let (mut memory, device) = make(faulty.clone(), way, layout);
    faulty.arm(fail);
    let (mut twin, mut now) = (Twin::default(), 0);
    for step in steps {
        let check = |memory: &dyn Memory, twin: &Twin| {
            memory
                .check(&mut twin.used())
                .unwrap_or_else(|error| panic!("{way:?} {step:?}, failing {fail:?}: {error}"));
        };
        let mut begin =
            |memory: &mut dyn Memory, twin: &mut Twin, activations: u64, blocks: u64, prompt: bool| {
                let bytes = activations * PAGE;
                let room = memory.room(bytes);
                let granted =
                    if prompt { memory.grant(now, 0, bytes, blocks) } else { memory.extend(now, blocks) };
                check(memory, twin);
                if fail.is_empty() {
                    let possible = memory.possible(bytes, 0) && room >= blocks;
                    assert_eq!(granted.is_some(), possible, "{way:?} {step:?}");
                    match way {
                        Held::By(Way::Static(_)) => {}
                        // Blocks move: the minimum number of pages is known, not the actual number.
                        Held::Leases(most) => {
                            let pages = (twin.used().count() as u64 + blocks).div_ceil(8);
                            assert!(granted.is_none() || activations <= most && pages + activations <= PAGES);
                        }
                        Held::By(_) if layout == KvLayout::ByBlock => {
                            assert_eq!(granted.is_some(), twin.fits(activations, blocks), "{way:?} {step:?}");
                        }
                        Held::By(_) => {}
                    }
                }
                if granted.is_some() {
                    let taken = memory.allocate(blocks);
                    twin.takes(taken, blocks);
                    check(memory, twin);
                } else {
                    memory.forget(0);
                }
                now += granted.unwrap_or(0);
                granted.is_some()
            };
        match *step {
            Step::Prefill(activations, blocks, next, soon) => {
                if begin(memory.as_mut(), &mut twin, activations, blocks, true) {
                    memory.ahead(now, &Hint { until: now + 100, activations: next * PAGE, blocks: soon });
                    check(memory.as_ref(), &twin);
                    now += 2_000_000;
                    memory.step_over(now);
                }
            }
            Step::Decode(blocks, next, soon) => {
                if begin(memory.as_mut(), &mut twin, 0, blocks, false) {
                    memory.ahead(now, &Hint { until: now + 100, activations: next * PAGE, blocks: soon });
                    check(memory.as_ref(), &twin);
                    now += 100_000;
                    memory.step_over(now);
                }
            }
            Step::End(who) if !twin.sequences.is_empty() => {
                let blocks = twin.sequences.swap_remove(who % twin.sequences.len());
                memory.free(now, &blocks);
            }
            Step::End(_) => {}
            Step::Idle(ticks) => {
                for _ in 0..ticks {
                    now += 10_000_000;
                    memory.ahead(now, &Hint::default());
                }
            }
        }
        check(memory.as_ref(), &twin);
    }
    let calls = faulty.calls();
    faulty.arm(&[]);
    drop(memory);
    device.trim().unwrap();
    assert_eq!(device.pool().audit_idle(), Ok(()));
    drop(device);
    assert_eq!(host.leftovers(), [0; 4]);
    calls
}

fn ways() -> [Held; 5] {
    [
        Held::By(Way::Static(PAGES / 3 * PAGE)),
        Held::By(Way::OnDemand),
        Held::By(Way::Policies(quick())),
        Held::Leases(PAGES / 2),
        Held::Leases(PAGES),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn memory_does_what_a_naive_twin_says(steps in steps()) {
        for way in ways() {
            run(&steps, way, KvLayout::ByBlock, &[]);
        }
    }

    #[test]
    fn planes_apart_hold_the_same_rules(steps in steps()) {
        run(&steps, Held::By(Way::Policies(Settings { residence: 3, ..Settings::default() })), KvLayout::ByPlane, &[]);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_driver_call_fails_once_and_all_still_holds(steps in steps()) {
        for way in ways() {
            let calls = run(&steps, way, KvLayout::ByBlock, &[]);
            for call in 1..=calls {
                run(&steps, way, KvLayout::ByBlock, &[call]);
            }
        }
    }
}
