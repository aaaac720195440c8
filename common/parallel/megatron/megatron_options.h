// The layout of the `megatron` strategy, and whether a model fits into it.
#ifndef TANDEM_COMMON_PARALLEL_MEGATRON_MEGATRON_OPTIONS_H_
#define TANDEM_COMMON_PARALLEL_MEGATRON_MEGATRON_OPTIONS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "common/model/config/model_config.h"
#include "common/model/config/parameter_spec.h"
#include "common/parallel/megatron/mesh_shape.h"
#include "common/parallel/megatron/pipeline_schedule.h"

namespace tandem::parallel {

// Fields as in the configuration, under "strategy".
struct MegatronOptions {
  int64_t tensor_model_parallel_size = 1;
  int64_t pipeline_model_parallel_size = 1;
  int64_t context_parallel_size = 1;
  // Ranks, among the context ranks of all replicas, that divide the experts.
  int64_t expert_model_parallel_size = 1;
  // Virtual stages that each stage of the pipeline holds.
  int64_t virtual_pipeline_model_parallel_size = 1;
  // Whether the ranks that hold the same parameters each keep a shard of the optimizer's state.
  bool use_distributed_optimizer = false;

  // Ranks of one replica of the model.
  int64_t model_parallel_size() const {
    return tensor_model_parallel_size * pipeline_model_parallel_size * context_parallel_size;
  }
};

// Returns the mesh of `world_size` ranks, a multiple of the ranks of a replica.
MeshShape MeshOf(const MegatronOptions& options, int64_t world_size);
PipelineShape PipelineOf(const MegatronOptions& options);

// A rank among those that compute the output layer.
struct OutputRank {
  int64_t tensor = 0;
  int64_t context = 0;
};

// Consecutive token ids.
struct TokenRange {
  int64_t first = 0;
  int64_t size = 0;
};

// The token ids whose logits `rank` computes, for an output layer of `vocab_size` rows of which the
// first `num_token_ids` have a token: a context rank's slice of its tensor rank's shard. Tensor
// rank 0, context rank 0 has the most.
TokenRange OutputTokens(const MegatronOptions& options, int64_t vocab_size, int64_t num_token_ids,
                        const OutputRank& rank);

// Checks that `world_size` ranks can train the model in this layout. `num_token_ids` as in
// LoadOptions (common/model/model.h). INVALID_ARGUMENT names the field
// ("strategy.tensor_model_parallel_size") and the numbers that do not fit.
absl::Status CheckMegatronOptions(const MegatronOptions& options, const ModelConfig& config,
                                  HeadKind head, int64_t world_size, int64_t num_token_ids = 0);

}  // namespace tandem::parallel

#endif  // TANDEM_COMMON_PARALLEL_MEGATRON_MEGATRON_OPTIONS_H_
