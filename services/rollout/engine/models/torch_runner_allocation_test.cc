// A pass allocates nothing if passes of its size have run.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "common/coauthoring/tandem_config.h"
#include "common/kernels/weight_format.h"
#include "common/model/testing/models.h"
#include "common/model/testing/packed_model.h"
#include "services/rollout/engine/models/torch_runner.h"
#include "services/rollout/engine/testing/count_allocations.h"

namespace tandem::rollout {
namespace {

// DeepSeek-V3 without experts.
const nlohmann::json kDense = {{"first_k_dense_replace", 2}};

// Three sequences that are written by a model of the family.
class Sequences {
 public:
  Sequences(const std::string& family, kernels::WeightFormat format, DType cache_dtype)
      : runner_(TinyModel(family, kDense, {.placement = {.weight_format = format}}),
                /*num_blocks=*/6, cache_dtype) {}

  // Consumes `tokens` more of each sequence, and draws after the last one, or after all of them.
  // Returns the number of allocations of the pass.
  int64_t Run(int64_t tokens, bool all_rows) {
    const std::vector<int32_t> consumed(tokens, 7);
    std::vector<int64_t> wanted;
    for (int64_t i = all_rows ? 0 : tokens - 1; i < tokens; ++i) wanted.push_back(i);
    std::vector<DecodeInput> sequences;
    for (const std::vector<int32_t>& blocks : blocks_) {
      sequences.push_back(
          {.blocks = blocks, .start = length_, .tokens = consumed, .output_rows = wanted});
    }
    const std::vector<OutputRow> rows(blocks_.size() * wanted.size(),
                                      {.u = 0.3, .sampling = &sampling_});
    length_ += tokens;
    absl::Status status;
    const int64_t count = CountAllocations([&] {
      status = runner_.Run({.copies = {}, .sequences = sequences, .rows = rows}, results_);
    });
    EXPECT_TRUE(status.ok()) << status;
    return count;
  }

 private:
  const SamplingParams sampling_;
  const std::vector<std::vector<int32_t>> blocks_ = {{0, 1}, {2, 3}, {4, 5}};
  TorchRunner runner_;
  int64_t length_ = 0;
  PassResults results_;
};

void ExpectSteadyPassesAllocateNothing(Sequences& sequences) {
  sequences.Run(/*tokens=*/9, /*all_rows=*/false);
  for (int i = 0; i < 3; ++i) {
    sequences.Run(1, true);
    sequences.Run(3, true);
    sequences.Run(3, false);
  }
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(sequences.Run(1, true), 0) << "one token each";
    EXPECT_EQ(sequences.Run(3, true), 0) << "drafts are verified";
    EXPECT_EQ(sequences.Run(3, false), 0) << "a lane catches up";
  }
}

TEST(TorchRunnerAllocationTest, TheMemoryOfTensorsIsCounted) {
  const auto count = [](int64_t size) { return CountAllocations([&] { at::empty({size}); }); };
  count(1);  // libtorch makes what it keeps
  EXPECT_GE(count(0), 2) << "a tensor and its storage";
  EXPECT_EQ(count(1), count(0) + 1);
}

TEST(TorchRunnerAllocationTest, ASteadyPassAllocatesNothing) {
  for (const std::string& family : EveryFamily()) {
    // The choice of experts, and the order of their rows, are tensors of libtorch.
    if (TinyConfig(family, kDense).decoder.experts.routing.num_experts > 0) continue;
    for (const auto format : {kernels::WeightFormat::kDense, kernels::WeightFormat::kBfloat16,
                              kernels::WeightFormat::kInt8, kernels::WeightFormat::kInt4}) {
      for (const DType cache_dtype : {DType::kFloat32, DType::kBFloat16}) {
        SCOPED_TRACE(testing::Message() << family << ", format " << static_cast<int>(format)
                                        << ", cache " << DTypeName(cache_dtype));
        Sequences sequences(family, format, cache_dtype);
        ExpectSteadyPassesAllocateNothing(sequences);
      }
    }
  }
}

TEST(TorchRunnerAllocationTest, NorDoSeveralThreads) {
  at::set_num_threads(2);
  Sequences sequences("llama", kernels::WeightFormat::kInt8, DType::kFloat32);
  ExpectSteadyPassesAllocateNothing(sequences);
}

}  // namespace
}  // namespace tandem::rollout
