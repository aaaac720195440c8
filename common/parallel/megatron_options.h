// The layout of the `megatron` strategy, and whether a model fits into it.
#ifndef TANDEM_COMMON_PARALLEL_MEGATRON_OPTIONS_H_
#define TANDEM_COMMON_PARALLEL_MEGATRON_OPTIONS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "common/model/model_config.h"
#include "common/model/parameter_spec.h"
#include "common/parallel/recompute.h"

namespace tandem::parallel {

// Fields as in the configuration, under "strategy".
struct MegatronOptions {
  int64_t tensor_model_parallel_size = 1;
  int64_t pipeline_model_parallel_size = 1;
  int64_t context_parallel_size = 1;
  int64_t expert_model_parallel_size = 1;
  // Parts of the model that every stage of the pipeline holds.
  int64_t virtual_pipeline_model_parallel_size = 1;
  // Shares out the optimizer's state among the ranks that hold the same parameters.
  bool use_distributed_optimizer = true;
  Recompute recompute_granularity = Recompute::kNone;

  // Ranks of one replica of the model.
  int64_t model_parallel_size() const {
    return tensor_model_parallel_size * pipeline_model_parallel_size * context_parallel_size;
  }
};

// Whether `world_size` ranks can train the model in this layout. INVALID_ARGUMENT, or UNIMPLEMENTED
// for expert_model_parallel_size, names the field ("strategy.tensor_model_parallel_size") and says
// the numbers that do not fit.
absl::Status CheckMegatronOptions(const MegatronOptions& options, const ModelConfig& config,
                                  HeadKind head, int64_t world_size);

}  // namespace tandem::parallel

#endif  // TANDEM_COMMON_PARALLEL_MEGATRON_OPTIONS_H_
