#include "common/parallel/megatron/megatron_options.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/errors/error.h"
#include "common/base/errors/status_macros.h"
#include "common/model/family.h"
#include "common/model/parameters/shard.h"

namespace tandem::parallel {
namespace {

constexpr char kTensor[] = "strategy.tensor_model_parallel_size";
constexpr char kPipeline[] = "strategy.pipeline_model_parallel_size";
constexpr char kContext[] = "strategy.context_parallel_size";
constexpr char kExpert[] = "strategy.expert_model_parallel_size";
constexpr char kVirtual[] = "strategy.virtual_pipeline_model_parallel_size";

absl::Status CheckSizes(const MegatronOptions& options) {
  const std::pair<const char*, int64_t> sizes[] = {
      {kTensor, options.tensor_model_parallel_size},
      {kPipeline, options.pipeline_model_parallel_size},
      {kContext, options.context_parallel_size},
      {kExpert, options.expert_model_parallel_size},
      {kVirtual, options.virtual_pipeline_model_parallel_size}};
  for (const auto& [field, size] : sizes) {
    if (size < 1) return InvalidField(field, absl::StrCat("must be at least 1, got ", size));
  }
  return absl::OkStatus();
}

absl::Status CheckWorld(const MegatronOptions& options, int64_t world_size) {
  const int64_t replica = options.model_parallel_size();
  if (world_size % replica != 0) {
    return InvalidField(
        kTensor,
        absl::StrCat(options.tensor_model_parallel_size, " x context_parallel_size ",
                     options.context_parallel_size, " x pipeline_model_parallel_size ",
                     options.pipeline_model_parallel_size, " = ", replica,
                     " ranks hold one replica of the model, which does not divide the server's ",
                     world_size, " ranks"));
  }
  const int64_t replicas = world_size / replica;
  const int64_t holders = options.context_parallel_size * replicas;
  if (holders % options.expert_model_parallel_size == 0) return absl::OkStatus();
  return InvalidField(
      kExpert, absl::StrCat(options.expert_model_parallel_size, " does not divide the ", holders,
                            " ranks that hold the same layers: context_parallel_size ",
                            options.context_parallel_size, " x ", replicas, " replicas"));
}

// Checks that every rank that computes the output layer has a token id: a shard without one has no
// statistics of the softmax.
absl::Status CheckOutputRanks(const MegatronOptions& options, int64_t vocab_size,
                              int64_t num_token_ids) {
  const int64_t tensor = options.tensor_model_parallel_size;
  const int64_t context = options.context_parallel_size;
  for (int64_t rank = 0; rank < tensor * context; ++rank) {
    const OutputRank at = {.tensor = rank / context, .context = rank % context};
    if (OutputTokens(options, vocab_size, num_token_ids, at).size > 0) continue;
    return InvalidField(
        context > 1 ? kContext : kTensor,
        absl::StrCat("tensor_model_parallel_size ", tensor, " x context_parallel_size ", context,
                     " ranks compute the output layer, but ", num_token_ids, " token ids in ",
                     vocab_size, " rows leave rank ", rank, " of them without one"));
  }
  return absl::OkStatus();
}

absl::Status CheckModelShards(const MegatronOptions& options, const ModelConfig& config,
                              HeadKind head, int64_t num_token_ids) {
  TANDEM_ASSIGN_OR_RETURN(const Family* family, FindFamily(config.model_type));
  TANDEM_RETURN_IF_ERROR(family->CheckShards(config, options.tensor_model_parallel_size,
                                             /*whole_experts=*/false, kTensor));
  TANDEM_RETURN_IF_ERROR(
      family->CheckExpertShards(config, options.expert_model_parallel_size, kExpert));
  if (head != HeadKind::kLm) return absl::OkStatus();
  return CheckOutputRanks(options, config.vocab_size,
                          num_token_ids > 0 ? num_token_ids : config.vocab_size);
}

absl::Status CheckPipeline(const MegatronOptions& options, const ModelConfig& config) {
  const int64_t stages = options.pipeline_model_parallel_size;
  const int64_t virtual_stages = options.virtual_pipeline_model_parallel_size;
  if (virtual_stages > 1 && stages == 1) {
    return InvalidField(
        kVirtual, absl::StrCat(virtual_stages, " virtual stages per stage need a pipeline, but ",
                               "pipeline_model_parallel_size is 1"));
  }
  if (stages * virtual_stages > config.num_hidden_layers) {
    const std::string each =
        virtual_stages > 1 ? absl::StrCat(" of ", virtual_stages, " virtual stages") : "";
    return InvalidField(
        virtual_stages > 1 ? kVirtual : kPipeline,
        absl::StrCat(stages, " stages", each, " need ", stages * virtual_stages,
                     " layers, but config.json.num_hidden_layers is ", config.num_hidden_layers));
  }
  return absl::OkStatus();
}

}  // namespace

TokenRange OutputTokens(const MegatronOptions& options, int64_t vocab_size, int64_t num_token_ids,
                        const OutputRank& rank) {
  const Shard tensor = {.index = rank.tensor, .count = options.tensor_model_parallel_size};
  const Shard context = {.index = rank.context, .count = options.context_parallel_size};
  const int64_t rows = tensor.Size(vocab_size);
  const int64_t first = tensor.Begin(vocab_size) + context.Begin(rows);
  const int64_t after = std::min(first + context.Size(rows), num_token_ids);
  return {.first = first, .size = std::max<int64_t>(after - first, 0)};
}

MeshShape MeshOf(const MegatronOptions& options, int64_t world_size) {
  return {.tensor = static_cast<int>(options.tensor_model_parallel_size),
          .context = static_cast<int>(options.context_parallel_size),
          .data = static_cast<int>(world_size / options.model_parallel_size()),
          .pipeline = static_cast<int>(options.pipeline_model_parallel_size),
          .expert = static_cast<int>(options.expert_model_parallel_size)};
}

PipelineShape PipelineOf(const MegatronOptions& options) {
  return {.stages = options.pipeline_model_parallel_size,
          .virtual_stages = options.virtual_pipeline_model_parallel_size};
}

absl::Status CheckMegatronOptions(const MegatronOptions& options, const ModelConfig& config,
                                  HeadKind head, int64_t world_size, int64_t num_token_ids) {
  TANDEM_RETURN_IF_ERROR(CheckSizes(options));
  TANDEM_RETURN_IF_ERROR(CheckWorld(options, world_size));
  TANDEM_RETURN_IF_ERROR(CheckModelShards(options, config, head, num_token_ids));
  return CheckPipeline(options, config);
}

}  // namespace tandem::parallel
