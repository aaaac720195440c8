#include "common/parallel/megatron_options.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"
#include "common/model/decoder_parameters.h"

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
  if (options.expert_model_parallel_size != 1) {
    return FieldError(absl::StatusCode::kUnimplemented, kExpert,
                      absl::StrCat("must be 1, got ", options.expert_model_parallel_size,
                                   ": no family has experts"));
  }
  return absl::OkStatus();
}

absl::Status CheckWorld(const MegatronOptions& options, int64_t world_size) {
  const int64_t replica = options.model_parallel_size();
  if (world_size % replica == 0) return absl::OkStatus();
  return InvalidField(
      kTensor, absl::StrCat(options.tensor_model_parallel_size, " x context_parallel_size ",
                            options.context_parallel_size, " x pipeline_model_parallel_size ",
                            options.pipeline_model_parallel_size, " = ", replica,
                            " ranks hold a replica of the model, which does not divide the ",
                            world_size, " that there are"));
}

absl::Status CheckTensorParallel(const MegatronOptions& options, const ModelConfig& config,
                                 HeadKind head) {
  const int64_t ranks = options.tensor_model_parallel_size;
  TANDEM_RETURN_IF_ERROR(CheckDecoderShards(config, ranks, kTensor));
  const int64_t output = ranks * options.context_parallel_size;
  if (head == HeadKind::kLm && config.vocab_size % output != 0) {
    return InvalidField(
        kContext, absl::StrCat(options.context_parallel_size, " x tensor_model_parallel_size ",
                               ranks, " = ", output,
                               " ranks share out the output layer, which does not divide "
                               "config.json.vocab_size, which is ",
                               config.vocab_size));
  }
  return absl::OkStatus();
}

absl::Status CheckPipeline(const MegatronOptions& options, const ModelConfig& config) {
  const int64_t stages = options.pipeline_model_parallel_size;
  const int64_t chunks = options.virtual_pipeline_model_parallel_size;
  if (chunks > 1 && stages == 1) {
    return InvalidField(kVirtual, absl::StrCat(chunks, " parts of a stage need a pipeline, and ",
                                               "pipeline_model_parallel_size is 1"));
  }
  if (stages * chunks > config.num_hidden_layers) {
    const char* const field = chunks > 1 ? kVirtual : kPipeline;
    return InvalidField(
        field,
        absl::StrCat(chunks, " parts of each of ", stages, " stages need ", stages * chunks,
                     " layers, and config.json.num_hidden_layers is ", config.num_hidden_layers));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckMegatronOptions(const MegatronOptions& options, const ModelConfig& config,
                                  HeadKind head, int64_t world_size) {
  TANDEM_RETURN_IF_ERROR(CheckSizes(options));
  TANDEM_RETURN_IF_ERROR(CheckWorld(options, world_size));
  TANDEM_RETURN_IF_ERROR(CheckTensorParallel(options, config, head));
  return CheckPipeline(options, config);
}

}  // namespace tandem::parallel
