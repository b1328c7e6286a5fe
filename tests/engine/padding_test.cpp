// GraphInputs smaller than their buffers, from host and device.
#include <cstdint>
#include <random>

#include "padded.hpp"

namespace engine_tests {
namespace {

// xLLM's block table is as wide as the step's longest sequence.
TEST(Padding, InTwoDimensionsOnTheDevice) {
    const auto tokens = Extent::along(Axis::tokens);
    const auto batch = Extent::along(Axis::batch);
    GraphInputs param(
        {Input::device(names::block_tables, at::kInt, {batch, Extent::fixed(7)}),
         Input::host("tables", at::kInt, {batch, Extent::fixed(7)}, Pad::value(-1)),
         Input::device("valued", at::kBFloat16, {batch, Extent::fixed(3), tokens}, Pad::value(2)),
         Input::device("repeated", at::kLong, {Extent::fixed(4), tokens, batch},
                       Pad::repeat_last())},
        {Key::of(16, 8), Key::of(32, 32)}, {device(), 512});
    std::mt19937 random(7);
    for (int turn = 0; turn < 40; ++turn) {
        const auto bucket = turn % 2 == 0 ? Key::of(16, 8) : Key::of(32, 32);
        const auto pick = [&](std::uint32_t most) {
            return static_cast<std::int64_t>(1 + random() % most);
        };
        const auto [n, b] = std::pair(pick(bucket[Axis::tokens]), pick(bucket[Axis::batch]));
        const std::vector<at::Tensor> values{
            at::randint(1, 99, {b, pick(7)}, on_device(at::kInt)),
            at::randint(1, 99, {b, pick(7)}, on_device(at::kInt)),
            at::randn({b, pick(3), n}, on_device(at::kBFloat16)),
            at::randint(1, 99, {pick(4), n, b}, on_device(at::kLong))};
        wait();
        param.update(bucket, named(param.inputs(), values), stream());
        wait();
        for (std::size_t i = 0; i < values.size(); ++i) {
            const auto& input = param.inputs()[i];
            const auto whole = param.get(i).cpu();
            EXPECT_TRUE(at::equal(whole, padded(input, values[i].cpu(), whole.sizes())))
                << input.name << ", turn " << turn;
            EXPECT_TRUE(at::equal(param.actual(i).cpu(), values[i].cpu()))
                << input.name << ", turn " << turn;
        }
    }
}

TEST(Padding, OfAnyStridesOnTheDevice) {
    GraphInputs param(
        {Input::device("rows", at::kInt, {Extent::along(Axis::tokens), Extent::fixed(4)},
                       Pad::value(5)),
         Input::device("whole", at::kInt, {Extent::along(Axis::tokens), Extent::fixed(4)})},
        {Key::of(6)}, {device(), 512});
    const auto rows = at::arange(12, on_device(at::kInt)).view({4, 3}).t();
    const auto whole = at::arange(24, on_device(at::kInt)).view({4, 6}).t();
    wait();
    param.update(Key::of(6), {{"rows", rows}, {"whole", whole}}, stream());
    wait();
    EXPECT_TRUE(at::equal(param.get("rows").cpu(), padded(param.inputs()[0], rows.cpu(), {6, 4})));
    EXPECT_TRUE(at::equal(param.get("whole").cpu(), whole.cpu()));
}

// Rows beyond the batch are undefined.
TEST(Padding, OfTokensAndNotOfTheBatch) {
    constexpr std::uint32_t most = 9;
    for (const auto role : {Role::host_input, Role::device_input}) {
        const auto input = [&](std::string_view name, std::vector<Extent> shape, Pad pad = {}) {
            return Input{std::string(name), at::kInt, std::move(shape), role, pad};
        };
        GraphInputs param(
            {input(names::tokens, {Extent::along(Axis::tokens)}),
             input(names::q_seq_lens, {Extent::up_to(most + 1)}),
             input(names::block_tables, {Extent::up_to(most), Extent::fixed(5)}, Pad::value(-3))},
            {Key::of(16)}, {device(), 512});
        const auto on =
            role == Role::host_input ? at::TensorOptions().dtype(at::kInt) : on_device(at::kInt);
        const std::vector<at::Tensor> values{at::arange(1, 12, on),
                                             at::tensor({0, 1, 4, 11}, at::kInt).to(on.device()),
                                             at::arange(6, on).view({3, 2})};
        param.select(Key::of(16));
        param.get(names::q_seq_lens).fill_(77);
        wait();
        param.update(Key::of(16), named(param.inputs(), values), stream());
        wait();
        EXPECT_TRUE(
            at::equal(param.tokens().cpu(), padded(param.inputs()[0], values[0].cpu(), {16})));
        EXPECT_TRUE(at::equal(param.q_seq_lens(4).cpu(), values[1].cpu()))
            << "four rows of three sequences";
        if (role == Role::device_input) {
            EXPECT_TRUE(
                at::equal(param.q_seq_lens().cpu().narrow(0, 4, 6), at::full({6}, 77, at::kInt)))
                << "the rest is not written";
        }
        EXPECT_TRUE(at::equal(param.block_tables(3).cpu(),
                              padded(param.inputs()[2], values[2].cpu(), {3, 5})));
    }
}

// Padding repeats the last length.
TEST(Padding, OfCumulativeLengthsIsEmptySequences) {
    const auto lengths = Extent::along(Axis::batch, 1, 1);
    GraphInputs param({Input::host(names::q_seq_lens, at::kInt, {lengths}, Pad::repeat_last()),
                       Input::device(names::kv_seq_lens, at::kInt, {lengths}, Pad::repeat_last())},
                      {Key::of(8, 4)}, {device(), 512});
    const auto on_it = at::tensor({0, 40, 41}, at::kInt).to(device());
    wait();
    param.update(
        Key::of(8, 4),
        {{names::kv_seq_lens, on_it}, {names::q_seq_lens, std::vector<std::int32_t>{0, 3, 4}}},
        stream());
    wait();
    EXPECT_TRUE(at::equal(param.q_seq_lens().cpu(), at::tensor({0, 3, 4, 4, 4}, at::kInt)));
    EXPECT_TRUE(at::equal(param.kv_seq_lens().cpu(), at::tensor({0, 40, 41, 41, 41}, at::kInt)));
    EXPECT_TRUE(at::equal(param.q_seq_lens(3).cpu(), at::tensor({0, 3, 4}, at::kInt)));
}

// The second dimension is padded.
TEST(Padding, OfPositionsOfImagesAndText) {
    for (const auto role : {Role::host_input, Role::device_input}) {
        GraphInputs param({{std::string(names::positions),
                            at::kInt,
                            {Extent::fixed(3), Extent::along(Axis::tokens)},
                            role,
                            {}}},
                          {Key::of(8), Key::of(16)}, {device(), 512});
        const auto positions = at::arange(33, at::kInt).view({3, 11});
        param.update(
            Key::of(16),
            {{names::positions, role == Role::host_input ? positions : positions.to(device())}},
            stream());
        wait();
        EXPECT_EQ(param.positions().sizes(), (at::IntArrayRef{3, 16}));
        EXPECT_TRUE(at::equal(param.positions(11).cpu(), positions));
        EXPECT_TRUE(
            at::equal(param.positions().cpu(), padded(param.inputs()[0], positions, {3, 16})));
        EXPECT_NE(refusal([&] { static_cast<void>(param.positions(17)); }).find("at most 16"),
                  std::string::npos);
    }
}

// An empty host vector usually means the engine filled only the device copy.
TEST(Padding, IsNotWhatAnEmptyValueMeans) {
    GraphInputs param(
        {Input::host("lengths", at::kInt, {Extent::along(Axis::batch)}),
         Input::host("pages", at::kInt, {Extent::up_to(8)}),
         Input::device("rows", at::kFloat, {Extent::along(Axis::tokens), Extent::fixed(2)})},
        {Key::of(4, 4)}, {device(), 256});
    const std::vector<std::int32_t> lengths{1, 2}, none;
    const auto said = [&](std::initializer_list<NamedValue> named) {
        return refusal([&] { param.update(Key::of(4, 4), named, stream()); });
    };
    EXPECT_EQ(said({{"lengths", none}}),
              "vmmgraph: cannot take input 'lengths': dimension 0 of the value has no elements; do "
              "not name the input where all of it is "
              "padding");
    EXPECT_NE(said({{"lengths", lengths}, {"rows", at::zeros({0, 2}, on_device(at::kFloat))}})
                  .find("input 'rows': dimension 0"),
              std::string::npos);
    EXPECT_EQ(said({{"lengths", at::Tensor()}}),
              "vmmgraph: cannot take input 'lengths': the tensor is undefined; do not name the "
              "input where all of it is padding");
    // Pages may be empty, and an absent value is padding.
    param.update(Key::of(4, 4), {{"lengths", lengths}, {"pages", none}, {"rows", Value()}},
                 stream());
    wait();
    EXPECT_TRUE(at::equal(param.get("lengths").cpu(), at::tensor({1, 2, 0, 0}, at::kInt)));
}

// Zeros are unsafe.
TEST(Padding, OfSlotsAndOfCumulativeLengthsIsChosen) {
    const auto declared = [](Input input) {
        return refusal([&] { GraphInputs({input}, {Key::of(4, 4)}, {device(), 256}); });
    };
    const auto slots = [](Pad pad) {
        return Input::host(names::new_cache_slots, at::kInt, {Extent::along(Axis::tokens)}, pad);
    };
    const auto lengths = [](Pad pad) {
        return Input::device("lengths", at::kInt, {Extent::along(Axis::batch, 1, 1)}, pad);
    };
    EXPECT_NE(declared(slots({})).find("slot 0 may belong to a sequence"), std::string::npos);
    EXPECT_NE(declared(lengths({})).find("Pad::repeat_last()"), std::string::npos);
    EXPECT_EQ(declared(slots(Pad::zero())) + declared(slots(Pad::value(-1))) +
                  declared(lengths(Pad::repeat_last())),
              "");
}

// A rank without tokens must not get another rank's padding.
TEST(Padding, IsNotInTheRowsOfAStepWithoutAny) {
    GraphInputs param({Input::output(names::hidden_states, at::kFloat,
                                     {Extent::along(Axis::tokens), Extent::fixed(3)})},
                      {Key::of(4)}, {device(), 256});
    EXPECT_EQ(param.hidden_states(0).sizes(), (at::IntArrayRef{0, 3}));
    EXPECT_EQ(param.hidden_states().sizes(), (at::IntArrayRef{4, 3}));
    EXPECT_EQ(param.hidden_states(4).sizes(), (at::IntArrayRef{4, 3}));
}

TEST(Padding, OutputsMayTakeTheirWidthFromTheFirstStep) {
    GraphInputs param({Input::output(names::aux_hidden_states),
                       Input::host(names::tokens, at::kInt, {Extent::along(Axis::tokens)}),
                       Input::output(names::hidden_states, at::kFloat,
                                     {Extent::along(Axis::tokens), Extent::fixed(3)})},
                      {Key::of(4), Key::of(8)}, {device(), 256});
    EXPECT_TRUE(param.has(names::aux_hidden_states) && !param.is_set(names::aux_hidden_states) &&
                param.is_set(names::tokens));
    EXPECT_NE(
        refusal([&] { static_cast<void>(param.aux_hidden_states()); }, VMMGRAPH_ERROR_WRONG_STATE)
            .find("no body has set it"),
        std::string::npos);
    param.select(Key::of(4));
    const OnStream on;
    const auto made = at::arange(24, on_device(at::kDouble)).view({4, 3, 2});
    param.set(names::aux_hidden_states, made);
    const auto* const address = param.aux_hidden_states().const_data_ptr();
    EXPECT_TRUE(at::equal(param.aux_hidden_states(3), made.narrow(0, 0, 3)));
    param.select(Key::of(8));
    const auto more = at::arange(48, on_device(at::kDouble)).view({8, 3, 2});
    param.set(names::aux_hidden_states, more);
    EXPECT_TRUE(at::equal(param.aux_hidden_states(), more));
    EXPECT_EQ(param.aux_hidden_states(8).const_data_ptr(), address) << "graphs have its address";
    EXPECT_NE(refusal([&] {
                  param.set(names::aux_hidden_states, made.narrow(2, 0, 1));
              }).find("the shape must be [4, 3, 2]"),
              std::string::npos);
    EXPECT_NE(refusal([&] { static_cast<void>(param.aux_hidden_states(9)); }).find("at most 8"),
              std::string::npos);
    param.set(names::hidden_states, at::ones({8, 3}, on_device(at::kFloat)));
    EXPECT_EQ(param.hidden_states().sum().item<double>(), 24);
    EXPECT_NE(refusal([&] {
                  param.set(names::tokens, at::zeros({8}, on_device(at::kInt)));
              }).find("only outputs"),
              std::string::npos);
    EXPECT_NE(refusal([] {
                  GraphInputs({Input::output("a"),
                               Input::host("a", at::kInt, {Extent::along(Axis::tokens)})},
                              {Key::of(4)}, {device(), 256});
              }).find("output 'a'"),
              std::string::npos);
}

// Steps may pass any subset in any order.
TEST(Padding, IsAllOfAnInputThatIsGone) {
    const auto tokens = Extent::along(Axis::tokens);
    GraphInputs param({Input::host(names::tokens, at::kInt, {tokens}),
                       Input::device(names::embeddings, at::kFloat, {tokens, Extent::fixed(2)}),
                       Input::host("states", at::kInt, {tokens}, Pad::value(-1))},
                      {Key::of(2)}, {device(), 512});
    const auto embeddings = at::ones({2, 2}, on_device(at::kFloat));
    const std::vector<std::int32_t> values{3, 4};
    wait();
    const auto update = [&](std::initializer_list<NamedValue> named) {
        param.update(Key::of(2), named, stream());
        wait();
    };
    update({{"states", values}, {names::embeddings, embeddings}, {names::tokens, values}});
    EXPECT_TRUE(at::equal(param.embeddings(), embeddings));
    EXPECT_TRUE(at::equal(param.get("states").cpu(), at::tensor({3, 4}, at::kInt)));
    update({{names::tokens, values}});
    EXPECT_EQ(param.embeddings().count_nonzero().item<std::int64_t>(), 0);
    EXPECT_TRUE(at::equal(param.get("states").cpu(), at::tensor({-1, -1}, at::kInt)));
    EXPECT_EQ(param.actual("states").numel(), 0);
    update({{"states", values}});
    EXPECT_EQ(param.tokens().count_nonzero().item<std::int64_t>(), 0);
    EXPECT_TRUE(at::equal(param.get("states").cpu(), at::tensor({3, 4}, at::kInt)));
}

}  // namespace
}  // namespace engine_tests
