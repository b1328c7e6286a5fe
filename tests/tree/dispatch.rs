//! A step through the dispatcher (decision, counters, usage order, inputs) makes no allocation.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use vmmgraph::dispatch::{
    Action, Axis, BucketSet, Dispatcher, DispatcherOptions, Dtype, Extent, Input, InputPlan, Key, PadRule,
    Phase, Reason, Step, StepInput, Weights, xllm_sizes,
};

struct Counting;

thread_local!(static ALLOCATIONS: Cell<u64> = const { Cell::new(0) });

// SAFETY: the system's allocator does the work, with the same contract.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // An ending thread has no counter.
        let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's contract; `System` allocated the pointer.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn allocations() -> u64 {
    ALLOCATIONS.with(Cell::get)
}

#[test]
fn a_step_allocates_nothing() {
    let key = |size| Key::tokens(size).with(Axis::Batch, size);
    let buckets = BucketSet::new(xllm_sizes(256).into_iter().map(key), Weights::default()).unwrap();
    let inputs = vec![
        Input::host("tokens", Dtype::I32, &[Extent::along(Axis::Tokens)]),
        Input::host("kv_seq_lens", Dtype::I32, &[Extent::offsets(Axis::Batch)])
            .padded_with(PadRule::RepeatLast),
    ];
    let plan = InputPlan::new(inputs, &buckets, 512).unwrap();
    let mut staging = vec![0_u8; plan.staging_bytes() as usize];
    let data = [1_u8; 4 * 257];
    let dispatcher = Dispatcher::new(buckets.clone(), buckets.clone(), DispatcherOptions::default());
    for (slot, ..) in dispatcher.slots().collect::<Vec<_>>() {
        dispatcher.begin_capture(slot).unwrap();
        dispatcher.captured(slot).unwrap();
    }

    let before = allocations();
    for tokens in 1..=300 {
        let key = Key::tokens(tokens).with(Axis::Batch, tokens);
        let decision = dispatcher.dispatch(&Step { key, phase: Phase::Decode, capturable: true });
        let Action::Replay(slot, bucket) = decision.action else {
            assert!(tokens > 256 && decision.reason == Reason::TooLarge);
            continue;
        };
        assert!(bucket.covers(&key) && dispatcher.least_recently_used(None) != Some(slot));
        let layout = buckets.find(&bucket).and_then(|number| plan.layout(number)).unwrap();
        assert_eq!(layout.key(), bucket);
        let shapes = [[tokens], [tokens + 1]];
        let step = [0, 1].map(|input| {
            let shape = &shapes[input];
            StepInput { input, dtype: Dtype::I32, shape, data: &data[..shape[0] as usize * 4] }
        });
        assert_eq!(plan.pack_step(layout, &step, &mut staging).unwrap(), layout.host_bytes());
    }
    assert_eq!(allocations() - before, 0);
    let text = dispatcher.prometheus(&[]);
    assert!(allocations() > before, "the counter does not count");
    assert!(text.contains("mode=\"eager\",reason=\"too_large\"} 44\n"), "{text}");
}
