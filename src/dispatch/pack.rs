//! A step's host inputs into staging memory: checked, padded, ready for one copy.

use crate::error::{Error, Result};

use super::input::{Dtype, Input, PadRule, Role};
use super::layout::{BucketLayout, InputPlan, View};

impl InputPlan {
    /// Writes one host input of a step into staging memory, padded to its bucket; what of staging memory has to be copied for
    /// it ends at the offset returned. The copy of the step is from 0 to the largest of these, to the start of the arena.
    ///
    /// `layout` is one of this plan's, `input` a number of its declaration, `data` the elements of `shape`, contiguous.
    ///
    /// # Errors
    /// [`Error::InputMismatch`] for another dtype, another number of dimensions, a dimension longer than the bucket's, data of
    /// another length than the shape says, and for what is no host input; [`Error::InvalidArgument`] for a number that no
    /// input has; [`Error::InvalidSize`] for staging memory that is too short. Staging memory is as it was.
    pub fn pack(
        &self,
        layout: &BucketLayout,
        input: usize,
        (dtype, shape, data): (Dtype, &[u32], &[u8]),
        staging: &mut [u8],
    ) -> Result<u64> {
        let (Some(declared), Some(view)) = (self.inputs().get(input), layout.views().get(input)) else {
            let expected = "below the number of inputs";
            return Err(Error::InvalidArgument { what: "an input's number", value: input as i128, expected });
        };
        check(declared, view, dtype, shape, data)?;
        // A step-sized input ends where the step does.
        let mut room = view.shape;
        if declared.is_step_sized() {
            room[0] = shape[0];
        }
        let room = &room[..view.rank];
        let bytes = bytes_of(dtype, room);
        let start = usize::try_from(view.offset).unwrap_or(usize::MAX);
        let have = staging.len() as u64;
        let place = start
            .checked_add(bytes)
            .and_then(|end| staging.get_mut(start..end))
            .ok_or(Error::InvalidSize { what: "staging memory", bytes: have, limit: self.staging_bytes() })?;
        let element = dtype.size();
        let fill = match declared.pad {
            PadRule::Value(bits) => bits,
            PadRule::Zero | PadRule::RepeatLast => 0,
        };
        let fill = &fill.to_le_bytes()[..element];
        if data.is_empty() {
            place.chunks_exact_mut(element).for_each(|chunk| chunk.copy_from_slice(fill));
        } else {
            let repeat = declared.pad == PadRule::RepeatLast;
            pad_into(place, room, data, shape, Fill { element: fill, repeat });
        }
        Ok(view.offset + bytes as u64)
    }
}

fn check(input: &Input, view: &View, dtype: Dtype, shape: &[u32], data: &[u8]) -> Result<()> {
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
    // No more than the view's bytes, which fit.
    let bytes = bytes_of(dtype, shape);
    if data.len() != bytes {
        return Err(input.mismatch("the length of the data in bytes", data.len(), bytes));
    }
    Ok(())
}

fn bytes_of(dtype: Dtype, shape: &[u32]) -> usize {
    shape.iter().fold(dtype.size(), |bytes, extent| bytes.saturating_mul(*extent as usize))
}

#[derive(Clone, Copy)]
struct Fill<'a> {
    element: &'a [u8],
    repeat: bool,
}

/// Copies `data` of `shape` into the corner of `place` of `room` and pads the rest, outermost dimension first. `data` is not empty.
fn pad_into(place: &mut [u8], room: &[u32], data: &[u8], shape: &[u32], fill: Fill<'_>) {
    if room[1..] == shape[1..] {
        // Rows of one length: one copy.
        place[..data.len()].copy_from_slice(data);
    } else {
        let (to, from) = (place.len() / room[0] as usize, data.len() / shape[0] as usize);
        for (place, data) in place.chunks_exact_mut(to).zip(data.chunks_exact(from)) {
            pad_into(place, &room[1..], data, &shape[1..], fill);
        }
    }
    let row = place.len() / room[0] as usize;
    let (done, rest) = place.split_at_mut(row * shape[0] as usize);
    if !fill.repeat {
        rest.chunks_exact_mut(fill.element.len()).for_each(|chunk| chunk.copy_from_slice(fill.element));
    } else if let Some(last) = done.rchunks_exact(row).next() {
        rest.chunks_exact_mut(row).for_each(|chunk| chunk.copy_from_slice(last));
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
    fn what_does_not_fit_is_refused_by_name_and_number() {
        let buckets = BucketSet::of_tokens([4]).unwrap();
        let tokens = Input::host("tokens", Dtype::I32, &[Extent::along(Axis::Tokens)]);
        let hidden = Input::output("hidden", Dtype::F16, &[Extent::along(Axis::Tokens)]);
        let plan = InputPlan::new(vec![tokens, hidden], &buckets, 512).unwrap();
        let layout = plan.layout(0).unwrap();
        let mut staging = [7; 16];
        let mut refusal = |input, step: (Dtype, &[u32], &[u8])| {
            let error = plan.pack(layout, input, step, &mut staging).unwrap_err();
            assert_eq!(staging, [7; 16]);
            error.to_string()
        };
        let data = [1_u8; 20];
        let said = [
            refusal(0, (Dtype::I64, &[1], &data[..8])),
            refusal(0, (Dtype::I32, &[1, 1], &data[..4])),
            refusal(0, (Dtype::I32, &[5], &data)),
            refusal(0, (Dtype::I32, &[2], &data[..4])),
            refusal(1, (Dtype::F16, &[2], &data[..4])),
            refusal(2, (Dtype::F16, &[2], &data[..4])),
        ];
        let expected = [
            "input tokens: the dtype is I64, must be I32",
            "input tokens: the number of dimensions is 2, must be 1",
            "input tokens: the shape is [5], must be at most [4] in this bucket",
            "input tokens: the length of the data in bytes is 4, must be 8",
            "input hidden: the role is Output, must be HostInput",
            "an input's number is 2: below the number of inputs",
        ];
        assert_eq!(said, expected);
        let short = plan.pack(layout, 0, (Dtype::I32, &[4], &data[..16]), &mut [0; 15]);
        assert!(matches!(short, Err(Error::InvalidSize { bytes: 15, limit: 16, .. })));
    }

    proptest! {
        #[test]
        fn staging_holds_the_step_padded_by_its_rule(
            dims in prop::collection::vec((1..5_u32).prop_flat_map(|room| (Just(room), 0..=room)), 1..=4),
            pad in prop_oneof![Just(PadRule::Zero), Just(PadRule::RepeatLast), any::<u64>().prop_map(PadRule::Value)],
            step_sized in any::<bool>(),
        ) {
            let room: Vec<u32> = dims.iter().map(|dim| dim.0).collect();
            let shape: Vec<u32> = dims.iter().map(|dim| dim.1).collect();
            let count: u32 = shape.iter().product();
            let data: Vec<u8> = (1..=count).flat_map(|value| (value as u16).to_le_bytes()).collect();
            let plan = plan_of(&room, pad, step_sized);
            let mut staging = vec![0xEE; plan.staging_bytes() as usize];
            let layout = plan.layout(0).unwrap();
            let end = plan.pack(layout, 1, (Dtype::I16, &shape, &data), &mut staging).unwrap();

            // The twin asks, element by element, what stands there.
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
