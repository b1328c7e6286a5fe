// An xLLM executor (examples/xllm) with xLLM-shaped steps: cumulative lengths from 0, slots padded
// with -1, block 0 in use, device lengths with or without host copies, prefills, chunks, mixed
// steps, decodes, ranks without requests. Results equal a fake model's eager run bit for bit: small
// integers in doubles make addition order irrelevant.
#include <algorithm>
#include <numeric>
#include <random>
#include <stdexcept>

#include <ATen/ATen.h>

#include "../../examples/xllm/attention_runner.cpp"
#include "../../examples/xllm/vmmgraph_errors.h"
#include "../../examples/xllm/vmmgraph_executor_impl.cpp"
#include "devices.hpp"

namespace xllm {
namespace {

using engine_tests::device;
using engine_tests::has_gpu;
using engine_tests::most_steps;
using vmmgraph::engine::Mode;
using vmmgraph::engine::Reason;
using Type = BatchForwardType;
using Ints = std::vector<std::int32_t>;

constexpr std::int64_t block_size = 4;
constexpr std::int64_t max_len = 32;
constexpr std::int64_t max_blocks = max_len / block_size + 1;
constexpr std::int64_t width = 8;
constexpr std::int64_t layers = 2;

torch::Tensor ints(const Ints& values) { return at::tensor(values, at::kInt).to(device()); }
Ints on_host(const torch::Tensor& tensor) {
    const auto flat = tensor.cpu().contiguous();
    return {flat.const_data_ptr<std::int32_t>(),
            flat.const_data_ptr<std::int32_t>() + flat.numel()};
}
torch::Tensor reduced(const torch::Tensor& tensor) { return tensor.remainder(1009); }

}  // namespace

// Implemented by the engine.

namespace layer {

AttentionMetadata AttentionMetadataBuilder::build(const ModelInputParams& params, bool,
                                                  const std::optional<torch::Tensor>&,
                                                  const std::optional<torch::Device>& device) {
    const auto& on_device = params.attention.device;
    AttentionMetadata made;
    made.q_cu_seq_lens = on_device.q_seq_lens;
    made.kv_cu_seq_lens = on_device.kv_seq_lens;
    made.slot_mapping = on_device.new_cache_slots;
    made.block_table = on_device.block_tables;
    made.paged_kv_indptr = on_device.paged_kv_indptr;
    made.paged_kv_indices = on_device.paged_kv_indices;
    made.paged_kv_last_page_len = on_device.paged_kv_last_page_len;
    made.max_query_len = params.meta.q_max_seq_len;
    made.max_seq_len = params.meta.kv_max_seq_len;
    made.is_prefill = params.meta.batch_forward_type.is_prefill();
    made.is_chunked_prefill = params.meta.batch_forward_type.is_mixed() ||
                              params.meta.batch_forward_type.is_chunked_prefill();
    made.is_dummy = params.meta.q_max_seq_len == 0;
    if (made.is_dummy) {
        const auto options = torch::TensorOptions().dtype(torch::kInt).device(device.value());
        made.slot_mapping = torch::zeros({1}, options);
        made.q_cu_seq_lens = made.kv_cu_seq_lens = made.paged_kv_indptr = torch::arange(2, options);
        made.paged_kv_indices = torch::zeros({1}, options);
        made.paged_kv_last_page_len = torch::ones({1}, options);
        made.block_table = torch::zeros({1, 1}, options);
    }
    made.plan_info = std::make_shared<PlanInfo>();
    return made;
}

namespace flashinfer {
namespace {
// Sequences of the last plans.
std::int64_t planned_prefill = 0;
std::int64_t planned_decode = 0;
}  // namespace

void update_prefill_plan_info(std::shared_ptr<PlanInfo> plan_info, const std::string&,
                              const AttentionMetadata& attn_meta, c10::ScalarType, c10::ScalarType,
                              c10::ScalarType, std::int32_t, std::int32_t, std::int32_t,
                              std::int32_t, bool) {
    planned_prefill = attn_meta.q_cu_seq_lens.size(0) - 1;
    const auto lengths = on_host(attn_meta.q_cu_seq_lens);
    plan_info->plan_info.assign(lengths.begin(), lengths.end());
}

void update_decode_plan_info(std::shared_ptr<PlanInfo> plan_info, const std::string&,
                             const AttentionMetadata& attn_meta, c10::ScalarType, c10::ScalarType,
                             c10::ScalarType, std::int32_t, std::int32_t, std::int32_t,
                             std::int32_t, std::int32_t, std::int32_t, bool, bool) {
    planned_decode = attn_meta.paged_kv_last_page_len.size(0);
    plan_info->plan_info = {planned_decode};
}
}  // namespace flashinfer
}  // namespace layer

namespace kernel::cuda {

std::string determine_attention_backend(std::int64_t, bool, bool) { return "fa2"; }
bool should_use_tensor_core(torch::ScalarType, std::int64_t, std::int64_t) { return false; }

// Prefix sums within each sequence.
void batch_prefill(const std::string&, ffi::Array<std::int64_t> plan, torch::Tensor, torch::Tensor,
                   torch::Tensor, torch::Tensor query, torch::Tensor key, torch::Tensor value,
                   torch::Tensor q_cu_seq_lens, torch::Tensor, std::int64_t, double,
                   torch::Tensor output, std::optional<torch::Tensor>&) {
    const auto lengths = on_host(q_cu_seq_lens);
    if (!std::equal(lengths.begin(), lengths.end(), plan.begin(), plan.end()) ||
        query.size(0) != lengths.back()) {
        throw std::runtime_error("the plan is not the step's");
    }
    for (std::size_t i = 0; i + 1 < lengths.size(); ++i) {
        const auto rows = [&](const torch::Tensor& of) {
            return of.slice(0, lengths[i], lengths[i + 1]);
        };
        rows(output).copy_((rows(key) + rows(value)).cumsum(0) + rows(query));
    }
}

}  // namespace kernel::cuda

namespace {

// Eager runs use host block tables, graphs use paged metadata on the device.
class FakeCausalLM final : public CausalLM {
public:
    torch::Tensor table = at::randint(1, 50, {100, width}, engine_tests::on_device(at::kDouble));
    bool has_aux = false;
    // Local rows follow the data-parallel group's counts.
    std::int64_t rank = 0;
    bool refuses_captures = false;
    int forwards = 0;

    ModelOutput forward(const torch::Tensor& tokens, const torch::Tensor& positions,
                        std::vector<KVCache>& caches, const ModelInputParams& params) override {
        ++forwards;
        const auto& told = params.parallel.dp_global_token_nums;
        if (told.size() > 1 && told[static_cast<std::size_t>(rank)] != tokens.size(0)) {
            throw std::runtime_error(
                "a collective of this rank is of another length than the group was told");
        }
        const auto metadata = params.attn_metadata
                                  ? *params.attn_metadata
                                  : layer::AttentionMetadataBuilder::build(
                                        params, false, std::nullopt, tokens.device());
        if (refuses_captures && metadata.enable_cuda_graph) {
            throw std::runtime_error("no graph today");
        }
        const auto& embedding = params.embedding.input_embedding;
        auto x = embedding.defined() ? embedding : table.index_select(0, tokens.to(at::kLong));
        x = reduced(x + positions.to(at::kDouble).unsqueeze(1));
        std::vector<torch::Tensor> aux;
        for (auto& cache : caches) {
            write(cache, metadata.slot_mapping, x);
            x = reduced(x * 3 + attend(cache, metadata, x));
            aux.push_back(x);
        }
        return has_aux ? ModelOutput(x, torch::Tensor(), at::stack(aux, 1)) : ModelOutput(x);
    }

private:
    // The real kernel skips negative slots.
    static void write(const KVCache& cache, const torch::Tensor& slots, const torch::Tensor& x) {
        auto rows = cache.get_k_cache();
        const auto skipped = (slots < 0).to(at::kLong);
        const auto where = slots * (1 - skipped) + skipped * (rows.size(0) - 1);
        rows.index_copy_(0, where, x);
        cache.get_v_cache().index_copy_(0, where, reduced(x * 7));
    }

    static torch::Tensor attend(const KVCache& cache, const layer::AttentionMetadata& metadata,
                                const torch::Tensor& x) {
        const auto k = cache.get_k_cache(), v = cache.get_v_cache();
        auto out = at::zeros_like(x);
        if (metadata.is_prefill) {
            std::optional<torch::Tensor> no_lse;
            auto plan = metadata.plan_info->plan_info;
            if (!metadata.enable_cuda_graph) {
                const auto lengths = on_host(metadata.q_cu_seq_lens);
                plan.assign(lengths.begin(), lengths.end());
            }
            kernel::cuda::batch_prefill_with_optional_piecewise_capture(
                "", plan, {}, {}, {}, x, x, reduced(x * 7), metadata.q_cu_seq_lens,
                metadata.kv_cu_seq_lens, -1, 1, out, no_lse);
            return reduced(out);
        }
        if (metadata.enable_cuda_graph) {
            if (metadata.is_chunked_prefill || metadata.is_dummy) {
                throw std::runtime_error("a graph of a step that none is made for");
            }
            const auto start =
                metadata.paged_kv_indptr.narrow(0, 0, x.size(0)).to(at::kLong).unsqueeze(1);
            const auto pages =
                metadata.paged_kv_indptr.narrow(0, 1, x.size(0)).to(at::kLong).unsqueeze(1) - start;
            const auto length = (pages - 1) * block_size +
                                metadata.paged_kv_last_page_len.to(at::kLong).unsqueeze(1);
            const auto j = at::arange(max_len, start.options()).unsqueeze(0);
            const auto there = (j < length).logical_and(pages > 0);
            const auto mask = there.to(at::kLong);
            const auto page = ((start + at::floor_divide(j, block_size)) * mask).flatten();
            const auto block =
                metadata.paged_kv_indices.to(at::kLong).index_select(0, page).view_as(there);
            const auto slot = ((block * block_size + j.remainder(block_size)) * mask).flatten();
            const auto both = (k.index_select(0, slot) + v.index_select(0, slot))
                                  .view({x.size(0), max_len, width});
            return reduced((both * mask.unsqueeze(2)).sum(1) + x);
        }
        const auto q = on_host(metadata.q_cu_seq_lens), kv = on_host(metadata.kv_cu_seq_lens);
        const auto blocks = metadata.block_table.cpu();
        for (std::size_t i = 0; i + 1 < q.size(); ++i) {
            const auto queries = q[i + 1] - q[i], length = kv[i + 1] - kv[i];
            for (int query = 0; query < queries; ++query) {
                std::vector<std::int64_t> slots;
                for (int j = 0; j <= length - queries + query; ++j) {
                    const auto block =
                        blocks[static_cast<std::int64_t>(i)][j / block_size].item<std::int64_t>();
                    slots.push_back(block * block_size + j % block_size);
                }
                const auto rows = at::tensor(slots, at::kLong).to(k.device());
                out[q[i] + query] =
                    (k.index_select(0, rows) + v.index_select(0, rows)).sum(0) + x[q[i] + query];
            }
        }
        return reduced(out);
    }
};

std::vector<KVCache> make_caches(std::int64_t blocks) {
    std::vector<KVCache> caches;
    for (std::int64_t i = 0; i < layers; ++i) {
        const auto options = engine_tests::on_device(at::kDouble);
        caches.emplace_back(at::randint(0, 9, {blocks * block_size + 1, width}, options),
                            at::randint(0, 9, {blocks * block_size + 1, width}, options));
    }
    return caches;
}
std::vector<KVCache> copy_of(const std::vector<KVCache>& caches) {
    std::vector<KVCache> copies;
    for (const auto& cache : caches) {
        copies.emplace_back(cache.get_k_cache().clone(), cache.get_v_cache().clone());
    }
    return copies;
}

struct Sequence {
    std::int32_t length = 0;
    Ints blocks;
};

struct StepInput {
    torch::Tensor tokens, positions;
    ModelInputParams params;
};

// Uses block 0, too.
class Scheduler {
public:
    explicit Scheduler(std::uint64_t seed) : random(seed) {}
    std::mt19937_64 random;
    std::vector<Sequence> running;
    std::int32_t next_block = 0;

    StepInput step(Type type, const std::vector<std::pair<std::size_t, std::int32_t>>& work) {
        StepInput made;
        Ints tokens, positions, slots, indices, last, q{0}, kv{0}, indptr{0};
        std::int32_t longest = 0, most_queries = 0;
        auto tables = at::zeros({static_cast<std::int64_t>(work.size()), max_blocks}, at::kInt);
        std::int64_t row = 0;
        for (const auto& [which, count] : work) {
            auto& sequence = running[which];
            for (std::int32_t i = 0; i < count; ++i) {
                if (sequence.length % block_size == 0) {
                    sequence.blocks.push_back(next_block++);
                }
                tokens.push_back(static_cast<std::int32_t>(random() % 100));
                positions.push_back(sequence.length);
                slots.push_back(sequence.blocks.back() * static_cast<std::int32_t>(block_size) +
                                sequence.length % 4);
                ++sequence.length;
            }
            for (std::size_t i = 0; i < sequence.blocks.size(); ++i) {
                tables[row][static_cast<std::int64_t>(i)] = sequence.blocks[i];
            }
            ++row;
            indices.insert(indices.end(), sequence.blocks.begin(), sequence.blocks.end());
            indptr.push_back(static_cast<std::int32_t>(indices.size()));
            last.push_back((sequence.length - 1) % static_cast<std::int32_t>(block_size) + 1);
            q.push_back(q.back() + count);
            kv.push_back(kv.back() + sequence.length);
            longest = std::max(longest, sequence.length);
            most_queries = std::max(most_queries, count);
        }
        made.tokens = ints(tokens);
        made.positions = ints(positions);
        auto& params = made.params;
        params.meta = {type, static_cast<std::int32_t>(work.size()), longest, most_queries};
        const auto columns = (longest + block_size - 1) / block_size;
        params.attention.device = {
            ints(q),      ints(kv),
            ints(slots),  tables.narrow(1, 0, columns).contiguous().to(device()),
            ints(indptr), ints(indices),
            ints(last)};
        if (random() % 2 == 0) {
            params.attention.host = {q, kv};
        }
        return made;
    }

    StepInput decode(std::size_t sequences) {
        std::vector<std::pair<std::size_t, std::int32_t>> work;
        for (std::size_t i = 0; i < sequences; ++i) {
            work.emplace_back(i, 1);
        }
        return step(Type::DECODE, work);
    }

    void start(std::size_t sequences, std::int32_t length) {
        for (std::size_t i = 0; i < sequences; ++i) {
            running.emplace_back();
            step(Type::PREFILL, {{running.size() - 1, length}});
        }
    }
};

class XllmShape : public testing::Test {
protected:
    ModelArgs args;
    runtime::Options options;
    FakeCausalLM model;
    Scheduler scheduler{7};
    std::vector<KVCache> caches = make_caches(256);
    std::unique_ptr<runtime::cuda::VmmGraphExecutorImpl> executor;

    void SetUp() override {
        config() = ExecutionConfig();
        config().enable_prefill_piecewise_graph(true).max_tokens_for_graph_mode(64);
        num_model_execution_total_eager = 0;
    }
    static ExecutionConfig& config() { return ExecutionConfig::get_instance(); }
    void make() {
        executor =
            std::make_unique<runtime::cuda::VmmGraphExecutorImpl>(&model, args, device(), options);
    }

    void run(const StepInput& input, std::int64_t rows = -1) {
        if (!executor) {
            make();
        }
        auto truth_caches = copy_of(caches);
        const engine_tests::OnStream on;
        engine_tests::wait();
        const auto truth = model.forward(input.tokens, input.positions, truth_caches, input.params);
        const auto output = executor->run(input.tokens, input.positions, caches, input.params);
        engine_tests::wait();
        ASSERT_EQ(output.hidden_states.size(0), rows < 0 ? input.tokens.size(0) : rows);
        if (rows != 0) {
            EXPECT_TRUE(at::equal(output.hidden_states, truth.hidden_states));
        }
        EXPECT_EQ(output.aux_hidden_states.defined(),
                  model.has_aux && options.enable_graph_aux_hidden_states());
        if (output.aux_hidden_states.defined() && rows != 0) {
            EXPECT_TRUE(at::equal(output.aux_hidden_states, truth.aux_hidden_states));
        }
        for (std::size_t i = 0; rows != 0 && i < caches.size(); ++i) {
            const auto blocks = [](const torch::Tensor& cache) {
                return cache.narrow(0, 0, cache.size(0) - 1);
            };
            EXPECT_TRUE(
                at::equal(blocks(caches[i].get_k_cache()), blocks(truth_caches[i].get_k_cache())));
            EXPECT_TRUE(
                at::equal(blocks(caches[i].get_v_cache()), blocks(truth_caches[i].get_v_cache())));
        }
    }
    std::uint64_t full() const { return ran(Mode::full); }
    std::uint64_t piecewise() const { return ran(Mode::piecewise); }
    std::uint64_t ran(Mode mode) const {
        return executor->graphs().steps(mode, Reason::hit) +
               executor->graphs().steps(mode, Reason::padded) +
               executor->graphs().steps(mode, Reason::captured);
    }
};

TEST_F(XllmShape, EveryKindOfStepIsTheEagerOneBitForBit) {
    std::int64_t decodes = 0, prefills = 0, others = 0;
    const auto random = [&](std::uint64_t below) {
        return static_cast<std::int32_t>(scheduler.random() % below);
    };
    const int steps = most_steps(150);
    for (int step = 0; step < steps; ++step) {
        SCOPED_TRACE(step);
        auto& running = scheduler.running;
        // Ended sequences' blocks stay unused until the cache is full.
        running.erase(std::remove_if(running.begin(), running.end(),
                                     [](const Sequence& one) { return one.length + 6 > max_len; }),
                      running.end());
        if (scheduler.next_block > 200) {
            running.clear();
            scheduler.next_block = 0;
        }
        const int kind = running.empty() ? 0 : random(6);
        std::vector<std::pair<std::size_t, std::int32_t>> work;
        auto type = Type::DECODE;
        if (kind == 0 && running.size() < 6) {
            type = Type::PREFILL;
            for (int i = 0; i < 1 + random(2); ++i) {
                running.emplace_back();
                work.emplace_back(running.size() - 1, 1 + random(20));
            }
            ++prefills;
        } else if (kind == 1) {
            type = Type::CHUNKED_PREFILL;
            work.emplace_back(0, 2 + random(4));
            ++others;
        } else if (kind == 2 && running.size() > 1) {
            type = Type::MIXED;
            work.emplace_back(0, 1);
            work.emplace_back(1, 2 + random(4));
            ++others;
        } else {
            for (std::size_t i = 0; i < running.size(); ++i) {
                work.emplace_back(i, 1);
            }
            ++decodes;
        }
        run(scheduler.step(type, work));
        ASSERT_FALSE(HasFailure());
    }
    EXPECT_EQ(full(), decodes);
    EXPECT_EQ(piecewise(), prefills);
    EXPECT_EQ(num_model_execution_total_eager, others);
}

TEST_F(XllmShape, AHundredSequencesRunInAGraphOf112) {
    options.max_seqs_per_batch(100);
    caches = make_caches(400);
    scheduler.start(100, 5);
    run(scheduler.decode(100));
    run(scheduler.decode(97));
    EXPECT_EQ(layer::flashinfer::planned_decode, 112);
    EXPECT_EQ(full(), 2);
}

TEST_F(XllmShape, WithoutPaddingEveryNumberOfSequencesHasItsGraph) {
    config().enable_graph_mode_decode_no_padding(true);
    scheduler.start(7, 3);
    run(scheduler.decode(7));
    run(scheduler.decode(5));
    EXPECT_EQ(layer::flashinfer::planned_decode, 5);
    EXPECT_EQ(executor->graphs().stats().captures, 2);
}

TEST_F(XllmShape, PrefillsAreEagerWhereTheirFlagIsOff) {
    config().enable_prefill_piecewise_graph(false);
    scheduler.running.resize(1);
    run(scheduler.step(Type::PREFILL, {{0, 9}}));
    EXPECT_EQ(num_model_execution_total_eager, 1);
}

TEST_F(XllmShape, APrefillIsPlannedForTheSequencesThatItHas) {
    scheduler.running.resize(3);
    run(scheduler.step(Type::PREFILL, {{0, 9}, {1, 4}, {2, 1}}));
    EXPECT_EQ(layer::flashinfer::planned_prefill, 3);
    scheduler.running.resize(4);
    run(scheduler.step(Type::PREFILL, {{3, 15}}));
    EXPECT_EQ(layer::flashinfer::planned_prefill, 1);
    EXPECT_EQ(executor->graphs().stats().captures, 1) << "both in the graph of 16 tokens";
}

TEST_F(XllmShape, AuxiliaryHiddenStatesComeBack) {
    options.enable_graph_aux_hidden_states(true);
    model.has_aux = true;
    scheduler.start(5, 3);
    run(scheduler.decode(5));
    run(scheduler.decode(3));
    scheduler.running.resize(6);
    run(scheduler.step(Type::PREFILL, {{5, 9}}));
    run(scheduler.decode(2));
    EXPECT_EQ(full() + piecewise(), 4);
}

TEST_F(XllmShape, EmbeddingsThatComeAndGoHaveGraphsOfTheirOwn) {
    scheduler.start(3, 3);
    for (int step = 0; step < 4; ++step) {
        auto input = scheduler.decode(3);
        if (step % 2 == 1) {
            input.params.embedding.input_embedding =
                at::randint(0, 9, {3, width}, engine_tests::on_device(at::kDouble));
        }
        run(input);
    }
    EXPECT_EQ(executor->graphs().stats().captures, 2);
}

TEST_F(XllmShape, ARankWithoutRequestsRunsTheGraphOfTheOthers) {
    options.dp_size(2);
    options.world_size(2);
    model.rank = 1;
    // Must not be written. The eager run of such a rank writes it, so it is no reference.
    const auto before = copy_of(caches);
    StepInput dummy;
    dummy.tokens = ints({0});
    dummy.positions = ints({0});
    dummy.params.parallel.dp_global_token_nums = {5, 1};
    dummy.params.parallel.dp_is_decode = {1, 1};
    make();
    for (int step = 0; step < 2; ++step) {
        const engine_tests::OnStream on;
        const auto output = executor->run(dummy.tokens, dummy.positions, caches, dummy.params);
        engine_tests::wait();
        EXPECT_EQ(output.hidden_states.sizes(), (at::IntArrayRef{1, width}));
    }
    for (std::size_t i = 0; i < caches.size(); ++i) {
        const auto rows = before[i].get_k_cache().size(0) - 1;
        EXPECT_TRUE(at::equal(caches[i].get_k_cache().narrow(0, 0, rows),
                              before[i].get_k_cache().narrow(0, 0, rows)));
    }
    scheduler.start(3, 3);
    auto input = scheduler.decode(3);
    input.params.parallel.dp_global_token_nums = {6, 3};
    input.params.parallel.dp_is_decode = {1, 1};
    run(input);
    EXPECT_EQ(layer::flashinfer::planned_decode, 8) << "the largest rank's graph";
    EXPECT_EQ(executor->graphs().stats().captures, 1);
    // All ranks run eagerly.
    input = scheduler.decode(3);
    input.params.parallel.dp_global_token_nums = {20, 3};
    input.params.parallel.dp_is_decode = {0, 1};
    run(input);
    EXPECT_EQ(num_model_execution_total_eager, 1);
}

TEST_F(XllmShape, ADecodeWhoseGraphCannotBeCapturedThrows) {
    model.refuses_captures = true;
    scheduler.start(3, 3);
    make();
    const auto input = scheduler.decode(3);
    EXPECT_THROW(executor->run(input.tokens, input.positions, caches, input.params),
                 std::runtime_error);
    EXPECT_EQ(piecewise(), 0);
    model.refuses_captures = false;
    run(input);
    EXPECT_EQ(full(), 1) << "the next step tries again";
}

TEST_F(XllmShape, LengthsThatAreNowhereAreAnErrorThatNamesThem) {
    scheduler.start(2, 3);
    make();
    auto input = scheduler.decode(2);
    input.params.attention.device.kv_seq_lens = torch::Tensor();
    try {
        static_cast<void>(executor->run(input.tokens, input.positions, caches, input.params));
        ADD_FAILURE() << "padding was taken for lengths";
    } catch (const vmmgraph::Error& error) {
        EXPECT_NE(std::string(error.what()).find("input 'kv_seq_lens'"), std::string::npos)
            << error.what();
    }
}

TEST_F(XllmShape, SequencesBeyondTheModelsLengthAreEager) {
    args.max_position_embeddings(16);
    scheduler.start(2, 16);
    run(scheduler.decode(2));
    EXPECT_EQ(num_model_execution_total_eager, 1);
}

TEST_F(XllmShape, ATargetAndItsDraftShareAnArena) {
    FakeCausalLM draft;
    auto draft_caches = make_caches(256);
    auto executor_of_draft =
        std::make_unique<runtime::cuda::VmmGraphExecutorImpl>(&draft, args, device(), options);
    scheduler.start(5, 3);
    for (int step = 0; step < 4; ++step) {
        const auto input = scheduler.decode(5);
        run(input);
        auto truth_caches = copy_of(draft_caches);
        const engine_tests::OnStream on;
        const auto truth = draft.forward(input.tokens, input.positions, truth_caches, input.params);
        const auto output =
            executor_of_draft->run(input.tokens, input.positions, draft_caches, input.params);
        engine_tests::wait();
        EXPECT_TRUE(at::equal(output.hidden_states, truth.hidden_states));
    }
    EXPECT_EQ(ExecutorImplFactory::get_instance().creators.count("vmmgraph"), 1u);
}

TEST(XllmErrorsDeathTest, AreFatalAndLogLinesAreGlogs) {
    log_vmmgraph_by_glog();
    EXPECT_EQ(or_fatal([] { return 3; }), 3);
    EXPECT_DEATH(or_fatal([] { throw std::runtime_error("no room"); }), "no room");
    vmmgraph::set_log_sink({});
}

}  // namespace
}  // namespace xllm
