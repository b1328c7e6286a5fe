//! Short blocks become persistent if blocks of earlier captures were live-out at the same point.

use std::sync::Arc;

use vmmgraph::{Address, Space, Stream, VmmTorchAllocator};
use vmmgraph_testkit::{Bench, MIB, stream};

const A: Stream = stream(0xa0);
const KIB: u64 = 1 << 10;

struct Capture {
    space: Arc<Space>,
    blocks: VmmTorchAllocator,
    outputs: Vec<(Address, u64)>,
}

impl Capture {
    fn begin(bench: &Bench, learns: bool) -> Self {
        let space = bench.arena.open_space().unwrap();
        let blocks = VmmTorchAllocator::new(&space);
        blocks.launch_by_replay_only(true);
        if learns {
            blocks.predict_retained();
        }
        Self { space, blocks, outputs: Vec::new() }
    }

    fn allocate(&self, bytes: u64) -> Address {
        self.blocks.allocate(bytes, A, false).unwrap()
    }

    fn free(&self, at: Address) {
        self.blocks.free(at, &[A]).unwrap();
    }

    fn run(mut self, size: u64) -> Self {
        for layer in 0..3 {
            let [wide, narrow] = [40 * size, 3 * size].map(|bytes| self.allocate(bytes));
            self.free(wide);
            if layer > 0 {
                let output = self.allocate(size);
                self.outputs.push((output, size));
            }
            self.free(narrow);
        }
        self
    }

    fn sealed(self) -> Self {
        self.space.seal().unwrap();
        self
    }

    fn drop_outputs(&mut self) {
        for (at, _) in std::mem::take(&mut self.outputs) {
            self.free(at);
        }
    }

    fn own(&self) -> u64 {
        self.space.stats().retained_bytes
    }
}

#[test]
fn outputs_of_all_captures_but_the_first_lie_packed() {
    let held = |learns: bool| {
        let bench = Bench::new(A);
        let all: Vec<Capture> =
            (1..=40).map(|size| Capture::begin(&bench, learns).run(size * KIB).sealed()).collect();
        let own: Vec<u64> = all.iter().map(Capture::own).collect();
        for (number, one) in all.iter().enumerate() {
            for (at, bytes) in &one.outputs {
                bench.stamps.write(*at, *bytes, number as u32 + 1).unwrap();
            }
        }
        for one in &all {
            one.space.replay(A, || ()).unwrap();
        }
        for (number, one) in all.iter().enumerate() {
            for (at, bytes) in &one.outputs {
                assert!(bench.stamps.holds(*at, *bytes, number as u32 + 1).unwrap());
            }
        }
        assert_eq!(bench.arena.audit(), Ok(()));
        let held = bench.arena.stats().physical_bytes;
        drop(all);
        bench.end();
        (held, own)
    };
    let ((packed, own), (apart, each)) = (held(true), held(false));
    assert!(own[0] > 0 && own[1..].iter().all(|own| *own == 0), "{own:?}");
    assert!(each.iter().all(|own| *own > 0));
    assert!(packed + 37 * 2 * MIB <= apart, "{packed} and {apart}");
}

#[test]
fn another_way_is_expected_nothing_of() {
    let bench = Bench::new(A);
    let first = Capture::begin(&bench, true).run(KIB).sealed();
    let other = Capture::begin(&bench, true);
    let blocks = [40, 3].map(|size| other.allocate(size * KIB));
    for at in blocks {
        other.free(at);
    }
    let [wide, narrow] = [40, 3].map(|size| other.allocate(size * KIB));
    other.free(narrow);
    let passing = other.allocate(KIB);
    other.free(wide);
    assert_eq!(other.space.stats().kept_bytes, 0);
    other.free(passing);
    let other = other.sealed();
    assert_eq!((other.own(), other.space.stats().kept_bytes), (0, 0));
    let second = Capture::begin(&bench, true).run(2 * KIB).sealed();
    assert_eq!((second.own(), second.space.stats().kept_bytes), (0, 2 * 2 * KIB));
    drop((first, other, second));
    bench.end();
}

#[test]
fn where_one_goes_before_its_first_launch_none_is_kept() {
    let bench = Bench::new(A);
    for _ in 0..6 {
        let mut one = Capture::begin(&bench, true).run(KIB).sealed();
        assert_eq!(one.space.stats().kept_bytes, 0);
        one.drop_outputs();
    }
    bench.end();
    // One variable for all outputs: each output is freed during the next capture, which may read
    // it, so its mapping is not restored.
    let bench = Bench::new(A);
    let mut last: Option<Capture> = None;
    for number in 0..6 {
        let one = Capture::begin(&bench, true).run(KIB);
        assert_eq!(one.space.stats().kept_bytes, if number == 0 { 0 } else { 2 * KIB });
        last.iter_mut().for_each(Capture::drop_outputs);
        last = Some(one.sealed());
    }
    drop(last);
    bench.end();
    let bench = Bench::new(A);
    for kept in [0, 2 * KIB, 2 * KIB] {
        let mut one = Capture::begin(&bench, true).run(KIB).sealed();
        assert_eq!(one.space.stats().kept_bytes, kept);
        one.space.replay(A, || ()).unwrap();
        one.drop_outputs();
    }
    bench.end();
}

#[test]
fn one_that_passes_after_all_is_not_expected_again() {
    let bench = Bench::new(A);
    let first = Capture::begin(&bench, true).run(KIB).sealed();
    let mut second = Capture::begin(&bench, true).run(KIB);
    assert_eq!(second.space.stats().kept_bytes, 2 * KIB);
    second.drop_outputs();
    let second = second.sealed();
    let third = Capture::begin(&bench, true).run(KIB).sealed();
    assert_eq!(third.space.stats().kept_bytes, 0);
    assert!(third.own() > 0);
    drop((first, second, third));
    bench.end();
}

#[test]
fn long_ones_and_those_of_others_stay_as_they_are() {
    let bench = Bench::new(A);
    let first = Capture::begin(&bench, true).run(KIB).sealed();
    let long = Capture::begin(&bench, true).run(MIB + 1).sealed();
    assert_eq!(long.space.stats().kept_bytes, 0);
    let not_asked = Capture::begin(&bench, false).run(KIB).sealed();
    assert_eq!(not_asked.space.stats().kept_bytes, 0);
    let other = Bench::new(A);
    let elsewhere = Capture::begin(&other, true).run(KIB).sealed();
    assert_eq!(elsewhere.space.stats().kept_bytes, 0);
    drop((first, long, not_asked, elsewhere));
    other.end();
    bench.end();
}
