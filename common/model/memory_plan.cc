#include "common/model/memory_plan.h"

#include <algorithm>
#include <map>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/base/status_macros.h"
#include "common/model/freeze.h"

namespace tandem {
namespace {

constexpr int64_t kFloatBytes = 4;

int64_t ItemBytes(DType dtype) { return static_cast<int64_t>(ItemSizeBytes(dtype)); }

int64_t Numel(const std::vector<ParameterSpec>& specs) {
  int64_t count = 0;
  for (const ParameterSpec& spec : specs) count += spec.numel();
  return count;
}

int64_t LargestNumel(const std::vector<ParameterSpec>& specs) {
  int64_t largest = 0;
  for (const ParameterSpec& spec : specs) largest = std::max(largest, spec.numel());
  return largest;
}

// What is alive at the widest point of one layer, per token: the residual and its norm, then either
// attention's or the MLP's inputs and outputs; of `ranks` that share out the model, this one's part
// of these, and what all of them bring to the sum.
int64_t InferenceActivations(const ModelConfig& config, int64_t ranks) {
  const int64_t attention = 3 * config.query_size() + 3 * config.key_value_size();
  const int64_t gathered = ranks > 1 ? (ranks + 1) * config.hidden_size : 0;
  return 3 * config.hidden_size + gathered +
         std::max(attention, 3 * config.intermediate_size) / ranks;
}

// What autograd keeps of every layer, per token, in float32: norms with their inputs, queries, keys
// and values before and after rotation and repetition, attention's output, gate, up and their
// product. SmolLM2-135M takes 0.87 of it; as much in bf16, where norms and rotation stay float32.
int64_t TrainingActivationBytes(const ModelConfig& config) {
  const int64_t layer = 5 * config.hidden_size + 4 * config.query_size() +
                        2 * config.key_value_size() + 4 * config.intermediate_size;
  return (config.num_hidden_layers * layer + 4 * config.hidden_size) * kFloatBytes;
}

// Linear maps are multiplied in the computation's type; norms and the embedding's rows are not.
int64_t LinearNumel(const std::vector<ParameterSpec>& specs, bool tied) {
  int64_t count = 0;
  for (const ParameterSpec& spec : specs) {
    if (spec.init != Init::kOnes && (tied || spec.name != kEmbeddingName)) count += spec.numel();
  }
  return count;
}

// Values of one of `ranks` shards.
int64_t ShardNumel(const std::vector<ParameterSpec>& specs, int64_t ranks) {
  int64_t count = 0;
  for (const ParameterSpec& spec : specs) {
    count += spec.numel() / (spec.shard_axis.has_value() ? ranks : 1);
  }
  return count;
}

// A model that `ranks` share out.
struct Lane {
  std::string name;
  const ModelConfig& config;
  int64_t ranks = 1;
};

// What a pass of the lane needs beside its weights and cache.
struct PassBytes {
  int64_t activations = 0;
  int64_t logits = 0;
};

absl::Status AddLane(const Lane& lane, int64_t tokens, const RolloutMemoryOptions& options,
                     MemoryPlan& plan, PassBytes& pass) {
  if (options.rank >= lane.ranks) return absl::OkStatus();  // another's
  const ModelConfig& config = lane.config;
  TANDEM_ASSIGN_OR_RETURN(const auto specs,
                          ModelParameters(config, {.tied = config.tie_word_embeddings}));
  const int64_t item = ItemBytes(options.dtype);
  plan.items.push_back({lane.name + "_weights", ShardNumel(specs, lane.ranks) * item});
  plan.items.push_back(
      {lane.name + "_kv_cache", options.num_slots * tokens * 2 * config.num_hidden_layers *
                                    config.key_value_size() / lane.ranks * item});
  pass.activations =
      std::max(pass.activations,
               options.max_batched_tokens * InferenceActivations(config, lane.ranks) * item);
  // The rows that all ranks bring, and then side by side.
  const int64_t copies = lane.ranks > 1 ? 2 : 1;
  pass.logits = std::max(pass.logits,
                         copies * std::max(kRolloutLogitsBytes, config.vocab_size * kFloatBytes));
  return absl::OkStatus();
}

// Values of the `count` largest blocks.
int64_t LargestBlocks(const std::vector<ParameterSpec>& specs, int64_t count) {
  std::map<int64_t, int64_t> numel_of_block;
  for (const ParameterSpec& spec : specs) numel_of_block[spec.block] += spec.numel();
  std::vector<int64_t> sizes;
  for (const auto& [block, numel] : numel_of_block) sizes.push_back(numel);
  std::sort(sizes.rbegin(), sizes.rend());
  sizes.resize(static_cast<size_t>(std::min(count, static_cast<int64_t>(sizes.size()))));
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
}

}  // namespace

int64_t MemoryPlan::total_bytes() const {
  int64_t total = 0;
  for (const Item& item : items) total += item.bytes;
  return total;
}

absl::StatusOr<MemoryPlan> RolloutMemoryPlan(const ModelConfig& senior, const ModelConfig* junior,
                                             const RolloutMemoryOptions& options) {
  MemoryPlan plan;
  int64_t tokens = senior.LongestSequence(options.max_model_len);
  if (junior != nullptr) tokens = junior->LongestSequence(tokens);
  PassBytes pass;
  TANDEM_RETURN_IF_ERROR(
      AddLane({"senior", senior, options.senior_ranks}, tokens, options, plan, pass));
  if (junior != nullptr) {
    TANDEM_RETURN_IF_ERROR(
        AddLane({"junior", *junior, options.junior_ranks}, tokens, options, plan, pass));
  }
  if (options.rank < options.senior_ranks) {
    TANDEM_ASSIGN_OR_RETURN(const auto specs,
                            ModelParameters(senior, {.tied = senior.tie_word_embeddings}));
    // Rank 0 gives the others one tensor after the other.
    plan.items.push_back({"staged_weight_update",
                          (options.rank == 0 ? Numel(specs) : LargestNumel(specs)) * kFloatBytes});
  }
  plan.items.push_back({"activations", pass.activations});
  plan.items.push_back({"logits", pass.logits});
  return plan;
}

absl::StatusOr<MemoryPlan> TrainingMemoryPlan(const ModelConfig& config,
                                              const TrainingMemoryOptions& options) {
  const bool language_model = options.head == HeadKind::kLm;
  const bool tied = language_model && config.tie_word_embeddings && !options.untie_embeddings;
  TANDEM_ASSIGN_OR_RETURN(const auto specs,
                          ModelParameters(config, {.kind = options.head, .tied = tied}));
  TANDEM_ASSIGN_OR_RETURN(const auto trainable, TrainableParameters(specs, options.freeze));
  int64_t trained = 0;
  for (size_t i = 0; i < specs.size(); ++i) trained += trainable[i] ? specs[i].numel() : 0;

  const int64_t item = ItemBytes(options.dtype);
  MemoryPlan plan;
  const MemoryShares& shares = options.shares;
  plan.items.push_back({"weights", Numel(specs) * kFloatBytes / shares.weights});
  if (shares.gathered_blocks > 0) {
    plan.items.push_back(
        {"gathered_weights", LargestBlocks(specs, shares.gathered_blocks) * kFloatBytes});
  }
  if (options.dtype != DType::kFloat32) {
    plan.items.push_back({"compute_copy", LinearNumel(specs, tied) * item / shares.weights});
  }
  plan.items.push_back({"gradients", trained * kFloatBytes / shares.gradients});
  plan.items.push_back({"optimizer", 2 * trained * kFloatBytes / shares.optimizer});
  for (const FrozenModel& frozen : options.frozen) {
    TANDEM_ASSIGN_OR_RETURN(
        const auto parameters,
        ModelParameters(frozen.config, {.tied = frozen.config.tie_word_embeddings}));
    plan.items.push_back({frozen.name + "_weights", Numel(parameters) * item});
  }
  const int64_t tokens =
      std::max(options.micro_batch_tokens, config.LongestSequence(options.max_model_len));
  plan.items.push_back(
      {"activations", tokens * TrainingActivationBytes(config) / shares.activations});
  if (language_model) plan.items.push_back({"logits", options.logits_chunk_bytes});
  return plan;
}

absl::Status CheckFits(const MemoryPlan& plan, int64_t available_bytes) {
  if (plan.total_bytes() <= available_bytes) return absl::OkStatus();
  const auto gigabytes = [](int64_t bytes) {
    return absl::StrFormat("%.2f GB", static_cast<double>(bytes) / 1e9);
  };
  std::string parts;
  for (const MemoryPlan::Item& item : plan.items) {
    absl::StrAppend(&parts, parts.empty() ? "" : ", ", item.name, " ", gigabytes(item.bytes));
  }
  return absl::ResourceExhaustedError(
      absl::StrCat("the configuration needs ", gigabytes(plan.total_bytes()), " (", parts, ") and ",
                   gigabytes(available_bytes), " are available"));
}

}  // namespace tandem
