#include "common/rpc/convert/proto_convert.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/errors/error.h"
#include "common/base/errors/field_check.h"
#include "common/base/errors/status_macros.h"

namespace tandem::rpc {
namespace {

static_assert(std::endian::native == std::endian::little, "tensors travel little endian");

using google::protobuf::RepeatedField;

template <typename T>
void SetAll(std::span<const T> values, RepeatedField<T>* field) {
  field->Clear();
  field->Add(values.begin(), values.end());
}

std::vector<int32_t> ToVector(const RepeatedField<int32_t>& field) {
  return {field.begin(), field.end()};
}

absl::StatusOr<SelectionStrategy> StrategyFromProto(types::v1::SelectionStrategy proto) {
  switch (proto) {
    case types::v1::SELECTION_STRATEGY_BERNOULLI:
      return SelectionStrategy::kBernoulli;
    case types::v1::SELECTION_STRATEGY_CHUNK:
      return SelectionStrategy::kChunk;
    case types::v1::SELECTION_STRATEGY_ALTERNATING:
      return SelectionStrategy::kAlternating;
    case types::v1::SELECTION_STRATEGY_SENTENCE:
      return SelectionStrategy::kSentence;
    case types::v1::SELECTION_STRATEGY_WORD:
      return SelectionStrategy::kWord;
    case types::v1::SELECTION_STRATEGY_TURN:
      return SelectionStrategy::kTurn;
    default:
      return InvalidField("selection_strategy",
                          absl::StrCat("unknown value ", static_cast<int>(proto)));
  }
}

types::v1::Quantization QuantizationToProto(Quantization quantization) {
  switch (quantization) {
    case Quantization::kNone:
      return types::v1::QUANTIZATION_NONE;
    case Quantization::kInt8:
      return types::v1::QUANTIZATION_INT8;
    case Quantization::kInt4:
      return types::v1::QUANTIZATION_INT4;
  }
  return types::v1::QUANTIZATION_UNSPECIFIED;
}

types::v1::SelectionStrategy StrategyToProto(SelectionStrategy strategy) {
  switch (strategy) {
    case SelectionStrategy::kBernoulli:
      return types::v1::SELECTION_STRATEGY_BERNOULLI;
    case SelectionStrategy::kChunk:
      return types::v1::SELECTION_STRATEGY_CHUNK;
    case SelectionStrategy::kAlternating:
      return types::v1::SELECTION_STRATEGY_ALTERNATING;
    case SelectionStrategy::kSentence:
      return types::v1::SELECTION_STRATEGY_SENTENCE;
    case SelectionStrategy::kWord:
      return types::v1::SELECTION_STRATEGY_WORD;
    case SelectionStrategy::kTurn:
      return types::v1::SELECTION_STRATEGY_TURN;
  }
  return types::v1::SELECTION_STRATEGY_UNSPECIFIED;
}

// A per-token tensor of a trajectory: exactly `length` floats.
absl::StatusOr<std::vector<float>> TokenFloats(const char* path, const types::v1::Tensor& tensor,
                                               int64_t length) {
  absl::StatusOr<std::vector<float>> values = FloatsFromProto(tensor);
  if (!values.ok()) return PrependFieldPath(path, values.status());
  if (static_cast<int64_t>(values->size()) != length) {
    return InvalidField(path, absl::StrCat("must have one entry for each of the ", length,
                                           " response tokens, has ", values->size()));
  }
  return values;
}

void TokenExpertsToProto(const TokenExperts& experts, types::v1::Tensor* tensor) {
  const std::vector<uint16_t>& ids = experts.ids;
  tensor->clear_shape();
  tensor->add_shape(static_cast<int64_t>(ids.size()) / experts.ids_per_token());
  tensor->add_shape(experts.layers);
  tensor->add_shape(experts.experts_per_token);
  if (*std::max_element(ids.begin(), ids.end()) <= std::numeric_limits<uint8_t>::max()) {
    tensor->set_dtype(types::v1::DATA_TYPE_UINT8);
    tensor->set_data(std::string(ids.begin(), ids.end()));
    return;
  }
  const std::vector<int32_t> wide(ids.begin(), ids.end());
  tensor->set_dtype(types::v1::DATA_TYPE_INT32);
  tensor->set_data(wide.data(), wide.size() * sizeof(int32_t));
}

// Reads the experts of `tokens` tokens.
absl::StatusOr<TokenExperts> TokenExpertsFromProto(const types::v1::Tensor& tensor,
                                                   int64_t tokens) {
  if (tensor.dtype() != types::v1::DATA_TYPE_UINT8 &&
      tensor.dtype() != types::v1::DATA_TYPE_INT32) {
    return InvalidField("dtype", absl::StrCat("must be UINT8 or INT32, got ",
                                              types::v1::DataType_Name(tensor.dtype())));
  }
  TANDEM_ASSIGN_OR_RETURN(const int64_t count, CountElements(tensor.shape()));
  if (tensor.shape_size() != 3 || tensor.shape(0) != tokens || count == 0) {
    return InvalidField("shape", absl::StrCat("must be [", tokens, ", layers, experts per token]: ",
                                              "one row for each token except the last"));
  }
  const bool is_wide = tensor.dtype() == types::v1::DATA_TYPE_INT32;
  const size_t item = is_wide ? sizeof(int32_t) : 1;
  const std::string& data = tensor.data();
  if (data.size() % item != 0 || data.size() / item != static_cast<size_t>(count)) {
    return InvalidField(
        "data", absl::StrCat("must hold ", count, " x ", item, " bytes, holds ", data.size()));
  }
  TokenExperts experts = {
      .layers = tensor.shape(1), .experts_per_token = tensor.shape(2), .ids = {}};
  if (!is_wide) {
    const auto* const bytes = reinterpret_cast<const uint8_t*>(data.data());
    experts.ids.assign(bytes, bytes + data.size());
    return experts;
  }
  std::vector<int32_t> wide(static_cast<size_t>(count));
  std::memcpy(wide.data(), data.data(), data.size());
  for (const int32_t id : wide) {
    if (id < 0 || id > std::numeric_limits<uint16_t>::max()) {
      return InvalidField("data", absl::StrCat(id, " is not the index of an expert"));
    }
  }
  experts.ids.assign(wide.begin(), wide.end());
  return experts;
}

}  // namespace

void FloatsToProto(std::span<const float> values, types::v1::Tensor* tensor) {
  tensor->set_dtype(types::v1::DATA_TYPE_FLOAT32);
  tensor->clear_shape();
  tensor->add_shape(static_cast<int64_t>(values.size()));
  tensor->set_data(values.data(), values.size_bytes());
}

absl::StatusOr<int64_t> CountElements(const RepeatedField<int64_t>& shape) {
  int64_t count = 1;
  bool empty = false;
  for (int i = 0; i < shape.size(); ++i) {
    if (shape[i] < 0) {
      return InvalidField(absl::StrCat("shape[", i, "]"),
                          absl::StrCat("must not be negative, got ", shape[i]));
    }
    empty = empty || shape[i] == 0;
  }
  if (empty) return 0;
  for (int i = 0; i < shape.size(); ++i) {
    if (__builtin_mul_overflow(count, shape[i], &count)) {
      return InvalidField("shape", "the number of elements overflows");
    }
  }
  return count;
}

absl::StatusOr<std::vector<float>> FloatsFromProto(const types::v1::Tensor& tensor) {
  if (tensor.dtype() != types::v1::DATA_TYPE_FLOAT32) {
    return InvalidField(
        "dtype", absl::StrCat("must be FLOAT32, got ", types::v1::DataType_Name(tensor.dtype())));
  }
  TANDEM_ASSIGN_OR_RETURN(const int64_t count, CountElements(tensor.shape()));
  if (tensor.shape_size() != 1) {
    return InvalidField("shape",
                        absl::StrCat("must have one dimension, has ", tensor.shape_size()));
  }
  if (count != static_cast<int64_t>(tensor.data().size() / sizeof(float)) ||
      tensor.data().size() % sizeof(float) != 0) {
    return InvalidField(
        "data", absl::StrCat("must hold ", count, " x 4 bytes, holds ", tensor.data().size()));
  }
  std::vector<float> values(static_cast<size_t>(count));
  if (!values.empty()) std::memcpy(values.data(), tensor.data().data(), tensor.data().size());
  return values;
}

types::v1::DataType DTypeToProto(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return types::v1::DATA_TYPE_FLOAT32;
    case DType::kBFloat16:
      return types::v1::DATA_TYPE_BFLOAT16;
    case DType::kFloat16:
      return types::v1::DATA_TYPE_FLOAT16;
    case DType::kInt32:
      return types::v1::DATA_TYPE_INT32;
    case DType::kInt64:
      return types::v1::DATA_TYPE_INT64;
    case DType::kUInt8:
      return types::v1::DATA_TYPE_UINT8;
    default:
      return types::v1::DATA_TYPE_UNSPECIFIED;
  }
}

absl::StatusOr<DType> DTypeFromProto(types::v1::DataType dtype) {
  switch (dtype) {
    case types::v1::DATA_TYPE_FLOAT32:
      return DType::kFloat32;
    case types::v1::DATA_TYPE_BFLOAT16:
      return DType::kBFloat16;
    case types::v1::DATA_TYPE_FLOAT16:
      return DType::kFloat16;
    case types::v1::DATA_TYPE_INT32:
      return DType::kInt32;
    case types::v1::DATA_TYPE_INT64:
      return DType::kInt64;
    case types::v1::DATA_TYPE_UINT8:
      return DType::kUInt8;
    default:
      return InvalidField("dtype", absl::StrCat("unknown value ", static_cast<int>(dtype)));
  }
}

absl::StatusOr<TandemConfig> TandemConfigFromProto(const types::v1::TandemConfig& proto,
                                                   TandemConfig defaults) {
  TandemConfig config = std::move(defaults);
  if (proto.has_enabled()) config.enabled = proto.enabled();
  if (proto.selection_strategy() != types::v1::SELECTION_STRATEGY_UNSPECIFIED) {
    TANDEM_ASSIGN_OR_RETURN(config.selection_strategy,
                            StrategyFromProto(proto.selection_strategy()));
  }
  if (proto.has_prob_senior()) config.prob_senior = proto.prob_senior();
  if (proto.has_chunk_size()) config.chunk_size = proto.chunk_size();
  if (proto.has_max_gap_tokens()) config.max_gap_tokens = proto.max_gap_tokens();
  if (proto.boundary_token_ids_size() > 0) {
    config.boundary_token_ids = ToVector(proto.boundary_token_ids());
  }
  return config;
}

void TandemConfigToProto(const TandemConfig& config, types::v1::TandemConfig* proto) {
  proto->set_enabled(config.enabled);
  proto->set_selection_strategy(StrategyToProto(config.selection_strategy));
  proto->set_prob_senior(config.prob_senior);
  proto->set_chunk_size(config.chunk_size);
  proto->set_max_gap_tokens(config.max_gap_tokens);
  SetAll<int32_t>(config.boundary_token_ids, proto->mutable_boundary_token_ids());
}

absl::StatusOr<SamplingParams> SamplingParamsFromProto(const types::v1::SamplingParams& proto) {
  SamplingParams params;
  if (proto.has_temperature()) params.temperature = proto.temperature();
  if (proto.has_top_k()) params.top_k = proto.top_k();
  if (proto.has_top_p()) params.top_p = proto.top_p();
  if (proto.has_min_p()) params.min_p = proto.min_p();
  if (!proto.has_max_tokens()) return InvalidField("max_tokens", "is required");
  params.max_tokens = proto.max_tokens();
  params.stop_token_ids = ToVector(proto.stop_token_ids());
  if (proto.has_ignore_eos()) params.ignore_eos = proto.ignore_eos();
  params.stop.assign(proto.stop().begin(), proto.stop().end());
  return params;
}

void SamplingParamsToProto(const SamplingParams& params, types::v1::SamplingParams* proto) {
  proto->set_temperature(params.temperature);
  proto->set_top_k(params.top_k);
  proto->set_top_p(params.top_p);
  proto->set_min_p(params.min_p);
  proto->set_max_tokens(params.max_tokens);
  SetAll<int32_t>(params.stop_token_ids, proto->mutable_stop_token_ids());
  proto->set_ignore_eos(params.ignore_eos);
  proto->mutable_stop()->Assign(params.stop.begin(), params.stop.end());
}

void TrajectoryToProto(const Trajectory& trajectory, types::v1::Trajectory* proto) {
  SetAll<int32_t>(trajectory.prompt_token_ids, proto->mutable_prompt_token_ids());
  SetAll<int32_t>(trajectory.response_token_ids, proto->mutable_response_token_ids());
  proto->set_authorship_mask(trajectory.authorship_mask.data(), trajectory.authorship_mask.size());
  FloatsToProto(trajectory.author_logprobs, proto->mutable_author_logprobs());
  if (!trajectory.other_logprobs.empty()) {
    FloatsToProto(trajectory.other_logprobs, proto->mutable_other_logprobs());
  }
  if (!trajectory.log_keep_mass.empty()) {
    FloatsToProto(trajectory.log_keep_mass, proto->mutable_log_keep_mass());
  }
  proto->clear_senior_versions();
  for (const VersionRun& run : trajectory.senior_versions) {
    auto* out = proto->add_senior_versions();
    WeightsVersionToProto(run.weights, out->mutable_weights());
    out->set_count(static_cast<int32_t>(run.count));
  }
  proto->set_junior_version(trajectory.junior_version);
  switch (trajectory.finish_reason) {
    case FinishReason::kUnspecified:
      proto->set_finish_reason(types::v1::FINISH_REASON_UNSPECIFIED);
      break;
    case FinishReason::kStop:
      proto->set_finish_reason(types::v1::FINISH_REASON_STOP);
      break;
    case FinishReason::kLength:
      proto->set_finish_reason(types::v1::FINISH_REASON_LENGTH);
      break;
  }
  proto->set_seed(trajectory.seed);
  proto->set_sample_index(trajectory.sample_index);
  SamplingParamsToProto(trajectory.sampling, proto->mutable_sampling());
  TandemConfigToProto(trajectory.tandem, proto->mutable_tandem());
  if (!trajectory.routed_experts.empty()) {
    TokenExpertsToProto(trajectory.routed_experts, proto->mutable_routed_experts());
  }
  proto->clear_vision_inputs();
  VisionInputsToProto(trajectory.vision_inputs, proto->mutable_vision_inputs());
  proto->set_response_offset(static_cast<int32_t>(trajectory.response_offset));
  if (trajectory.top_tokens.count > 0) {
    TopTokensToProto(trajectory.top_tokens, proto->mutable_top_token_ids(),
                     proto->mutable_top_logprobs());
  }
}

void TopTokensToProto(const TopTokens& tokens, types::v1::Tensor* ids,
                      types::v1::Tensor* logprobs) {
  FloatsToProto(tokens.logprobs, logprobs);
  ids->set_dtype(types::v1::DATA_TYPE_INT32);
  ids->set_data(tokens.ids.data(), tokens.ids.size() * sizeof(int32_t));
  for (types::v1::Tensor* tensor : {ids, logprobs}) {
    tensor->clear_shape();
    tensor->add_shape(static_cast<int64_t>(tokens.ids.size()) / tokens.count);
    tensor->add_shape(tokens.count);
  }
}

absl::StatusOr<Trajectory> TrajectoryFromProto(const types::v1::Trajectory& proto) {
  Trajectory trajectory;
  if (proto.prompt_token_ids().empty()) return InvalidField("prompt_token_ids", "is required");
  if (proto.response_token_ids().empty()) return InvalidField("response_token_ids", "is required");
  trajectory.prompt_token_ids = ToVector(proto.prompt_token_ids());
  trajectory.response_token_ids = ToVector(proto.response_token_ids());
  const int64_t length = proto.response_token_ids_size();

  const std::string& mask = proto.authorship_mask();
  if (mask.empty()) return InvalidField("authorship_mask", "is required");
  if (static_cast<int64_t>(mask.size()) != length) {
    return InvalidField("authorship_mask",
                        absl::StrCat("must have one byte for each of the ", length,
                                     " response tokens, has ", mask.size()));
  }
  TANDEM_ASSIGN_OR_RETURN(trajectory.authorship_mask, AuthorsFromProto("authorship_mask", mask));

  if (!proto.has_author_logprobs()) return InvalidField("author_logprobs", "is required");
  TANDEM_ASSIGN_OR_RETURN(trajectory.author_logprobs,
                          TokenFloats("author_logprobs", proto.author_logprobs(), length));
  if (proto.has_other_logprobs()) {
    TANDEM_ASSIGN_OR_RETURN(trajectory.other_logprobs,
                            TokenFloats("other_logprobs", proto.other_logprobs(), length));
  }
  if (proto.has_log_keep_mass()) {
    TANDEM_ASSIGN_OR_RETURN(trajectory.log_keep_mass,
                            TokenFloats("log_keep_mass", proto.log_keep_mass(), length));
  }

  if (proto.senior_versions().empty()) return InvalidField("senior_versions", "is required");
  int64_t covered = 0;
  for (int i = 0; i < proto.senior_versions_size(); ++i) {
    const auto& run = proto.senior_versions(i);
    if (run.count() < 1) {
      return InvalidField(absl::StrCat("senior_versions[", i, "].count"), "must be at least 1");
    }
    covered += run.count();
    trajectory.senior_versions.push_back({WeightsVersionFromProto(run.weights()), run.count()});
  }
  if (covered != length) {
    return InvalidField(
        "senior_versions",
        absl::StrCat("the counts sum to ", covered, ", not to the ", length, " response tokens"));
  }
  trajectory.junior_version = proto.junior_version();

  switch (proto.finish_reason()) {
    case types::v1::FINISH_REASON_STOP:
      trajectory.finish_reason = FinishReason::kStop;
      break;
    case types::v1::FINISH_REASON_LENGTH:
      trajectory.finish_reason = FinishReason::kLength;
      break;
    default:
      return InvalidField("finish_reason", "must be STOP or LENGTH");
  }
  trajectory.seed = proto.seed();
  trajectory.sample_index = proto.sample_index();
  if (!proto.has_sampling()) return InvalidField("sampling", "is required");
  absl::StatusOr<SamplingParams> sampling = SamplingParamsFromProto(proto.sampling());
  if (!sampling.ok()) return PrependFieldPath("sampling", sampling.status());
  trajectory.sampling = *std::move(sampling);
  if (!proto.has_tandem()) return InvalidField("tandem", "is required");
  absl::StatusOr<TandemConfig> tandem = TandemConfigFromProto(proto.tandem(), TandemConfig{});
  if (!tandem.ok()) return PrependFieldPath("tandem", tandem.status());
  trajectory.tandem = *std::move(tandem);
  if (proto.has_routed_experts()) {
    absl::StatusOr<TokenExperts> experts =
        TokenExpertsFromProto(proto.routed_experts(), proto.prompt_token_ids_size() + length - 1);
    if (!experts.ok()) return PrependFieldPath("routed_experts", experts.status());
    trajectory.routed_experts = *std::move(experts);
  }
  TANDEM_ASSIGN_OR_RETURN(trajectory.vision_inputs, VisionInputsFromProto(proto.vision_inputs()));
  trajectory.response_offset = proto.response_offset();
  return trajectory;
}

absl::StatusOr<std::vector<Author>> AuthorsFromProto(absl::string_view field,
                                                     const std::string& mask) {
  std::vector<Author> authors;
  authors.reserve(mask.size());
  for (size_t i = 0; i < mask.size(); ++i) {
    const std::optional<Author> author = AuthorOf(static_cast<uint8_t>(mask[i]));
    if (!author.has_value()) {
      return InvalidField(absl::StrCat(field, "[", i, "]"),
                          "must be 0 (junior), 1 (senior) or 2 (environment)");
    }
    authors.push_back(*author);
  }
  return authors;
}

absl::StatusOr<std::vector<VisionReference>> VisionInputsFromProto(
    const google::protobuf::RepeatedPtrField<types::v1::VisionInput>& protos) {
  std::vector<VisionReference> inputs;
  for (const types::v1::VisionInput& proto : protos) {
    if (proto.kind() != types::v1::VISION_KIND_IMAGE &&
        proto.kind() != types::v1::VISION_KIND_VIDEO) {
      return InvalidField(absl::StrCat("vision_inputs[", inputs.size(), "].kind"),
                          "must be IMAGE or VIDEO");
    }
    inputs.push_back({.is_video = proto.kind() == types::v1::VISION_KIND_VIDEO,
                      .digest = proto.digest(),
                      .grid_t = proto.grid_t(),
                      .grid_h = proto.grid_h(),
                      .grid_w = proto.grid_w()});
    if (proto.has_seconds_per_grid()) inputs.back().seconds_per_grid = proto.seconds_per_grid();
    if (proto.has_first_token()) inputs.back().first_token = proto.first_token();
  }
  return inputs;
}

void VisionInputsToProto(std::span<const VisionReference> inputs,
                         google::protobuf::RepeatedPtrField<types::v1::VisionInput>* protos) {
  for (const VisionReference& input : inputs) {
    types::v1::VisionInput* const proto = protos->Add();
    proto->set_kind(input.is_video ? types::v1::VISION_KIND_VIDEO : types::v1::VISION_KIND_IMAGE);
    proto->set_digest(input.digest);
    proto->set_grid_t(static_cast<int32_t>(input.grid_t));
    proto->set_grid_h(static_cast<int32_t>(input.grid_h));
    proto->set_grid_w(static_cast<int32_t>(input.grid_w));
    proto->set_seconds_per_grid(input.seconds_per_grid);
    if (input.first_token.has_value()) {
      proto->set_first_token(static_cast<int32_t>(*input.first_token));
    }
  }
}

void WeightsVersionToProto(const WeightsVersion& weights, types::v1::WeightsVersion* proto) {
  proto->set_version(weights.version);
  proto->set_digest(weights.digest);
}

WeightsVersion WeightsVersionFromProto(const types::v1::WeightsVersion& proto) {
  return {.version = proto.version(), .digest = proto.digest()};
}

void ModelSummaryToProto(const ModelSummary& summary, types::v1::ModelInfo* proto) {
  proto->set_path(summary.path);
  proto->set_model_type(summary.model_type);
  proto->set_vocab_size(static_cast<int32_t>(summary.vocab_size));
  proto->set_num_token_ids(static_cast<int32_t>(summary.num_token_ids));
  proto->set_num_parameters(summary.num_parameters);
  proto->set_num_trainable_parameters(summary.num_trainable_parameters);
  proto->set_max_model_len(static_cast<int32_t>(summary.max_model_len));
  proto->clear_eos_token_ids();
  for (const int64_t id : summary.eos_token_ids) {
    proto->add_eos_token_ids(static_cast<int32_t>(id));
  }
  proto->set_vocabulary_digest(summary.vocabulary_digest);
  proto->set_dtype(DTypeToProto(summary.dtype));
  proto->set_quantization(QuantizationToProto(summary.quantization));
  proto->set_takes_images(summary.vision.has_value());
  proto->clear_adapter();
  if (summary.lora.enabled()) {
    types::v1::AdapterInfo* const adapter = proto->mutable_adapter();
    adapter->set_rank(static_cast<int32_t>(summary.lora.rank));
    adapter->set_alpha(summary.lora.alpha);
    adapter->mutable_target_modules()->Assign(summary.lora.target_modules.begin(),
                                              summary.lora.target_modules.end());
    adapter->set_seed(summary.lora.seed);
  }
}

SharedFile SharedFileFromProto(const weights::v1::SharedFile& proto) {
  return {.process = proto.process(),
          .descriptor = proto.open_file(),
          .device = proto.device(),
          .inode = proto.inode()};
}

void SharedFileToProto(const SharedFile& file, weights::v1::SharedFile* proto) {
  proto->set_process(file.process);
  proto->set_open_file(file.descriptor);
  proto->set_device(file.device);
  proto->set_inode(file.inode);
}

GpuMemory GpuMemoryFromProto(const weights::v1::GpuMemory& proto) {
  return {.machine = proto.machine(),
          .gpu = proto.gpu(),
          .handle = proto.handle(),
          .offset = proto.offset(),
          .size = proto.size()};
}

void GpuMemoryToProto(const GpuMemory& memory, weights::v1::GpuMemory* proto) {
  proto->set_machine(memory.machine);
  proto->set_gpu(memory.gpu);
  proto->set_handle(memory.handle);
  proto->set_offset(memory.offset);
  proto->set_size(memory.size);
}

void WeightManifestToProto(const WeightManifest& manifest, weights::v1::WeightManifest* proto) {
  proto->set_version(manifest.version);
  proto->clear_tensors();
  for (const WeightSpec& spec : manifest.tensors) {
    auto* tensor = proto->add_tensors();
    tensor->set_name(spec.name);
    tensor->set_dtype(DTypeToProto(spec.dtype));
    SetAll<int64_t>(spec.shape, tensor->mutable_shape());
  }
  proto->set_total_bytes(manifest.total_bytes);
  proto->set_chunk_bytes(manifest.chunk_bytes);
  proto->set_digest(manifest.digest);
  proto->set_num_token_ids(manifest.num_token_ids);
  proto->set_sent_digest(manifest.sent_digest);
  proto->set_adapter(manifest.adapter);
  for (const ComponentManifest& component : manifest.components) {
    auto* out = proto->add_components();
    out->set_name(component.name);
    out->set_config(component.config);
    out->set_digest(component.digest);
  }
}

absl::Status CheckDigest(absl::string_view path, const std::string& digest) {
  if (digest.size() == 32 && digest.find_first_not_of("0123456789abcdef") == std::string::npos) {
    return absl::OkStatus();
  }
  return InvalidField(path, "must be 32 lower-case hexadecimal digits");
}

absl::StatusOr<WeightManifest> WeightManifestFromProto(const weights::v1::WeightManifest& proto) {
  WeightManifest manifest;
  if (proto.version() < 0) return InvalidField("version", "must not be negative");
  manifest.version = proto.version();
  std::set<std::string> names;
  int64_t total = 0;
  for (int i = 0; i < proto.tensors_size(); ++i) {
    const auto& tensor = proto.tensors(i);
    const std::string path = absl::StrCat("tensors[", i, "]");
    if (tensor.name().empty()) return InvalidField(path + ".name", "is required");
    if (!names.insert(tensor.name()).second) {
      return InvalidField(path + ".name", absl::StrCat("\"", tensor.name(), "\" appears twice"));
    }
    absl::StatusOr<DType> dtype = DTypeFromProto(tensor.dtype());
    if (!dtype.ok()) return PrependFieldPath(path, dtype.status());
    absl::StatusOr<int64_t> elements = CountElements(tensor.shape());
    if (!elements.ok()) return PrependFieldPath(path, elements.status());
    int64_t bytes = 0;
    if (__builtin_mul_overflow(*elements, static_cast<int64_t>(ItemSizeBytes(*dtype)), &bytes) ||
        __builtin_add_overflow(total, bytes, &total)) {
      return InvalidField(path + ".shape", "the number of bytes overflows");
    }
    manifest.tensors.push_back(
        {tensor.name(), *dtype, {tensor.shape().begin(), tensor.shape().end()}});
  }
  if (proto.total_bytes() != total) {
    return InvalidField("total_bytes", absl::StrCat("the tensors hold ", total, " bytes, not ",
                                                    proto.total_bytes()));
  }
  manifest.total_bytes = total;
  TANDEM_RETURN_IF_ERROR(CheckInRange("chunk_bytes", proto.chunk_bytes(), 1, kMaxChunkBytes));
  manifest.chunk_bytes = proto.chunk_bytes();
  TANDEM_RETURN_IF_ERROR(CheckDigest("digest", proto.digest()));
  manifest.digest = proto.digest();
  manifest.num_token_ids = proto.num_token_ids();
  if (!proto.sent_digest().empty()) {
    TANDEM_RETURN_IF_ERROR(CheckDigest("sent_digest", proto.sent_digest()));
  }
  manifest.sent_digest = proto.sent_digest();
  manifest.adapter = proto.adapter();
  for (int i = 0; i < proto.components_size(); ++i) {
    const auto& component = proto.components(i);
    const std::string path = absl::StrCat("components[", i, "]");
    TANDEM_RETURN_IF_ERROR(CheckComponentName(path + ".name", component.name()));
    if (manifest.Find(component.name()) != nullptr) {
      return InvalidField(path + ".name", absl::StrCat("\"", component.name(), "\" comes twice"));
    }
    TANDEM_RETURN_IF_ERROR(CheckDigest(path + ".digest", component.digest()));
    manifest.components.push_back({component.name(), component.config(), component.digest()});
  }
  return manifest;
}

}  // namespace tandem::rpc
