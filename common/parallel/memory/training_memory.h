// The memory that one rank takes to train a model under a strategy, computed before anything is
// loaded. No torch.
#ifndef TANDEM_COMMON_PARALLEL_MEMORY_TRAINING_MEMORY_H_
#define TANDEM_COMMON_PARALLEL_MEMORY_TRAINING_MEMORY_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/base/machine/memory_plan.h"
#include "common/kernels/weight_format.h"
#include "common/model/config/lora.h"
#include "common/model/config/model_config.h"
#include "common/model/config/parameter_spec.h"
#include "common/parallel/strategy_options.h"
#include "common/tensor/dtype.h"

namespace tandem::parallel {

struct TrainedModel {
  const ModelConfig& config;
  HeadKind head = HeadKind::kLm;  // kLm: a trainer's; kValue: a critic's
  bool untie_embeddings = false;
  std::vector<std::string> freeze = {};
  LoraOptions lora = {};                 // resolved (ResolveLora)
  bool freeze_all = false;               // LoadOptions::freeze_all: passes run without autograd
  DType dtype = DType::kFloat32;         // of the computation; weights are trained in float32
  DType weight_dtype = DType::kFloat32;  // whose values passes read (Placement::weight_dtype)
  // The format of matrices that do not train, with lora or in a frozen model
  // (Placement::weight_format).
  kernels::WeightFormat weight_format = kernels::WeightFormat::kDense;
  // The type that linear maps round their inputs to (Placement::activation_dtype).
  DType activation_dtype = DType::kFloat32;
  bool on_host = true;           // whether the CPU computes
  bool shared_prefixes = false;  // whether sequences of a micro-batch share prefixes
  int64_t product_rows = 0;      // ComputeOptions::product_rows
};

// Returns the items of one rank: "weights", "gradients", "optimizer", "activations" and
// "rotary_tables", of a frozen model without the second and third; with a dtype or weight_dtype
// other than float32 "compute_copy"; with a packed weight_format "packed_weights", which are not
// among the weights; under `zero` what it gathers block by block. Weights,
// gradients and optimizer state are those of the strategy, but for the rounding up of buffers;
// activations are an upper estimate for micro-batches of `tokens` tokens in all, and as many of
// them under way as a pipeline stage ever has. With expert parallelism they suppose that the
// experts of every rank are chosen as often. Where prefixes are shared, "shared_keys" are the keys
// and values of one layer's attention that stand beside those of the rows; with product_rows
// "attention_blocks" are those in blocks, for sequences of 64 tokens or more, and the partial
// results, and "padded_rows" what the widest product of such rows has. A model with a vision
// tower has "vision_activations", for micro-batches of nothing but images; the pixels of a step,
// all of which the first stage of a pipeline holds, are not among them. Losses add what they need
// themselves.
//
// `options` must fit the model and the `ranks` ranks (CheckMegatronOptions). INVALID_ARGUMENT for
// "freeze"; UNIMPLEMENTED for a model_type that no family has.
absl::StatusOr<MemoryPlan> TrainingMemory(const StrategyOptions& options, const TrainedModel& model,
                                          int64_t tokens, int64_t rank, int64_t ranks);

// Returns the bytes that one rank copies of its state to write a checkpoint beside the next steps:
// what it writes of the weights, and its moments. `plan` is that of TrainingMemory.
absl::StatusOr<int64_t> CheckpointCopyBytes(const StrategyOptions& options,
                                            const TrainedModel& model, const MemoryPlan& plan,
                                            int64_t ranks);

}  // namespace tandem::parallel

#endif  // TANDEM_COMMON_PARALLEL_MEMORY_TRAINING_MEMORY_H_
