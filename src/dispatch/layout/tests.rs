use proptest::prelude::*;

use super::*;
use crate::dispatch::{Axis, Dtype, Extent, PadRule, StepInput, Weights, xllm_sizes};

/// Inputs of a decoder with paged attention, for keys of tokens and batch.
fn decoder_inputs() -> Vec<Input> {
    let (tokens, batch) = (Extent::along(Axis::Tokens), Extent::along(Axis::Batch));
    let offsets = Extent::offsets(Axis::Batch);
    vec![
        Input::host("tokens", Dtype::I32, &[tokens]),
        Input::host("positions", Dtype::I32, &[tokens]),
        Input::host("paged_kv_indices", Dtype::I32, &[Extent::UpTo(256 * 2048)]),
        Input::host("new_cache_slots", Dtype::I32, &[tokens]).padded_with(PadRule::Value(u64::MAX)),
        Input::host("q_seq_lens", Dtype::I32, &[offsets]).padded_with(PadRule::RepeatLast),
        Input::host("kv_seq_lens", Dtype::I32, &[offsets]).padded_with(PadRule::RepeatLast),
        Input::host("block_tables", Dtype::I32, &[batch, Extent::along(Axis::Pages)]),
        Input::host("paged_kv_indptr", Dtype::I32, &[offsets]).padded_with(PadRule::RepeatLast),
        Input::host("paged_kv_last_page_len", Dtype::I32, &[batch]).padded_with(PadRule::Value(1)),
        Input {
            role: Role::DeviceInput,
            ..Input::host("embeddings", Dtype::BF16, &[tokens, Extent::Fixed(4096)])
        },
        Input::output("hidden_states", Dtype::BF16, &[tokens, Extent::Fixed(4096)]),
    ]
}

fn decode_buckets() -> BucketSet {
    let key = |size| Key::tokens(size).with(Axis::Batch, size).with(Axis::Pages, 64);
    BucketSet::new(xllm_sizes(256).into_iter().map(key), Weights::default()).unwrap()
}

#[test]
fn a_small_batch_moves_few_bytes_and_all_shapes_cost_what_the_largest_does() {
    let (inputs, buckets) = (decoder_inputs(), decode_buckets());
    let plan = InputPlan::new(inputs.clone(), &buckets, 512).unwrap();
    let indices = plan.find("paged_kv_indices").unwrap();
    let (smallest, largest) = (plan.layout(0).unwrap(), plan.layout(buckets.len() - 1).unwrap());

    // Eight inputs of at most 256 bytes, 512 bytes apart, then the step-sized input.
    assert_eq!(smallest.views()[indices].offset, 8 * 512);
    assert_eq!(smallest.views()[indices].end(), smallest.host_bytes());
    let mut staging = vec![0; plan.staging_bytes() as usize];
    let step = StepInput { input: indices, dtype: Dtype::I32, shape: &[3], data: &[0; 12] };
    assert_eq!(plan.pack_step(smallest, &[step], &mut staging).unwrap(), 8 * 512 + 12);

    let maxima: u64 = largest.views().iter().map(|view| view.bytes.next_multiple_of(512)).sum();
    assert!(plan.arena_bytes() <= maxima);
    let alone = BucketSet::new([largest.key()], Weights::default()).unwrap();
    assert_eq!(InputPlan::new(inputs, &alone, 512).unwrap().arena_bytes(), plan.arena_bytes());
    // The output region is equal for all buckets.
    let hidden = plan.find("hidden_states").unwrap();
    assert_eq!(smallest.views()[hidden].offset, largest.views()[hidden].offset);
    assert_eq!(largest.views()[hidden].shape(), [256, 4096]);
    assert_eq!(plan.find("logits"), None);
}

#[test]
fn declarations_without_sense_are_refused() {
    let buckets = decode_buckets();
    let refusal = |inputs: &[Input]| InputPlan::new(inputs.to_vec(), &buckets, 256).unwrap_err().to_string();
    let x = |shape: &[Extent]| Input::host("x", Dtype::U8, shape);
    let one = Extent::Fixed(1);
    for (inputs, said) in [
        (vec![x(&[one]), x(&[one])], "input x: the name is given twice, must be unique"),
        (vec![Input::host("", Dtype::U8, &[one])], "input : the name is empty, must be some text"),
        (vec![x(&[])], "input x: the number of dimensions is 0, must be 1 to 4"),
        (vec![x(&[one; 5])], "input x: the number of dimensions is 5, must be 1 to 4"),
        (
            vec![x(&[one, Extent::UpTo(2)])],
            "input x: a dimension behind the first is sized by the step, must be sized by the bucket",
        ),
        (
            vec![x(&[Extent::Fixed(0)])],
            "input x: a dimension is Fixed(0), must be 1 to 2^32 - 1 in bucket [1, 1, 64, 0]",
        ),
        (
            vec![x(&[Extent::Fixed(u32::MAX); 2])],
            "input of 18446744065119617025 bytes: must be between 1 and 70368744177664",
        ),
        (
            vec![x(&[
                Extent::UpTo(u32::MAX),
                Extent::Fixed(u32::MAX),
                Extent::Fixed(u32::MAX),
                Extent::Along { axis: Axis::Tokens, times: u32::MAX, plus: u32::MAX },
            ])],
            "input x: a dimension is Along { axis: Tokens, times: 4294967295, plus: 4294967295 }, must be 1 to 2^32 - 1 in bucket [1, 1, 64, 0]",
        ),
    ] {
        assert_eq!(refusal(&inputs), said);
    }
    assert!(refusal(&[x(&[Extent::along(Axis::Other)])]).contains("Along { axis: Other"));
    assert!(
        refusal(&[x(&[Extent::Along { axis: Axis::Tokens, times: u32::MAX, plus: 1 }])]).contains("2^32 - 1")
    );
    for alignment in [0, 128, 384, 4 << 20] {
        assert!(InputPlan::new(vec![], &buckets, alignment).is_err());
    }
    assert_eq!(InputPlan::new(vec![], &buckets, 256).unwrap().arena_bytes(), 0);
}

fn extent() -> impl Strategy<Value = Extent> {
    let axis = prop_oneof![Just(Axis::Tokens), Just(Axis::Batch)];
    prop_oneof![
        (1..40_u32).prop_map(Extent::Fixed),
        (axis, 1..4_u32, 0..3_u32).prop_map(|(axis, times, plus)| Extent::Along { axis, times, plus }),
    ]
}

fn input() -> impl Strategy<Value = (Dtype, Vec<Extent>, Role, Option<u32>)> {
    let dtype = prop::sample::select(Dtype::ALL.to_vec());
    let role = prop::sample::select(Role::ALL.to_vec());
    (dtype, prop::collection::vec(extent(), 1..=3), role, prop::option::of(1..500_u32))
}

proptest! {
    #[test]
    fn views_are_aligned_apart_and_within_the_maximum(
        declared in prop::collection::vec(input(), 0..12),
        keys in prop::collection::btree_set((1..300_u32, 1..30_u32), 1..8),
        alignment in prop::sample::select(vec![256_u64, 512, 4096]),
    ) {
        let inputs: Vec<Input> = declared.into_iter().enumerate().map(|(number, (dtype, mut shape, role, step))| {
            if let Some(most) = step { shape[0] = Extent::UpTo(most); }
            Input { role, ..Input::host(&format!("input {number}"), dtype, &shape) }
        }).collect();
        let keys = keys.into_iter().map(|(tokens, batch)| Key::tokens(tokens).with(Axis::Batch, batch));
        let buckets = BucketSet::new(keys, Weights::default()).unwrap();
        let plan = InputPlan::new(inputs.clone(), &buckets, alignment).unwrap();
        let mut maxima = vec![0_u64; inputs.len()];
        for (number, key) in buckets.iter().enumerate() {
            let layout = plan.layout(number).unwrap();
            prop_assert_eq!(layout.key(), key);
            let mut spans = Vec::new();
            for ((view, input), most) in layout.views().iter().zip(&inputs).zip(&mut maxima) {
                let naive: u64 = input.shape.iter().map(|extent| u64::from(match *extent {
                    Extent::Fixed(n) | Extent::UpTo(n) => n,
                    Extent::Along { axis, times, plus } => key.extent(axis) * times + plus,
                })).product::<u64>() * input.dtype.size() as u64;
                prop_assert_eq!(view.bytes, naive);
                prop_assert_eq!(view.offset % alignment, 0);
                let (start, length) = plan.region(input.role);
                prop_assert!(view.offset >= start && view.end() <= start + length);
                prop_assert!(input.role != Role::HostInput || view.end() <= layout.host_bytes());
                *most = naive.max(*most);
                spans.push((view.offset, view.end(), input));
            }
            spans.sort_by_key(|span| span.0);
            prop_assert!(spans.windows(2).all(|pair| pair[0].1 <= pair[1].0));
            // Host inputs have no gap beyond alignment, and step-sized ones come last.
            let host: Vec<_> = spans.iter().filter(|span| span.2.role == Role::HostInput).collect();
            prop_assert!(host.windows(2).all(|pair| pair[1].0 - pair[0].1 < alignment));
            prop_assert!(host.is_sorted_by_key(|span| span.2.is_step_sized()));
        }
        prop_assert!(plan.arena_bytes() <= maxima.iter().map(|most| most.next_multiple_of(alignment)).sum());
        prop_assert!(plan.staging_bytes() <= plan.arena_bytes());
    }
}
