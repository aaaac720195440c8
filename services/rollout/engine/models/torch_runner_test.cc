#include "services/rollout/engine/models/torch_runner.h"

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "common/coauthoring/tandem_config.h"
#include "common/model/testing/models.h"
#include "common/speculator/speculator_kind.h"
#include "common/tensor/aten/aten_bytes.h"
#include "services/rollout/engine/testing/random_speculator.h"

namespace tandem::rollout {
namespace {

constexpr int64_t kHeads = 3;

// The hidden states after the final norm [T, H].
at::Tensor HiddenOf(const Model& model, const std::vector<int32_t>& tokens) {
  CausalContext causal;
  return model.HiddenStates(MakeRaggedBatch({{tokens.begin(), tokens.end()}}), causal);
}

TEST(TorchRunnerTest, HeadsDraftFromTheHiddenStatesOfTheRowsThatWereDrawn) {
  const c10::InferenceMode inference_mode;
  for (const char* kind : {"mlp", "arctic_lstm"}) {
    for (const DType type : {DType::kFloat32, DType::kBFloat16}) {
      const LoadOptions options = {.placement = {.dtype = ToScalarType(type)}};
      const auto model = TinyModel("llama", {}, options);
      const auto speculator = RandomSpeculator(*model, kHeads, kind);
      TorchRunner runner(TinyModel("llama", {}, options), /*num_blocks=*/2, type,
                         RandomSpeculator(*model, kHeads, kind));

      const std::vector<int32_t> a = {5, 9, 3, 60, 7, 11, 4}, b = {8, 8, 2};
      const std::vector<int32_t> blocks_a = {1}, blocks_b = {0};
      const SamplingParams sampling;
      const std::vector<int64_t> rows_a = {2, 6}, rows_b = {2};
      const std::vector<DecodeInput> sequences = {
          {.blocks = blocks_a, .start = 0, .tokens = a, .output_rows = rows_a},
          {.blocks = blocks_b, .start = 0, .tokens = b, .output_rows = rows_b}};
      const std::vector<OutputRow> rows(3, {.sampling = &sampling});
      PassResults results;
      ASSERT_TRUE(runner.Run({.copies = {}, .sequences = sequences, .rows = rows}, results).ok());

      const at::Tensor hidden =
          at::stack({HiddenOf(*model, b)[2], HiddenOf(*model, a)[2], HiddenOf(*model, a)[6]});
      const at::Tensor tokens = at::tensor({33, 41, 1}, at::kLong);
      for (const int64_t count : {int64_t{1}, kHeads}) {
        const at::Tensor expected = speculator->Draft(hidden, tokens, count).value();
        std::vector<int32_t> drafts;
        const std::vector<DraftRequest> requests = {
            {.row = 2, .token = 33}, {.row = 0, .token = 41}, {.row = 1, .token = 1}};
        ASSERT_TRUE(runner.Draft(requests, count, drafts).ok());
        EXPECT_TRUE(at::equal(at::tensor(drafts, at::kLong), expected.flatten()));
      }
    }
  }
}

TEST(TorchRunnerTest, DraftsOfWhatIsNotThereAreRefused) {
  const auto model = TinyModel();
  std::vector<int32_t> drafts;
  const std::vector<DraftRequest> requests = {{.row = 0, .token = 1}};
  TorchRunner plain(TinyModel(), /*num_blocks=*/1, DType::kFloat32);
  EXPECT_EQ(plain.Draft(requests, 1, drafts).code(), absl::StatusCode::kUnimplemented);

  TorchRunner runner(TinyModel(), /*num_blocks=*/1, DType::kFloat32,
                     RandomSpeculator(*model, kHeads));
  EXPECT_EQ(runner.Draft(requests, 1, drafts).code(), absl::StatusCode::kInvalidArgument)
      << "no pass was computed";
  const std::vector<int32_t> blocks = {0}, tokens = {5};
  const std::vector<int64_t> first = {0};
  const SamplingParams sampling;
  const std::vector<OutputRow> rows = {{.sampling = &sampling}};
  const std::vector<DecodeInput> sequences = {
      {.blocks = blocks, .start = 0, .tokens = tokens, .output_rows = first}};
  PassResults results;
  ASSERT_TRUE(runner.Run({.copies = {}, .sequences = sequences, .rows = rows}, results).ok());
  EXPECT_TRUE(runner.Draft(requests, kHeads, drafts).ok());
  EXPECT_EQ(runner.Draft(requests, kHeads + 1, drafts).code(), absl::StatusCode::kInvalidArgument);
  const std::vector<DraftRequest> beyond = {{.row = 1, .token = 1}};
  EXPECT_EQ(runner.Draft(beyond, 1, drafts).code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace tandem::rollout
