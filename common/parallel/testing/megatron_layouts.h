// For tests: layouts of the `megatron` strategy, and tiny models that fit into all of them.
#ifndef TANDEM_COMMON_PARALLEL_TESTING_MEGATRON_LAYOUTS_H_
#define TANDEM_COMMON_PARALLEL_TESTING_MEGATRON_LAYOUTS_H_

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/model/testing/tiny_model_dir.h"
#include "common/parallel/megatron/megatron_options.h"
#include "common/parallel/testing/same_training.h"
#include "common/parallel/testing/tiny_kinds.h"
#include "common/ranks/communicator.h"
#include "common/ranks/rank_agreement.h"

namespace tandem::parallel {

struct MegatronLayout {
  const char* name;
  int ranks;
  MegatronOptions options;
};

// All with the distributed optimizer.
inline std::vector<MegatronLayout> MegatronLayouts() {
  std::vector<MegatronLayout> layouts = {
      {"One", 1, {}},
      {"Tp2", 2, {.tensor_model_parallel_size = 2}},
      {"Pp2", 2, {.pipeline_model_parallel_size = 2}},
      {"Pp2Vpp2",
       2,
       {.pipeline_model_parallel_size = 2, .virtual_pipeline_model_parallel_size = 2}},
      {"Cp2", 2, {.context_parallel_size = 2}},
      {"Dp2", 2, {}},
      {"Tp2Pp2", 4, {.tensor_model_parallel_size = 2, .pipeline_model_parallel_size = 2}},
      {"Tp2Dp2", 4, {.tensor_model_parallel_size = 2}},
      {"Pp2Cp2", 4, {.pipeline_model_parallel_size = 2, .context_parallel_size = 2}}};
  for (MegatronLayout& layout : layouts) layout.options.use_distributed_optimizer = true;
  return layouts;
}

// The same with expert parallelism, for ExpertKinds.
inline std::vector<MegatronLayout> ExpertLayouts() {
  std::vector<MegatronLayout> layouts = {
      {"Ep2", 2, {.expert_model_parallel_size = 2}},
      {"Ep2Cp2", 2, {.context_parallel_size = 2, .expert_model_parallel_size = 2}},
      {"Ep4", 4, {.expert_model_parallel_size = 4}},
      {"Ep2Of4", 4, {.expert_model_parallel_size = 2}},
      {"Ep2Tp2", 4, {.tensor_model_parallel_size = 2, .expert_model_parallel_size = 2}},
      {"Ep2Pp2", 4, {.pipeline_model_parallel_size = 2, .expert_model_parallel_size = 2}},
      {"Ep2Pp2Vpp2",
       4,
       {.pipeline_model_parallel_size = 2,
        .expert_model_parallel_size = 2,
        .virtual_pipeline_model_parallel_size = 2}},
      {"Ep4Cp2", 4, {.context_parallel_size = 2, .expert_model_parallel_size = 4}}};
  for (MegatronLayout& layout : layouts) layout.options.use_distributed_optimizer = true;
  layouts.push_back({"Ep2Of4Whole", 4, {.expert_model_parallel_size = 2}});
  return layouts;
}

// Returns the kinds that a layout is tested with: of four ranks, one of each family.
inline std::vector<TinyKind> KindsOf(const MegatronLayout& layout) {
  if (layout.options.expert_model_parallel_size > 1) return ExpertKinds();
  return layout.ranks < 4 ? EveryTinyKind() : OneKindOfEachFamily();
}

inline std::string LayoutName(const testing::TestParamInfo<MegatronLayout>& info) {
  return info.param.name;
}

// Writes a model of five layers and a vocabulary of 61 rows: neither divides by two or four. Layers
// with experts have eight, those of DeepSeek twelve.
inline void WriteLayoutModel(const std::string& directory, const TinyKind& kind = {}) {
  WriteTinyModel(directory, 3,
                 {{"num_hidden_layers", 5},
                  {"intermediate_size", 40},
                  {"tie_word_embeddings", kind.tied},
                  {"num_experts", 8},
                  {"n_routed_experts", 12}},
                 kind.family);
}

// An optimizer under which five layers train alike for any order of addition: its rate is small,
// and its epsilon keeps Adam from scaling up gradients that are rounding errors.
inline OptimizerOptions SteadyOptimizer() {
  OptimizerOptions options = FastOptimizer();
  options.learning_rate = 1e-3;
  options.epsilon = 1e-5;
  return options;
}

// A number of micro-batches that two replicas or stages do not divide.
inline constexpr int64_t kMicroBatches = 3;

// Runs `compute` on rank 0 and returns its result on every rank.
template <typename Compute>
auto ComputeOnRankZero(ranks::Communicator& ranks, const Compute& compute) -> decltype(compute()) {
  using Result = decltype(compute());
  return ranks::FromRankZero<Result>(ranks, [&] { return absl::StatusOr<Result>(compute()); })
      .value();
}

}  // namespace tandem::parallel

#endif  // TANDEM_COMMON_PARALLEL_TESTING_MEGATRON_LAYOUTS_H_
