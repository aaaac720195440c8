// The parameters of a model, before any memory is allocated for them. No torch.
#ifndef TANDEM_COMMON_MODEL_CONFIG_PARAMETER_SPEC_H_
#define TANDEM_COMMON_MODEL_CONFIG_PARAMETER_SPEC_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/kernels/weight_format.h"
#include "common/model/config/model_config.h"
#include "common/model/parameters/expert_shard.h"
#include "common/model/parameters/shard.h"

namespace tandem {

// The initial value that `transformers`, or PEFT, gives a parameter.
enum class Init {
  kNormal,  // N(0, initializer_range)
  kOnes,
  kZeros,
  kLoraA,  // U(-1 / sqrt(in), 1 / sqrt(in)), as PEFT draws it
};

struct ParameterSpec {
  std::string name;            // Hugging Face's
  std::vector<int64_t> shape;  // whole, whatever the shard
  Init init = Init::kNormal;
  // The axis that tensor parallelism cuts: 0 for maps cut by output and for vocabularies, 1 for
  // maps cut by input (https://arxiv.org/abs/1909.08053). Not set: every rank holds all of it.
  std::optional<int64_t> shard_axis = std::nullopt;
  // The block of a pass that it belongs to (Backbone::RunBlock).
  int64_t block = 0;
  // A matrix that stays dense where others are packed, and that is not rounded with them.
  bool stays_dense = false;
  // Whether it is a part of an adapter (lora.h), which is in buffers of its own.
  bool adapts = false;
  // Whether gradients change it. A buffer of `transformers` is loaded and saved alone.
  bool trains = true;
  // The expert that has it. Not set: it belongs to none.
  std::optional<ExpertOfLayer> expert = std::nullopt;

  int64_t numel() const;
  // Whether a packed format packs it, and bfloat16 weights round it.
  bool packs() const { return shape.size() == 2 && !stays_dense; }
  // Whether a rank that holds the block and those experts holds a shard of it.
  bool IsIn(const ExpertShard& experts) const { return !expert || expert->IsIn(experts); }
  // Returns the shard that rank `index` of `count` tensor-parallel ranks holds of it.
  Shard ShardOf(int64_t index, int64_t count, const ExpertShard& experts) const {
    if (!shard_axis || (expert && experts.whole)) return {};
    return {.axis = *shard_axis, .index = index, .count = count};
  }
};

// Whether a model whose matrices are stored in `format` has the parameter packed: linear maps, the
// embedding and the head, but no norms and biases, nor what stays dense.
inline bool IsPacked(const ParameterSpec& spec, kernels::WeightFormat format) {
  return format != kernels::WeightFormat::kDense && spec.packs();
}

// The output layer of a model.
enum class HeadKind {
  kLm,     // vocabulary logits
  kValue,  // one value per token
};

struct HeadOptions {
  HeadKind kind = HeadKind::kLm;
  bool tied = false;  // kLm: the head is the embedding and has no parameter of its own
  bool bias = false;  // kValue: some checkpoints have one
};

// The block of the token embedding, and of the vision tower in a model that has one.
inline constexpr int64_t kEmbeddingBlock = 0;
inline constexpr int64_t kVisionBlock = 1;

inline constexpr char kEmbeddingName[] = "model.embed_tokens.weight";
inline constexpr char kLmHeadName[] = "lm_head.weight";
// The names under which a value head is listed and exported, whatever its checkpoint called it.
inline constexpr char kValueHeadWeight[] = "score.weight";
inline constexpr char kValueHeadBias[] = "score.bias";

// Returns all parameters in the order in which they are listed, digested and initialised.
// UNIMPLEMENTED for a model_type that no family has.
absl::StatusOr<std::vector<ParameterSpec>> ModelParameters(const ModelConfig& config,
                                                           const HeadOptions& head);

}  // namespace tandem

#endif  // TANDEM_COMMON_MODEL_CONFIG_PARAMETER_SPEC_H_
