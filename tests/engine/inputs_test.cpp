// GraphInputs: layout, padding, views and refusals.
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <random>
#include <type_traits>

#include "padded.hpp"

namespace engine_tests {
namespace {

constexpr std::uint32_t pages_of_sequence = 5;
constexpr std::uint32_t features = 6;

std::vector<Key> decode_buckets(std::uint32_t most, std::int32_t list = VMMGRAPH_SIZES_XLLM) {
    std::vector<Key> buckets;
    for (const auto size : bucket_sizes(list, most)) {
        buckets.push_back(Key::of(size, size, uniform_decode));
    }
    return buckets;
}

std::vector<Input> declaration(std::uint32_t most = 64) {
    const auto tokens = Extent::along(Axis::tokens);
    const auto batch = Extent::along(Axis::batch);
    return {
        Input::host(names::tokens, at::kInt, {tokens}),
        Input::host(names::positions, at::kInt, {tokens}),
        Input::host(names::new_cache_slots, at::kInt, {tokens}, Pad::value(-1)),
        Input::host(names::block_tables, at::kInt, {batch, Extent::fixed(pages_of_sequence)}),
        Input::host(names::q_seq_lens, at::kInt, {batch}, Pad::value(1)),
        Input::host(names::kv_seq_lens, at::kInt, {batch}, Pad::value(1)),
        Input::host(names::paged_kv_indptr, at::kInt, {Extent::along(Axis::batch, 1, 1)},
                    Pad::repeat_last()),
        Input::host(names::paged_kv_indices, at::kInt, {Extent::up_to(most * pages_of_sequence)}),
        Input::host(names::paged_kv_last_page_len, at::kInt, {batch}, Pad::value(1)),
        Input::host("temperature", at::kFloat, {batch}, Pad::value(0.5)),
        Input::device(names::embeddings, at::kBFloat16, {tokens, Extent::fixed(features)}),
        Input::device("row", at::kHalf, {tokens}, Pad::value(2)),
        Input::device("last", at::kLong, {tokens, Extent::fixed(2)}, Pad::repeat_last()),
        Input::output(names::hidden_states, at::kBFloat16, {tokens, Extent::fixed(features)}),
        Input::output(names::aux_hidden_states, at::kBFloat16,
                      {tokens, Extent::fixed(3 * features)}),
    };
}

std::vector<at::Tensor> step(std::int64_t batch, std::int64_t indices) {
    const auto ints = at::TensorOptions().dtype(at::kInt);
    const auto some = [&](at::IntArrayRef shape) { return at::randint(1, 1000, shape, ints); };
    return {some({batch}),
            some({batch}),
            some({batch}),
            some({batch, pages_of_sequence - 2}),
            some({batch}),
            some({batch}),
            some({batch + 1}),
            some({indices}),
            some({batch}),
            at::rand({batch}),
            at::randn({batch, features}, on_device(at::kBFloat16)),
            at::randn({batch}, on_device(at::kHalf)),
            at::randint(0, 9, {batch, 2}, on_device(at::kLong))};
}

std::vector<NamedValue> values_of(const std::vector<at::Tensor>& tensors) {
    static const auto inputs = declaration();
    return named(inputs, tensors);
}

TEST(Inputs, EveryInputArrivesPaddedAndOutputsStay) {
    GraphInputs param(declaration(), decode_buckets(64), {device(), 512});
    std::mt19937 random(5);
    for (const int batch : {64, 3, 1, 17, 64, 5, 2, 33, 16}) {
        const auto bucket = Key::of(batch <= 8 ? (batch <= 2   ? batch
                                                  : batch <= 4 ? 4
                                                               : 8)
                                               : (batch + 15) / 16 * 16,
                                    batch <= 8 ? (batch <= 2   ? batch
                                                  : batch <= 4 ? 4
                                                               : 8)
                                               : (batch + 15) / 16 * 16,
                                    uniform_decode);
        param.select(bucket);
        param.get(names::hidden_states).fill_(batch);
        const auto indices = static_cast<std::int64_t>(1 + random() % (64 * pages_of_sequence));
        const auto tensors = step(batch, indices);
        const auto copies = param.copies();
        wait();
        param.update(bucket, values_of(tensors), stream());
        wait();
        EXPECT_EQ(param.copies(), copies + 1) << "one copy a step";
        EXPECT_EQ(param.bucket(), bucket);
        for (std::size_t i = 0; i < tensors.size(); ++i) {
            const auto& input = param.inputs()[i];
            EXPECT_TRUE(at::equal(param.actual(i).cpu(), tensors[i].cpu()))
                << input.name << " of batch " << batch;
            if (input.name != names::paged_kv_indices) {
                const auto whole = param.get(i);
                EXPECT_TRUE(at::equal(whole.cpu(), padded(input, tensors[i].cpu(), whole.sizes())))
                    << input.name << " of batch " << batch;
            }
        }
        EXPECT_TRUE(at::equal(param.hidden_states(batch).cpu(),
                              at::full({batch, features}, batch, at::kBFloat16)));
    }
}

TEST(Inputs, HostVectorsAndMissingValuesWork) {
    GraphInputs param(
        {Input::host("a", at::kInt, {Extent::along(Axis::tokens)}),
         Input::host("b", at::kLong, {Extent::along(Axis::tokens), Extent::fixed(3)},
                     Pad::value(-7)),
         Input::host("c", at::kDouble, {Extent::along(Axis::tokens)}, Pad::repeat_last())},
        {Key::of(4)}, {device(), 256});
    const std::vector<std::int32_t> a{1, 2, 3};
    const std::vector<std::int64_t> b{1, 2, 3, 4};
    param.update(Key::of(4), {{"a", a}, {"b", Value(b.data(), {2, 2})}}, stream());
    wait();
    const auto longs = at::TensorOptions().dtype(at::kLong);
    EXPECT_TRUE(at::equal(param.get("a").cpu(), at::tensor({1, 2, 3, 0}, at::kInt)));
    EXPECT_TRUE(
        at::equal(param.get("b").cpu(),
                  at::tensor({1, 2, -7, 3, 4, -7, -7, -7, -7, -7, -7, -7}, longs).view({4, 3})));
    EXPECT_TRUE(at::equal(param.get("c").cpu(), at::zeros({4}, at::kDouble)));
    EXPECT_TRUE(at::equal(param.actual("b").cpu(), at::tensor({1, 2, 3, 4}, longs).view({2, 2})));
    EXPECT_EQ(param.actual("c").numel(), 0);
}

TEST(Inputs, WhatDoesNotFitIsRefusedBeforeAnythingIsWritten) {
    GraphInputs param(declaration(), decode_buckets(8), {device(), 512});
    const auto bucket = Key::of(4, 4, uniform_decode);
    const auto good = step(3, 7);
    param.update(bucket, values_of(good), stream());
    wait();
    std::vector<at::Tensor> before;
    for (std::size_t i = 0; i < param.inputs().size(); ++i) {
        before.push_back(param.get(i).clone());
    }
    const auto refused = [&](std::size_t place, const at::Tensor& bad) {
        auto tensors = step(3, 9);
        tensors[place] = bad;
        return refusal([&] { param.update(bucket, values_of(tensors), stream()); });
    };
    const auto ints = at::TensorOptions().dtype(at::kInt);
    EXPECT_EQ(refused(9, at::rand({3}, at::kDouble)),
              "vmmgraph: cannot take input 'temperature': the dtype is Double; it must be Float");
    EXPECT_EQ(refused(0, at::ones({3, 1}, ints)),
              "vmmgraph: cannot take input 'tokens': the number of dimensions is 2; it must be 1");
    EXPECT_EQ(refused(3, at::ones({5, 4}, ints)),
              "vmmgraph: cannot take input 'block_tables': the shape is [5, 4]; it must be at most "
              "[4, 5] in this bucket");
    EXPECT_NE(refused(1, at::ones({6}, ints).as_strided({3}, {2})).find("must be contiguous"),
              std::string::npos);
    EXPECT_NE(refused(10, at::randn({3, features + 1}, on_device(at::kBFloat16)))
                  .find("at most [4, 6] in this bucket"),
              std::string::npos);
    if (has_gpu()) {
        EXPECT_NE(refused(10, at::randn({3, features}, at::kBFloat16))
                      .find("the device is cpu; it must be cuda:0"),
                  std::string::npos);
    }
    const std::vector<std::int64_t> host(6);
    auto values = values_of(step(3, 9));
    values[12].value = Value(host.data(), {3, 2});
    EXPECT_NE(refusal([&] {
                  param.update(bucket, values, stream());
              }).find("'last': the value is memory of the host"),
              std::string::npos);
    EXPECT_NE(refusal([&] {
                  param.update(Key::of(5, 5, uniform_decode), values_of(good), stream());
              }).find("5 tokens"),
              std::string::npos);
    const auto with = [&](std::string_view name) {
        auto more = values_of(step(3, 9));
        more.push_back({name, at::ones({3}, ints)});
        return refusal([&] { param.update(bucket, more, stream()); });
    };
    EXPECT_EQ(with("nothing"),
              "vmmgraph: cannot take 'nothing': no input has this name; declare the input first");
    EXPECT_EQ(with(names::tokens),
              "vmmgraph: cannot take input 'tokens': it is given twice; pass each input once");
    EXPECT_EQ(with(names::hidden_states),
              "vmmgraph: cannot take 'hidden_states': it is an output; pass inputs only");
    EXPECT_NE(refusal([&] { static_cast<void>(param.find("nothing")); }).find("'nothing'"),
              std::string::npos);
    EXPECT_NE(refusal([&] { static_cast<void>(param.tokens(5)); }).find("at most 4"),
              std::string::npos);
    EXPECT_NE(refusal([&] { param.commit(stream()); }, VMMGRAPH_ERROR_WRONG_STATE), "");
    wait();
    for (std::size_t i = 0; i < before.size(); ++i) {
        EXPECT_TRUE(at::equal(param.get(i), before[i])) << param.inputs()[i].name;
    }
    param.update(bucket, values_of(good), stream());
}

TEST(Inputs, DeclarationsThatCannotBeAreRefused) {
    const auto tokens = Extent::along(Axis::tokens);
    const auto make = [](std::vector<Input> inputs, const std::vector<Key>& buckets) {
        return [inputs, buckets] { GraphInputs param(inputs, buckets, {device(), 512}); };
    };
    EXPECT_NE(
        refusal(make({Input::host("a", at::kInt, {tokens}), Input::host("a", at::kInt, {tokens})},
                     {Key::of(1)})),
        "");
    EXPECT_NE(
        refusal(make({Input::host("a", at::kInt, {Extent::along(Axis::batch)})}, {Key::of(1)})),
        "");
    EXPECT_NE(refusal(make({Input::host("a", at::kComplexFloat, {tokens})}, {Key::of(1)})), "");
    EXPECT_NE(refusal(make({Input::host("a", at::kInt, {tokens})}, {})), "");
}

// Without alignment.
std::size_t bytes_of_all(const GraphInputs& param) {
    std::size_t bytes = 0;
    for (std::size_t i = 0; i < param.inputs().size(); ++i) {
        bytes += param.get(i).nbytes();
    }
    return bytes;
}

TEST(Inputs, TheArenaIsTheLargestBucketsAndViewsAreFixed) {
    const auto buckets = decode_buckets(512, VMMGRAPH_SIZES_VLLM);
    ASSERT_EQ(buckets.size(), 51u);
    GraphInputs all(declaration(512), buckets, {device(), 512});
    GraphInputs largest(declaration(512), {buckets.back()}, {device(), 512});
    std::size_t each = 0;
    for (const auto& bucket : buckets) {
        all.select(bucket);
        each += bytes_of_all(all);
    }
    std::printf(
        "RESULT inputs: %zu shapes in %zu bytes, the largest alone in %zu bytes, of which its "
        "tensors are %zu; tensors of all shapes: "
        "%zu bytes\n",
        buckets.size(), all.arena_bytes(), largest.arena_bytes(), bytes_of_all(largest), each);
    EXPECT_EQ(all.arena_bytes(), largest.arena_bytes());
    EXPECT_GE(all.arena_bytes(), bytes_of_all(largest));
    EXPECT_LT(all.arena_bytes(), bytes_of_all(largest) + 512 * all.inputs().size())
        << "no more than alignment";
    EXPECT_LT(10 * all.arena_bytes(), each);
    all.select(buckets[7]);
    const auto* const tokens = all.tokens().const_data_ptr();
    const auto* const sliced = all.tokens(3).unsafeGetTensorImpl();
    EXPECT_EQ(all.tokens(3).unsafeGetTensorImpl(), sliced)
        << "the slice asked for again is no new tensor";
    EXPECT_EQ(all.tokens(3).size(0), 3);
    EXPECT_EQ(all.paged_kv_indptr(3).size(0), 4);
    all.select(buckets[50]);
    all.select(buckets[7]);
    EXPECT_EQ(all.tokens().const_data_ptr(), tokens);
    for (std::size_t i = 0; i < all.inputs().size(); ++i) {
        EXPECT_EQ(reinterpret_cast<std::uintptr_t>(all.get(i).const_data_ptr()) % 512, 0u)
            << all.inputs()[i].name;
    }
}

// Before and while the previous copy runs.
TEST(Inputs, StepsPreparedAheadArriveInOrder) {
    GraphInputs param({Input::host("a", at::kLong, {Extent::along(Axis::tokens)})},
                      {Key::of(100'000)}, {device(), 512});
    std::vector<at::Tensor> seen;
    const auto value = [](std::int64_t n) { return at::full({100'000}, n, at::kLong); };
    param.prepare(Key::of(100'000), {{"a", value(0)}});
    for (std::int64_t n = 0; n < 50; ++n) {
        param.commit(stream());
        if (has_gpu()) {
            const c10::cuda::CUDAStreamGuard guard(
                c10::cuda::getStreamFromExternal(static_cast<cudaStream_t>(stream()), 0));
            seen.push_back(param.get("a").clone());
        } else {
            seen.push_back(param.get("a").clone());
        }
        param.prepare(Key::of(100'000), {{"a", value(n + 1)}});
    }
    wait();
    for (std::int64_t n = 0; n < 50; ++n) {
        EXPECT_TRUE(at::equal(seen[static_cast<std::size_t>(n)].cpu(), value(n))) << n;
    }
}

TEST(Inputs, AHostInputMayComeFromTheDevice) {
    GraphInputs param({Input::host("a", at::kInt, {Extent::along(Axis::tokens)}, Pad::value(9)),
                       Input::host("b", at::kInt, {Extent::along(Axis::tokens)})},
                      {Key::of(4)}, {device(), 512});
    const auto a = at::arange(3, on_device(at::kInt));
    wait();
    param.update(Key::of(4), {{"b", std::vector<std::int32_t>{5, 6}}, {"a", a}}, stream());
    wait();
    EXPECT_TRUE(at::equal(param.get("a").cpu(), at::tensor({0, 1, 2, 9}, at::kInt)));
    EXPECT_TRUE(at::equal(param.get("b").cpu(), at::tensor({5, 6, 0, 0}, at::kInt)));
}

// Kernels are planned from these values.
TEST(Inputs, PaddedValuesCanBeReadOnTheHost) {
    GraphInputs param(
        {Input::host("lengths", at::kInt, {Extent::along(Axis::batch, 1, 1)}, Pad::repeat_last()),
         Input::host("table", at::kLong, {Extent::along(Axis::batch), Extent::fixed(3)},
                     Pad::value(9)),
         Input::host("indices", at::kInt, {Extent::up_to(40)}),
         Input::device("other", at::kInt, {Extent::along(Axis::batch)}),
         Input::output("out", at::kInt, {Extent::along(Axis::batch)})},
        {Key::of(8, 4), Key::of(8, 8)}, {device(), 512});
    EXPECT_NE(
        refusal([&] { static_cast<void>(param.host("lengths")); }, VMMGRAPH_ERROR_WRONG_STATE), "");
    const auto check = [&](std::int32_t sequences) {
        EXPECT_TRUE(
            at::equal(param.host("lengths"), at::arange(9).clamp_max(sequences).to(at::kInt)))
            << sequences;
        EXPECT_TRUE(at::equal(
            param.host("table"),
            padded(param.inputs()[1], at::full({sequences, 2}, sequences, at::kLong), {8, 3})));
        EXPECT_TRUE(at::equal(param.host("indices"), at::arange(sequences, at::kInt)));
    };
    const auto prepare = [&](std::int32_t sequences) {
        param.prepare(Key::of(8, 8), {{"lengths", at::arange(sequences + 1, at::kInt)},
                                      {"table", at::full({sequences, 2}, sequences, at::kLong)},
                                      {"indices", at::arange(sequences, at::kInt)}});
    };
    for (std::int32_t sequences = 1; sequences <= 6; ++sequences) {
        prepare(sequences);
        check(sequences);
        param.commit(stream());
        param.select(Key::of(8, 4));
        check(sequences);
    }
    EXPECT_NE(refusal([&] { static_cast<void>(param.host("other")); }, VMMGRAPH_ERROR_WRONG_STATE)
                  .find("'other'"),
              std::string::npos);
    EXPECT_NE(refusal([&] { static_cast<void>(param.host("out")); }, VMMGRAPH_ERROR_WRONG_STATE)
                  .find("'out'"),
              std::string::npos);
    EXPECT_NE(
        refusal([&] { param.prepare(Key::of(8, 8), {{"lengths", at::ones({30}, at::kInt)}}); }),
        "");
    EXPECT_NE(
        refusal([&] { static_cast<void>(param.host("lengths")); }, VMMGRAPH_ERROR_WRONG_STATE), "");
    wait();
}

// Also buffers unknown to torch's allocator.
TEST(Inputs, ValuesOfTheDeviceAreHeldUntilTheirCopyRan) {
    GraphInputs param({Input::device("a", at::kInt, {Extent::along(Axis::tokens)})}, {Key::of(4)},
                      {device(), 512});
    const auto memory = at::full({4}, 3, on_device(at::kInt));
    wait();
    std::atomic<bool> gone{false};
    const auto give = [&] {
        return at::from_blob(
            memory.mutable_data_ptr(), {4}, [&gone](void*) { gone = true; }, memory.options());
    };
    // A kernel's first launch may wait for the whole device.
    param.update(Key::of(4), {{"a", memory}}, stream());
    param.update(Key::of(4), {}, stream());
    wait();
    param.prepare(Key::of(4), {{"a", give()}});
    EXPECT_FALSE(gone) << "prepared and not copied";
    if (!has_gpu()) {
        param.commit(nullptr);
        EXPECT_TRUE(gone) << "a copy of the CPU is done when it returns";
        return;
    }
    Gate gate(static_cast<cudaStream_t>(stream()));
    param.commit(stream());
    EXPECT_FALSE(gone) << "the copy cannot have run";
    param.prepare(Key::of(4), {});
    param.commit(stream());
    EXPECT_FALSE(gone) << "nor now";
    gate.open();
    wait();
    param.update(Key::of(4), {}, stream());
    EXPECT_TRUE(gone);
    wait();
}

TEST(Inputs, HaveTheNameThatXllmKnows) {
    EXPECT_TRUE((std::is_same_v<CudaGraphPersistentParam, GraphInputs>));
}

}  // namespace
}  // namespace engine_tests
