// With product_rows a log-probability of a rollout server has the bits that the trainer computes
// for the token, and those of every other pass with the same row.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "common/coauthoring/tandem_config.h"
#include "common/loss/logits/linear_cross_entropy.h"
#include "common/model/passes/attention_context.h"
#include "common/model/testing/models.h"
#include "common/ops/products/fixed_rows.h"
#include "services/rollout/engine/models/torch_runner.h"
#include "tests/gpu/simulated/kernels.h"

namespace tandem::rollout {
namespace {

using Tokens = std::vector<std::vector<int32_t>>;
using LogProbs = std::vector<std::vector<float>>;  // of all tokens of a sequence but the first

constexpr double kTemperature = 0.7;
constexpr int64_t kBlocks = 3;  // of a sequence

// MKL, which multiplies here in cuBLAS's place, rounds a row of 30 inputs by its place among the
// rows where there are fewer outputs than 12, as of a router of five experts.
const nlohmann::json kExperts = {{"num_experts", 12}};

Tokens TestTokens(int32_t longest) {
  Tokens sequences;
  for (const int32_t length : {longest, 9, 12, 2}) {
    std::vector<int32_t>& tokens = sequences.emplace_back();
    for (int32_t i = 0; i < length; ++i) tokens.push_back((i * i + length) % 60);
  }
  return sequences;
}

// Consumes some tokens of some sequences in every pass.
class Rollout {
 public:
  Rollout(const std::string& family, at::ScalarType type, const Tokens& sequences)
      : sequences_(sequences),
        logprobs_(sequences.size()),
        read_(sequences.size()),
        runner_(
            TinyModel(family, kExperts, {.placement = {.device = {at::kCUDA, 0}, .dtype = type}}),
            kBlocks * std::ssize(sequences),
            type == at::kFloat ? DType::kFloat32 : DType::kBFloat16) {}

  // Consumes up to `counts[s]` more tokens of sequence s, as far as there are more behind them.
  void Run(const std::vector<int64_t>& counts) {
    std::vector<std::vector<int32_t>> blocks;
    std::vector<std::vector<int64_t>> wanted;
    std::vector<size_t> chosen;
    std::vector<OutputRow> rows;
    std::vector<int64_t> ends;
    for (size_t s = 0; s < sequences_.size(); ++s) {
      const int64_t end = std::min(read_[s] + counts[s], std::ssize(sequences_[s]) - 1);
      if (end == read_[s]) continue;
      chosen.push_back(s);
      ends.push_back(end);
      std::vector<int32_t>& of_sequence = blocks.emplace_back();
      for (int64_t i = 0; i < kBlocks; ++i) {
        of_sequence.push_back(static_cast<int32_t>(kBlocks * static_cast<int64_t>(s) + i));
      }
      std::vector<int64_t>& of_rows = wanted.emplace_back();
      for (int64_t row = 0; row < end - read_[s]; ++row) {
        of_rows.push_back(row);
        rows.push_back({.token = sequences_[s][static_cast<size_t>(read_[s] + row + 1)],
                        .sampling = &sampling_});
      }
    }
    std::vector<DecodeInput> inputs;
    for (size_t i = 0; i < chosen.size(); ++i) {
      const size_t s = chosen[i];
      inputs.push_back({.blocks = blocks[i],
                        .start = read_[s],
                        .tokens = std::span(sequences_[s]).subspan(read_[s], ends[i] - read_[s]),
                        .output_rows = wanted[i]});
    }
    PassResults results;
    const absl::Status status =
        runner_.Run({.copies = {}, .sequences = inputs, .rows = rows}, results);
    ASSERT_TRUE(status.ok()) << status;
    auto result = results.begin();
    for (size_t i = 0; i < chosen.size(); ++i) {
      for (; read_[chosen[i]] < ends[i]; ++read_[chosen[i]]) {
        logprobs_[chosen[i]].push_back((result++)->value().logprob);
      }
    }
  }

  // Prompts together, then single tokens in changing company.
  const LogProbs& RunAll() {
    const int64_t longest = std::ssize(sequences_[0]);
    Run({longest - 8, 3, 0, 0});
    Run({1, 1, 7, 0});
    for (int i = 0; i < 6; ++i) Run({1, i % 3 == 0 ? 1 : 0, 1, i == 4 ? 1 : 0});
    Run({0, 9, 9, 9});
    return logprobs_;
  }

 private:
  const SamplingParams sampling_ = {.temperature = kTemperature};
  const Tokens& sequences_;
  LogProbs logprobs_;
  std::vector<int64_t> read_;
  TorchRunner runner_;
};

// The log-probs of a micro-batch, from hidden states with a gradient.
LogProbs TrainerLogProbs(const std::string& family, at::ScalarType type, const Tokens& sequences) {
  const auto model =
      TinyModel(family, kExperts,
                {.requires_grad = true, .placement = {.device = {at::kCUDA, 0}, .dtype = type}});
  std::vector<std::vector<int64_t>> ids;
  for (const auto& tokens : sequences) ids.emplace_back(tokens.begin(), tokens.end());
  const RaggedBatch batch = MakeRaggedBatch(ids, model->device());
  CausalContext context;
  const at::Tensor hidden = model->HiddenStates(batch, context);
  EXPECT_TRUE(hidden.requires_grad());
  loss::OutputRows rows;
  for (size_t s = 0; s < ids.size(); ++s) {
    for (size_t i = 0; i + 1 < ids[s].size(); ++i) {
      rows.positions.push_back(batch.RowOf(s, static_cast<int64_t>(i)));
      rows.labels.push_back(ids[s][i + 1]);
      rows.temperatures.push_back(kTemperature);
    }
  }
  auto output_loss = loss::LinearCrossEntropyLoss::Create(model->output_weight(),
                                                          {.soft_cap = model->logit_soft_cap()})
                         .value();
  EXPECT_EQ(output_loss->impl(), loss::LossImpl::kRows);
  const std::vector<double> all = output_loss->LogProbs(hidden, rows).value().logprobs;
  LogProbs logprobs;
  auto next = all.begin();
  for (const auto& tokens : ids) {
    std::vector<float>& of_sequence = logprobs.emplace_back();
    for (size_t i = 0; i + 1 < tokens.size(); ++i) {
      of_sequence.push_back(static_cast<float>(*next++));
    }
  }
  return logprobs;
}

class RolloutBitsTest : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    // Its attention is that of ATen, which computes rows together.
    if (TinyConfig(GetParam()).decoder.latent.has_value()) GTEST_SKIP();
    ops::SetProductRows(16);
  }
  void TearDown() override { ops::SetProductRows(0); }

 private:
  const simulated_gpu::WithKernels kernels_;
};

TEST_P(RolloutBitsTest, TheTrainersAreThoseOfTheRollout) {
  // With partial results of attention in one family, and with a window and a soft cap in another.
  const bool is_long = GetParam() == "llama" || GetParam() == "gemma2";
  const Tokens sequences = TestTokens(is_long ? 140 : 70);
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    Rollout rollout(GetParam(), type, sequences);
    EXPECT_EQ(rollout.RunAll(), TrainerLogProbs(GetParam(), type, sequences)) << type;
  }
}

INSTANTIATE_TEST_SUITE_P(Families, RolloutBitsTest, testing::ValuesIn(EveryFamily()),
                         [](const auto& family) { return family.param; });

// A step's forward and backward pass with adapters, and without any rows, as a rank has that waits
// for others.
TEST(TrainingWithProductRowsTest, AdaptersAndEmptyBatchesHaveGradients) {
  const simulated_gpu::WithKernels kernels;
  const absl::Cleanup reset = [] { ops::SetProductRows(0); };
  ops::SetProductRows(16);
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16}) {
    const auto model = TinyModel("llama", {},
                                 {.requires_grad = true,
                                  .lora = {.rank = 2, .alpha = 4, .target_modules = {"all-linear"}},
                                  .placement = {.device = {at::kCUDA, 0}, .dtype = type}});
    CausalContext context;
    model->HiddenStates(MakeRaggedBatch({{1, 2, 3}, {4, 5}}, model->device()), context)
        .sum()
        .backward();
    int64_t with_gradients = 0;
    for (const auto& [name, tensor] : model->Parameters())
      with_gradients += tensor.grad().defined();
    EXPECT_GT(with_gradients, 0) << type;
    const at::Tensor none = model->HiddenStates(MakeRaggedBatch({}, model->device()), context);
    EXPECT_EQ(none.size(0), 0);
    none.sum().backward();
  }
}

// Without the setting a product's rows depend on the number of them.
TEST(RolloutBitsWithoutProductRowsTest, BitsDiffer) {
  const simulated_gpu::WithKernels kernels;
  const Tokens sequences = TestTokens(70);
  Rollout rollout("llama", at::kFloat, sequences);
  EXPECT_NE(rollout.RunAll(), TrainerLogProbs("llama", at::kFloat, sequences));
}

}  // namespace
}  // namespace tandem::rollout
