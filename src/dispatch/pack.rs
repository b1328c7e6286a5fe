//! Packs a step's host inputs into staging memory, ready for one copy.

use crate::error::{Error, Result};

use super::input::{Dtype, Input, PadRule, Role};
use super::layout::{BucketLayout, InputPlan, View};

/// Data of one host input for one step.
#[derive(Clone, Copy, Debug)]
pub struct StepInput<'a> {
    /// Index of the input in the declaration.
    pub input: usize,
    /// Element type.
    pub dtype: Dtype,
    /// Outermost first. With a 0, the whole input is padding.
    pub shape: &'a [u32],
    /// Elements, contiguous.
    pub data: &'a [u8],
}

impl InputPlan {
    /// Writes the host inputs of a step into staging memory, padded to the bucket, and returns the
    /// bytes to copy: `vmmgraph_input_plan_pack`.
    ///
    /// # Errors
    /// [`Error::InputMismatch`] for a wrong dtype, rank, shape or data length, and for an input
    /// which is not a host input. [`Error::InvalidArgument`] for an unknown or not increasing
    /// index.
    pub fn pack_step(
        &self,
        layout: &BucketLayout,
        step: &[StepInput<'_>],
        staging: &mut [u8],
    ) -> Result<u64> {
        self.pack_each(layout, step.iter().map(|given| Ok(*given)), staging)
    }

    /// Packs inputs in another form, converted twice, so that no buffer for all is needed.
    pub(crate) fn pack_each<'a, E: From<Error>>(
        &self,
        layout: &BucketLayout,
        step: impl Iterator<Item = Result<StepInput<'a>, E>> + Clone,
        staging: &mut [u8],
    ) -> Result<u64, E> {
        let (mut least, mut last) = (0, 0);
        for given in step.clone() {
            let given = given?;
            if given.input < least {
                let (value, expected) = (given.input as i128, "above the one before it");
                return Err(Error::InvalidArgument { what: "an input's number", value, expected }.into());
            }
            let (declared, view) = self.declared(layout, given.input)?;
            check(declared, view, &given)?;
            let (_, end) = span(declared, view, given.shape);
            if end > staging.len() as u64 {
                let (bytes, limit) = (staging.len() as u64, self.staging_bytes());
                return Err(Error::InvalidSize { what: "staging memory", bytes, limit }.into());
            }
            // Below the number of inputs, so the sum cannot overflow.
            (least, last) = (given.input + 1, end.max(last));
        }
        for given in step {
            let given = given?;
            let (declared, view) = self.declared(layout, given.input)?;
            let (start, end) = span(declared, view, given.shape);
            // Both are within staging memory, so the casts are exact.
            write(&mut staging[start as usize..end as usize], declared, view, &given);
        }
        Ok(last)
    }

    #[inline]
    fn declared<'a>(&'a self, layout: &'a BucketLayout, input: usize) -> Result<(&'a Input, &'a View)> {
        self.inputs().get(input).zip(layout.views().get(input)).ok_or_else(|| {
            let (value, expected) = (input as i128, "below the number of inputs");
            Error::InvalidArgument { what: "an input's number", value, expected }
        })
    }
}

/// Place of an input in staging memory; a step-sized one ends with its data.
#[inline]
fn span(declared: &Input, view: &View, shape: &[u32]) -> (u64, u64) {
    let rows = if declared.is_step_sized() { shape[0] } else { view.shape[0] };
    let first = (rows as usize).saturating_mul(declared.dtype.size());
    let bytes = view.shape()[1..].iter().fold(first, |bytes, extent| bytes.saturating_mul(*extent as usize));
    (view.offset, view.offset.saturating_add(bytes as u64))
}

fn write(place: &mut [u8], declared: &Input, view: &View, given: &StepInput<'_>) {
    if given.data.len() == place.len() {
        place.copy_from_slice(given.data);
        return;
    }
    let bits = match declared.pad {
        PadRule::Value(bits) => bits,
        PadRule::Zero | PadRule::RepeatLast => 0,
    };
    let element = &bits.to_le_bytes()[..declared.dtype.size()];
    if given.data.is_empty() {
        return fill(place, element);
    }
    let mut room = view.shape;
    if declared.is_step_sized() {
        room[0] = given.shape[0];
    }
    let rule = if declared.pad == PadRule::RepeatLast { None } else { Some(element) };
    pad_into(place, &room[..view.rank], given.data, given.shape, rule);
}

#[inline]
fn check(input: &Input, view: &View, given: &StepInput<'_>) -> Result<()> {
    let StepInput { dtype, shape, data, .. } = *given;
    if input.role != Role::HostInput {
        return Err(input.mismatch("the role", format!("{:?}", input.role), "HostInput"));
    }
    if dtype != input.dtype {
        return Err(input.mismatch("the dtype", format!("{dtype:?}"), format!("{:?}", input.dtype)));
    }
    let room = view.shape();
    if shape.len() != room.len() {
        return Err(input.mismatch("the number of dimensions", shape.len(), room.len()));
    }
    if shape.iter().zip(room).any(|(extent, room)| extent > room) {
        return Err(input.mismatch(
            "the shape",
            format!("{shape:?}"),
            format!("at most {room:?} in this bucket"),
        ));
    }
    let bytes = bytes_of(dtype, shape);
    if data.len() != bytes {
        return Err(input.mismatch("the length of the data in bytes", data.len(), bytes));
    }
    Ok(())
}

fn bytes_of(dtype: Dtype, shape: &[u32]) -> usize {
    shape.iter().fold(dtype.size(), |bytes, extent| bytes.saturating_mul(*extent as usize))
}

/// Copies `data`, not empty, of `shape` to the start of `place` of `room` and pads the rest,
/// outermost dimension first: with `element`, or with the preceding elements.
fn pad_into(place: &mut [u8], room: &[u32], data: &[u8], shape: &[u32], element: Option<&[u8]>) {
    let done = if room[1..].iter().eq(&shape[1..]) {
        place[..data.len()].copy_from_slice(data);
        data.len()
    } else {
        let (to, from) = (place.len() / room[0] as usize, data.len() / shape[0] as usize);
        for (place, data) in place.chunks_exact_mut(to).zip(data.chunks_exact(from)) {
            pad_into(place, &room[1..], data, &shape[1..], element);
        }
        to * shape[0] as usize
    };
    match element {
        Some(element) => fill(&mut place[done..], element),
        None => repeat(place, done, done / shape[0] as usize),
    }
}

/// Fills a whole number of elements.
fn fill(place: &mut [u8], element: &[u8]) {
    if element.iter().all(|byte| *byte == element[0]) {
        // As in 0 or -1.
        place.fill(element[0]);
    } else if let Some(first) = place.get_mut(..element.len()) {
        first.copy_from_slice(element);
        repeat(place, element.len(), element.len());
    }
}

/// Repeats the `unit` bytes before `done`, in copies of doubling length.
fn repeat(place: &mut [u8], mut done: usize, unit: usize) {
    let start = done - unit;
    while done < place.len() {
        let length = (done - start).min(place.len() - done);
        place.copy_within(start..start + length, done);
        done += length;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::dispatch::{Axis, BucketSet, Extent, Key, Weights};

    fn plan_of(room: &[u32], pad: PadRule, step_sized: bool) -> InputPlan {
        let mut shape: Vec<Extent> = room.iter().map(|extent| Extent::Fixed(*extent)).collect();
        if step_sized {
            shape[0] = Extent::UpTo(room[0]);
        }
        let inputs = vec![
            Input::host("before", Dtype::U8, &[Extent::Fixed(3)]),
            Input::host("it", Dtype::I16, &shape).padded_with(pad),
        ];
        let buckets = BucketSet::new([Key::tokens(1)], Weights::default()).unwrap();
        InputPlan::new(inputs, &buckets, 256).unwrap()
    }

    #[test]
    fn what_does_not_fit_is_refused_by_name_and_number_before_anything_is_written() {
        let buckets = BucketSet::of_tokens([4]).unwrap();
        let row = [Extent::along(Axis::Tokens)];
        let inputs = vec![
            Input::host("slots", Dtype::I32, &row).padded_with(PadRule::Value(u64::MAX)),
            Input::host("tokens", Dtype::I32, &row),
            Input::output("hidden", Dtype::F16, &row),
        ];
        let plan = InputPlan::new(inputs, &buckets, 256).unwrap();
        let layout = plan.layout(0).unwrap();
        let bytes = [1_u8; 20];
        let of = |input, dtype, shape, data| StepInput { input, dtype, shape, data };
        let slots = of(0, Dtype::I32, &[3], &bytes[..12]);
        let mut staging = [7; 256 + 16];
        let mut refusal = |last| {
            let error = plan.pack_step(layout, &[slots, last], &mut staging).unwrap_err();
            assert_eq!(staging, [7; 256 + 16]);
            error.to_string()
        };
        let said = [
            refusal(of(1, Dtype::I64, &[1], &bytes[..8])),
            refusal(of(1, Dtype::I32, &[1, 1], &bytes[..4])),
            refusal(of(1, Dtype::I32, &[5], &bytes)),
            refusal(of(1, Dtype::I32, &[2], &bytes[..4])),
            refusal(of(2, Dtype::F16, &[2], &bytes[..4])),
            refusal(of(3, Dtype::F16, &[2], &bytes[..4])),
            refusal(of(usize::MAX, Dtype::F16, &[2], &bytes[..4])),
            refusal(slots),
        ];
        let expected = [
            "input tokens: the dtype is I64, must be I32",
            "input tokens: the number of dimensions is 2, must be 1",
            "input tokens: the shape is [5], must be at most [4] in this bucket",
            "input tokens: the length of the data in bytes is 4, must be 8",
            "input hidden: the role is Output, must be HostInput",
            "an input's number is 3: must be below the number of inputs",
            "an input's number is 18446744073709551615: must be below the number of inputs",
            "an input's number is 0: must be above the one before it",
        ];
        assert_eq!(said, expected);
        let tokens = of(1, Dtype::I32, &[4], &bytes[..16]);
        for backwards in [vec![tokens, slots], vec![tokens, tokens], vec![slots, tokens, slots]] {
            let error = plan.pack_step(layout, &backwards, &mut staging).unwrap_err();
            assert!(matches!(error, Error::InvalidArgument { what: "an input's number", .. }), "{error}");
        }
        let short = plan.pack_step(layout, &[slots, tokens], &mut staging[..256 + 15]);
        assert!(matches!(short, Err(Error::InvalidSize { bytes: 271, limit: 272, .. })));
        assert_eq!(staging, [7; 256 + 16]);

        assert_eq!(plan.pack_step(layout, &[], &mut []).unwrap(), 0);
        assert_eq!(plan.pack_step(layout, &[slots], &mut staging[..16]).unwrap(), 16);
        assert_eq!(plan.pack_step(layout, &[slots, tokens], &mut staging).unwrap(), 256 + 16);
    }

    proptest! {
        #[test]
        fn a_step_in_one_call_is_its_inputs_one_by_one(
            steps in prop::collection::vec(prop::option::of(0..=4_u32), 1..8),
            up_to in prop::option::of(0..8_usize),
        ) {
            // The first elements of one row of four; none for a missing input.
            let declared = (0..steps.len()).map(|number| {
                let rule = [PadRule::Zero, PadRule::RepeatLast, PadRule::Value(0x0102)][number % 3];
                let extent = if up_to == Some(number) { Extent::UpTo(4) } else { Extent::Fixed(4) };
                Input::host(&number.to_string(), Dtype::I16, &[extent]).padded_with(rule)
            });
            let buckets = BucketSet::of_tokens([1]).unwrap();
            let plan = InputPlan::new(declared.collect(), &buckets, 256).unwrap();
            let layout = plan.layout(0).unwrap();
            let data = [9, 1, 9, 2, 9, 3, 9, 4];
            let shapes: Vec<(usize, [u32; 1])> =
                steps.iter().enumerate().filter_map(|(input, length)| Some((input, [(*length)?]))).collect();
            let step: Vec<StepInput<'_>> = shapes.iter().map(|(input, shape)| {
                StepInput { input: *input, dtype: Dtype::I16, shape, data: &data[..shape[0] as usize * 2] }
            }).collect();
            let (mut together, mut apart) = ([0xEE_u8; 8 * 256], [0xEE_u8; 8 * 256]);
            let end = plan.pack_step(layout, &step, &mut together).unwrap();
            let ends = step.iter().map(|one| plan.pack_step(layout, &[*one], &mut apart).unwrap());
            prop_assert_eq!(ends.max().unwrap_or(0), end);
            prop_assert_eq!(together, apart);
            for (view, length) in layout.views().iter().zip(&steps) {
                let (start, end) = (view.offset as usize, view.end() as usize);
                prop_assert!(length.is_some() || together[start..end].iter().all(|byte| *byte == 0xEE));
            }
        }

        #[test]
        fn staging_holds_the_step_padded_by_its_rule(
            dims in prop::collection::vec((1..7_u32).prop_flat_map(|room| (Just(room), 0..=room)), 1..=4),
            pad in prop_oneof![
                Just(PadRule::Zero), Just(PadRule::RepeatLast), Just(PadRule::Value(u64::MAX)),
                any::<u64>().prop_map(PadRule::Value),
            ],
            step_sized in any::<bool>(),
        ) {
            let room: Vec<u32> = dims.iter().map(|dim| dim.0).collect();
            let shape: Vec<u32> = dims.iter().map(|dim| dim.1).collect();
            let count: u32 = shape.iter().product();
            let data: Vec<u8> = (1..=count).flat_map(|value| (value as u16).to_le_bytes()).collect();
            let plan = plan_of(&room, pad, step_sized);
            let mut staging = vec![0xEE; plan.staging_bytes() as usize];
            let layout = plan.layout(0).unwrap();
            let it = StepInput { input: 1, dtype: Dtype::I16, shape: &shape, data: &data };
            let end = plan.pack_step(layout, &[it], &mut staging).unwrap();

            // Naive model, element by element.
            let mut filled = room.clone();
            if step_sized { filled[0] = shape[0]; }
            let total: u32 = filled.iter().product();
            prop_assert_eq!(end, 256 + u64::from(total) * 2);
            for number in 0..total {
                let (mut rest, mut index) = (number, vec![0; filled.len()]);
                for (place, extent) in index.iter_mut().zip(&filled).rev() {
                    (*place, rest) = (rest % extent, rest / extent);
                }
                let clamped: Vec<u32> = index.iter().zip(&shape).map(|(i, n)| (*i).min(n.saturating_sub(1))).collect();
                let flat = clamped.iter().zip(&shape).fold(0, |flat, (i, n)| flat * n + i) + 1;
                let expected = match pad {
                    _ if index == clamped && count > 0 => flat as u16,
                    PadRule::RepeatLast if count > 0 => flat as u16,
                    PadRule::Value(bits) => bits as u16,
                    _ => 0,
                };
                let at = 256 + number as usize * 2;
                prop_assert_eq!(u16::from_le_bytes([staging[at], staging[at + 1]]), expected, "{:?}", index);
            }
            prop_assert!(staging[..256].iter().chain(&staging[end as usize..]).all(|byte| *byte == 0xEE));
        }
    }
}
