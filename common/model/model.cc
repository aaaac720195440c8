#include "common/model/model.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "common/base/errors/error.h"
#include "common/base/errors/status_macros.h"
#include "common/base/logging.h"
#include "common/kernels/cpu/cpu_kernels.h"
#include "common/model/families/blocks/decoder.h"
#include "common/model/family.h"
#include "common/model/loading/parameter_intake.h"
#include "common/model/parameters/initial_value.h"
#include "common/model/parameters/parameter_store.h"
#include "common/model/parameters/prepared_weights.h"
#include "common/ops/attention/device_attention.h"
#include "common/ops/ops.h"
#include "common/ops/shards/token_shards.h"
#include "common/ops/threads/pass_memory.h"
#include "common/tensor/aten/device_copies.h"
#include "common/weights/weights_digest.h"

namespace tandem {

namespace {

absl::Status CheckExpertShards(const Family& family, const ModelConfig& config,
                               const LoadOptions& options) {
  const ExpertShard& experts = options.placement.experts;
  if (experts.count == 1) return absl::OkStatus();
  const std::string field = "placement.experts";
  TANDEM_RETURN_IF_ERROR(family.CheckExpertShards(config, experts.count, field));
  if (experts.index < 0 || experts.index >= experts.count) {
    return InvalidField(field, absl::StrCat("is shard ", experts.index, " of ", experts.count));
  }
  if (experts.whole) {
    if (options.requires_grad) return InvalidField(field, "whole experts cannot be trained");
    if (experts.count == options.placement.shard_count &&
        experts.index == options.placement.shard_index) {
      return absl::OkStatus();
    }
    return InvalidField(field, "whole experts are those of the tensor-parallel ranks");
  }
  const auto& group = options.placement.expert_group;
  if (group == nullptr || (group->size() == experts.count && group->rank() == experts.index)) {
    return absl::OkStatus();
  }
  return InvalidField(
      "placement.expert_group",
      absl::StrCat("is rank ", group->rank(), " of ", group->size(), ", and the experts are shard ",
                   experts.index, " of ", experts.count));
}

absl::Status CheckShards(const Family& family, const ModelConfig& config,
                         const LoadOptions& options) {
  const Placement& placement = options.placement;
  const int64_t count = placement.shard_count;
  if (count > 1) {
    TANDEM_RETURN_IF_ERROR(
        family.CheckShards(config, count, placement.experts.whole, "placement.shard_count"));
  }
  TANDEM_RETURN_IF_ERROR(CheckExpertShards(family, config, options));
  const auto& group = placement.shard_group;
  if (group == nullptr || (group->size() == count && group->rank() == placement.shard_index)) {
    return absl::OkStatus();
  }
  return InvalidField("placement.shard_group",
                      absl::StrCat("is rank ", group->rank(), " of ", group->size(),
                                   ", and the shard is ", placement.shard_index, " of ", count));
}

absl::Status CheckWeightFormat(const LoadOptions& options) {
  const Placement& placement = options.placement;
  const auto fail = [](absl::string_view what) {
    return InvalidField("placement.weight_format", absl::StrCat("packed weights ", what));
  };
  if (placement.weight_format == kernels::WeightFormat::kDense) return absl::OkStatus();
  if (options.requires_grad && !options.freeze_all && !options.lora.enabled()) {
    return fail("cannot be trained: only the adapters of lora, beside them, can");
  }
  if (options.without_memory) return fail("cannot be gathered block by block");
  if (!placement.device.is_cpu() || placement.dtype != at::kFloat) {
    return fail("are only multiplied on the CPU, in float32");
  }
  if (!ops::PackedWeight::IsSupported()) {
    return fail("need the CPU's own kernels, but kernels is aten");
  }
  return absl::OkStatus();
}

absl::Status CheckWeightDtype(const LoadOptions& options) {
  const Placement& placement = options.placement;
  const auto fail = [](absl::string_view what) {
    return InvalidField("placement.weight_dtype", what);
  };
  if (placement.weight_dtype == at::kFloat) return absl::OkStatus();
  if (placement.weight_dtype != at::kBFloat16) return fail("must be float32 or bfloat16");
  if (placement.weight_format != kernels::WeightFormat::kDense) {
    return fail("packed weights have the type of their format");
  }
  if (!placement.device.is_cpu() || placement.dtype != at::kFloat) {
    return fail("rounded weights are only multiplied on the CPU, in float32");
  }
  if (!options.requires_grad && options.without_memory) {
    return fail("an inference-only model rounds only values that it holds whole");
  }
  return absl::OkStatus();
}

absl::Status CheckActivationDtype(const LoadOptions& options) {
  const Placement& placement = options.placement;
  const auto fail = [](absl::string_view what) {
    return InvalidField("placement.activation_dtype", what);
  };
  if (placement.activation_dtype == at::kFloat) return absl::OkStatus();
  if (placement.activation_dtype != at::kBFloat16) return fail("must be float32 or bfloat16");
  if (placement.weight_format != kernels::WeightFormat::kBfloat16 &&
      placement.weight_dtype != at::kBFloat16) {
    return fail("needs weights in bfloat16");
  }
  if (kernels::GetCpuKernels().bfloat16_linear == nullptr) {
    return fail("needs the CPU's own kernels, but kernels is aten");
  }
  if (options.without_memory) return fail("weights in bfloat16 are not gathered block by block");
  return absl::OkStatus();
}

absl::Status CheckFreezeAll(const LoadOptions& options) {
  if (!options.requires_grad) return InvalidField("freeze_all", "needs requires_grad");
  if (options.freeze.empty()) return absl::OkStatus();
  return InvalidField("freeze", "has no effect where every parameter is frozen");
}

}  // namespace

Model::~Model() = default;

absl::StatusOr<std::unique_ptr<Model>> Model::Build(const ModelConfig& config,
                                                    const HeadOptions& head,
                                                    const LoadOptions& options) {
  if (options.placement.dtype != at::kFloat && options.placement.dtype != at::kBFloat16) {
    return InvalidField("placement.dtype", "must be float32 or bfloat16");
  }
  TANDEM_RETURN_IF_ERROR(CheckWeightFormat(options));
  TANDEM_RETURN_IF_ERROR(CheckWeightDtype(options));
  TANDEM_RETURN_IF_ERROR(CheckActivationDtype(options));
  TANDEM_ASSIGN_OR_RETURN(const Family* family, FindFamily(config.model_type));
  TANDEM_RETURN_IF_ERROR(CheckShards(*family, config, options));
  std::unique_ptr<Model> model(new Model);
  model->config_ = config;
  if (options.num_token_ids > config.vocab_size) {
    Log(LogLevel::kWarning, "token_ids_without_embedding",
        {{"token_ids", options.num_token_ids}, {"embeddings", config.vocab_size}});
  }
  model->num_token_ids_ = options.num_token_ids > 0
                              ? std::min(options.num_token_ids, config.vocab_size)
                              : config.vocab_size;
  model->head_ = head.kind;
  model->tied_ = head.tied;
  model->placement_ = options.placement;
  if (model->placement_.shard_count == 1) model->placement_.shard_group = nullptr;
  model->family_ = family;
  model->lora_ = options.lora;
  TANDEM_ASSIGN_OR_RETURN(const std::vector<ParameterSpec> specs,
                          ModelParameters(config, head, options.lora));
  std::vector<bool> trainable;
  if (options.freeze_all) {
    TANDEM_RETURN_IF_ERROR(CheckFreezeAll(options));
    trainable.assign(specs.size(), false);
  } else if (options.requires_grad) {
    TANDEM_ASSIGN_OR_RETURN(trainable, TrainableParameters(specs, options.freeze, options.lora));
  } else if (!options.freeze.empty()) {
    return InvalidField("freeze", "has no effect on a model that is not trained");
  }
  TANDEM_ASSIGN_OR_RETURN(model->store_,
                          ParameterStore::Create(specs, trainable, options.placement,
                                                 options.without_memory, options.lora));
  model->backbone_ = std::make_unique<Decoder>(config, model->placement_, *model->store_);
  if (options.placement.Holds(config.LastBlock())) {
    model->head_weight_ = &model->store_->TakeLinear({head.kind == HeadKind::kValue ? "score"
                                                      : head.tied ? "model.embed_tokens"
                                                                  : "lm_head"});
  }
  return model;
}

absl::StatusOr<std::unique_ptr<Model>> Model::Random(const ModelConfig& config, uint64_t seed,
                                                     const LoadOptions& options) {
  const bool tied =
      options.head == HeadKind::kLm && config.tie_word_embeddings && !options.untie_embeddings;
  TANDEM_ASSIGN_OR_RETURN(auto model, Build(config, {.kind = options.head, .tied = tied}, options));
  model->Initialize(seed);
  if (options.head == HeadKind::kValue) model->value_head_source_ = ValueHeadSource::kRandom;
  return model;
}

bool Model::IsWhole() const {
  return placement_.shard_count == 1 && placement_.experts.count == 1 &&
         placement_.holds_block == nullptr;
}

void Model::Initialize(uint64_t seed) {
  at::NoGradGuard no_grad;
  const at::Generator generator = at::detail::createCPUGenerator(seed);
  WeightsHasher hasher;
  for (const auto& parameter : store_->parameters()) {
    // The same weights with adapters and without.
    const at::Tensor whole =
        parameter.spec.adapts ? InitialAdapter(parameter.spec, lora_)
                              : InitialValue(parameter.spec, config_.initializer_range, generator);
    hasher.Add(parameter.spec.name, whole);
    if (parameter.held()) parameter.CopyFrom(whole);
  }
  RecordDigest(hasher.Sums());
  OnWeightsChanged();
}

void Model::RecordDigest(TensorSums sums) {
  weights_digest_ = base_digest_ = sums.Digest();
  if (!lora_.enabled()) return;
  for (const auto& parameter : store_->parameters()) {
    const std::string& name = parameter.spec.name;
    if (!parameter.spec.adapts) kept_sums_.Add(name, sums.Of(name));
  }
  base_digest_ = kept_sums_.Digest();
  lora_.AddTo(kept_sums_);
  lora_.AddTo(sums);
  weights_digest_ = sums.Digest();
}

ModelPass Model::StartPass(const RaggedBatch& batch, AttentionContext& context) const {
  TORCH_CHECK_NOT_IMPLEMENTED(placement_.shard_count == 1 || placement_.shard_group != nullptr,
                              "a shard cannot compute without the others");
  TORCH_CHECK_NOT_IMPLEMENTED(placement_.experts.count == 1 || placement_.experts.whole ||
                                  placement_.expert_group != nullptr,
                              "a shard of the experts cannot compute without the others");
  return backbone_->StartPass(batch, context, /*rows=*/{});
}

at::Tensor Model::HiddenStates(const RaggedBatch& batch, AttentionContext& context) const {
  return backbone_->Run(StartPass(batch, context));
}

at::Tensor Model::SoftCapped(const at::Tensor& logits) const {
  const std::optional<double> cap = logit_soft_cap();
  return cap.has_value() ? ops::SoftCap(logits, *cap) : logits;
}

at::Tensor Model::ForwardLogits(const at::Tensor& hidden) const {
  TORCH_CHECK(head_ == HeadKind::kLm, "the model has no language-model head");
  if (placement_.shard_count == 1) {
    return SoftCapped(at::GradMode::is_enabled()
                          ? head_weight_->Forward(hidden).narrow(1, 0, num_token_ids_)
                          : head_weight_->Logits(hidden, num_token_ids_));
  }
  TORCH_CHECK_NOT_IMPLEMENTED(placement_.shard_group != nullptr && !at::GradMode::is_enabled(),
                              "logits of a vocabulary-parallel head with autograd, or of a shard "
                              "without the others");
  // An all-gather takes as many columns from every rank: the last ranks may hold fewer rows.
  const Shard shard = {.index = placement_.shard_index, .count = placement_.shard_count};
  const int64_t columns = shard.LargestSize(config_.vocab_size);
  at::Tensor own = SoftCapped(head_weight_->Logits(hidden, head_weight_->out()));
  if (own.size(1) < columns) own = at::constant_pad_nd(own, {0, columns - own.size(1)});
  // [ranks * N, columns], rank by rank.
  return placement_.shard_group->AllGather(own)
      .unflatten(0, {placement_.shard_count, hidden.size(0)})
      .transpose(0, 1)
      .reshape({hidden.size(0), placement_.shard_count * columns})
      .narrow(1, 0, num_token_ids_);
}

at::Tensor Model::Values(const at::Tensor& hidden) const {
  TORCH_CHECK(head_ == HeadKind::kValue, "the model has no value head");
  const at::Tensor values = head_weight_->Forward(hidden).squeeze(1);
  // Every rank holds the whole head and computes all values.
  const auto& group =
      placement_.output_group != nullptr ? placement_.output_group : placement_.shard_group;
  return group == nullptr ? values : ops::DivideGradient(values, *group);
}

namespace {

absl::Status CheckInput(const KvCache& cache, const DecodeInput& input, int64_t num_token_ids) {
  const int64_t count = static_cast<int64_t>(input.tokens.size());
  if (count == 0) return InvalidField("tokens", "must not be empty");
  if (input.start < 0) return InvalidField("start", "must not be negative");
  if (const int64_t needed = KvBlocks(input.start + count);
      static_cast<int64_t>(input.blocks.size()) < needed) {
    return InvalidField("blocks", absl::StrCat(input.start + count, " tokens need ", needed,
                                               " blocks, got ", input.blocks.size()));
  }
  for (size_t i = 0; i < input.blocks.size(); ++i) {
    if (input.blocks[i] < 0 || input.blocks[i] >= cache.num_blocks()) {
      return InvalidField(absl::StrCat("blocks[", i, "]"),
                          absl::StrCat(input.blocks[i], " is not one of ", cache.num_blocks()));
    }
  }
  for (size_t i = 0; i < input.output_rows.size(); ++i) {
    const int64_t row = input.output_rows[i];
    if (row < (i == 0 ? 0 : input.output_rows[i - 1] + 1) || row >= count) {
      return InvalidField(
          absl::StrCat("output_rows[", i, "]"),
          absl::StrCat("must be above the one before and below ", count, ", got ", row));
    }
  }
  for (int64_t i = 0; i < count; ++i) {
    if (input.tokens[i] < 0 || input.tokens[i] >= num_token_ids) {
      return InvalidField(
          absl::StrCat("tokens[", i, "]"),
          absl::StrCat(input.tokens[i], " is outside the vocabulary of ", num_token_ids));
    }
  }
  return absl::OkStatus();
}

// Writes the experts [T, layers, k] of the inputs' tokens into their blocks.
void RecordRouting(KvCache& cache, std::span<const DecodeInput> inputs, const at::Tensor& experts) {
  std::vector<int64_t> places;
  for (const DecodeInput& input : inputs) {
    const int64_t end = input.start + static_cast<int64_t>(input.tokens.size());
    for (int64_t p = input.start; p < end; ++p) {
      places.push_back(input.blocks[static_cast<size_t>(p / kKvBlockTokens)] * kKvBlockTokens +
                       p % kKvBlockTokens);
    }
  }
  const at::Tensor& routing = cache.routing();
  routing.index_copy_(0, CopyToDevice(places, routing.device()), experts.to(routing.scalar_type()));
}

}  // namespace

BatchImages Model::ImagesOf(std::span<const DecodeInput> inputs,
                            std::span<const std::vector<at::Tensor>> image_rows) const {
  TORCH_CHECK(config_.vision.has_value(), "the model has no vision tower");
  TORCH_CHECK(image_rows.size() == inputs.size(), "inputs with images need the tower's rows");
  ImageBatch images(*config_.vision);
  for (size_t i = 0; i < inputs.size(); ++i) {
    images.AddComputedTokens(inputs[i].images, image_rows[i], inputs[i].start,
                             static_cast<int64_t>(inputs[i].tokens.size()));
  }
  return images.Take(device());
}

absl::Status Model::CheckInputs(const KvCache& cache, std::span<const DecodeInput> inputs,
                                const at::Tensor& drawn) const {
  const int64_t end = drawn.defined() ? drawn.size(0) : num_token_ids_;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const absl::Status status = CheckInput(cache, inputs[i], end);
    if (!status.ok()) return PrependFieldPath(absl::StrCat("inputs[", i, "]"), status);
  }
  return absl::OkStatus();
}

bool Model::AttendsInKernel(at::ScalarType cache_type) const {
  return std::ranges::all_of(CacheLayout(), [&](const LayerCache& layer) {
    return layer.value_dim == 0 &&
           ops::HasDeviceAttention(device(), dtype(), cache_type, layer.head_dim);
  });
}

at::Tensor Model::DecodeBatched(KvCache& cache, const DecodeBatch& batch) const {
  const at::NoGradGuard no_grad;
  CachedContext context(cache, batch.sequences);
  ModelPass pass = backbone_->StartPass(batch.batch, context, batch.wanted);
  pass.shards_tokens = false;
  return backbone_->Run(pass);
}

absl::StatusOr<at::Tensor> Model::Decode(KvCache& cache, std::span<const DecodeInput> inputs,
                                         std::span<const std::vector<at::Tensor>> image_rows,
                                         const at::Tensor& drawn) const {
  at::NoGradGuard no_grad;
  if (placement_.shard_count != 1 && placement_.shard_group == nullptr) {
    return absl::UnimplementedError("a shard cannot compute without the others");
  }
  TANDEM_RETURN_IF_ERROR(CheckInputs(cache, inputs, drawn));
  int64_t count = 0, num_rows = 0, longest_table = 0;
  for (const DecodeInput& input : inputs) {
    count += static_cast<int64_t>(input.tokens.size());
    num_rows += static_cast<int64_t>(input.output_rows.size());
    longest_table = std::max(longest_table, static_cast<int64_t>(input.blocks.size()));
  }
  if (count == 0) {
    return at::empty({0, config_.hidden_size}, at::device(device()).dtype(dtype()));
  }
  // The vectors keep their memory for the next pass.
  thread_local RaggedBatch batch;
  thread_local ops::PagedSequences sequences;
  const absl::Cleanup release = [] {
    for (at::Tensor* tensor : {&batch.tokens, &batch.positions, &sequences.block_table}) {
      tensor->reset();
    }
    sequences.rows = {};
    sequences.key_runs.clear();
    sequences.kernel_plans.clear();
    batch.images = {};
    batch.routing = {};
  };
  batch.offsets.assign(1, 0);
  batch.positions_end = 0;
  sequences.starts.clear();
  // Tokens, positions and wanted rows, so that one upload takes them all.
  const at::Tensor indices = ops::EmptyOnCpu({2 * count + num_rows}, at::kLong);
  int64_t* token = indices.mutable_data_ptr<int64_t>();
  int64_t *position = token + count, *row = position + count;
  const at::Tensor tables =
      ops::EmptyOnCpu({static_cast<int64_t>(inputs.size()), longest_table}, at::kInt);
  int32_t* table = tables.mutable_data_ptr<int32_t>();
  std::fill_n(table, tables.numel(), 0);
  for (const DecodeInput& input : inputs) {
    const int64_t begin = batch.offsets.back();
    for (const int64_t wanted : input.output_rows) *row++ = begin + wanted;
    token = std::copy(input.tokens.begin(), input.tokens.end(), token);
    const int64_t end = input.start + static_cast<int64_t>(input.tokens.size());
    for (int64_t p = input.start; p < end; ++p) *position++ = p;
    std::copy(input.blocks.begin(), input.blocks.end(), table);
    table += longest_table;
    sequences.starts.push_back(input.start);
    batch.positions_end = std::max(batch.positions_end, end);
    batch.offsets.push_back(begin + end - input.start);
  }
  const at::Tensor uploaded = CopyToDevice(indices, device());
  batch.tokens = ops::Narrow(uploaded, 0, 0, count);
  if (drawn.defined()) batch.tokens = drawn.index_select(0, batch.tokens).to(at::kLong);
  batch.positions = ops::Narrow(uploaded, 0, count, count);
  sequences.block_table = CopyToDevice(tables, device());
  if (ops::NeedsPagedRows(device(), dtype())) {
    sequences.rows =
        ops::PlanPagedRows(batch.offsets, sequences.starts, tables, kKvBlockTokens, device());
  }
  if (std::any_of(inputs.begin(), inputs.end(),
                  [](const DecodeInput& input) { return input.images != nullptr; })) {
    batch.images = ImagesOf(inputs, image_rows);
  }
  at::Tensor wanted;
  if (num_rows != count) wanted = ops::Narrow(uploaded, 0, 2 * count, num_rows);
  const bool records = cache.routing().defined() &&
                       std::any_of(inputs.begin(), inputs.end(),
                                   [](const DecodeInput& input) { return input.records_routing; });
  std::vector<at::Tensor> chosen(records ? static_cast<size_t>(config_.RoutingLayout().layers) : 0);
  if (records) batch.routing.chosen = &chosen;

  CachedContext context(cache, sequences);
  ModelPass pass = backbone_->StartPass(batch, context, records ? at::Tensor() : wanted);
  pass.shards_tokens = false;
  const at::Tensor hidden = backbone_->Run(pass);
  if (!records) return hidden;
  RecordRouting(cache, inputs, at::stack(chosen, 1));
  return wanted.defined() ? ops::SelectRows(hidden, wanted) : hidden;
}

std::vector<LayerCache> Model::CacheLayout() const {
  return family_->CacheLayout(config_, placement_.shard_count);
}

NamedTensors Model::Parameters() const {
  TORCH_CHECK(placement_.weight_format == kernels::WeightFormat::kDense,
              "packed matrices are not available as tensors");
  NamedTensors tensors;
  for (const auto& parameter : store_->parameters()) {
    if (parameter.value.defined()) tensors.emplace_back(parameter.spec.name, parameter.value);
  }
  return tensors;
}

const std::vector<at::Tensor>& Model::BlockBuffers() const { return store_->block_buffers(); }

const std::vector<at::Tensor>& Model::ComputeBuffers() const { return store_->compute_buffers(); }

bool Model::HasExperts(int64_t buffer) const {
  return std::ranges::any_of(store_->parameters(), [&](const auto& parameter) {
    return parameter.buffer == buffer && parameter.spec.expert.has_value() &&
           placement_.experts.count > 1;
  });
}

const std::vector<tandem::Parameter>& Model::DeclaredParameters() const {
  return store_->parameters();
}

void Model::OnWeightsChanged() { store_->OnWeightsChanged(); }

std::vector<WeightSpec> Model::SentSpecs() const {
  std::vector<WeightSpec> specs;
  for (const auto& parameter : store_->parameters()) {
    if (!IsSent(parameter.spec)) continue;
    specs.push_back({.name = parameter.spec.name, .shape = parameter.spec.shape});
  }
  return specs;
}

std::vector<StackedTensor> Model::StackedTensors() const {
  return family_->StackedTensors(config_);
}

at::Tensor Model::Parameter(absl::string_view name) const {
  const auto* parameter = store_->Find(std::string(name));
  return parameter == nullptr ? at::Tensor() : parameter->value;
}

int64_t Model::CountValues(bool (*counts)(const tandem::Parameter&)) const {
  int64_t count = 0;
  for (const auto& parameter : store_->parameters()) {
    if (counts(parameter)) count += parameter.spec.numel();
  }
  return count;
}

int64_t Model::num_parameters() const {
  return CountValues([](const auto&) { return true; });
}

int64_t Model::num_adapter_parameters() const {
  return CountValues([](const auto& parameter) { return parameter.spec.adapts; });
}

int64_t Model::num_trainable_parameters() const {
  return CountValues([](const auto& parameter) { return parameter.trainable; });
}

ModelSummary Model::Summary(int64_t max_model_len) const {
  using kernels::WeightFormat;
  return {.path = source_directory_,
          .model_type = config_.model_type,
          .vocab_size = config_.vocab_size,
          .num_token_ids = num_token_ids_,
          .num_parameters = num_parameters(),
          .num_trainable_parameters = num_trainable_parameters(),
          .max_model_len = max_model_len,
          .eos_token_ids = config_.eos_token_ids,
          .vision = config_.vision,
          .vocabulary_digest = {},
          .dtype = dtype() == at::kBFloat16 || weight_format() == WeightFormat::kBfloat16
                       ? DType::kBFloat16
                       : DType::kFloat32,
          .quantization = weight_format() == WeightFormat::kInt8   ? Quantization::kInt8
                          : weight_format() == WeightFormat::kInt4 ? Quantization::kInt4
                                                                   : Quantization::kNone,
          .lora = lora_};
}

absl::StatusOr<std::vector<std::pair<const tandem::Parameter*, at::Tensor>>> Model::Match(
    const NamedTensors& tensors) const {
  // The intake reads the embedding to compare it with a tied head.
  const bool has_tied_head =
      tied_ && std::any_of(tensors.begin(), tensors.end(),
                           [](const auto& tensor) { return tensor.first == kLmHeadName; });
  ParameterIntake intake(store_->parameters(), has_tied_head);
  std::vector<std::pair<const tandem::Parameter*, at::Tensor>> matched;
  for (const auto& [name, tensor] : tensors) {
    TANDEM_ASSIGN_OR_RETURN(const tandem::Parameter* parameter, intake.Accept(name, tensor));
    if (parameter != nullptr) matched.emplace_back(parameter, tensor);
  }
  TANDEM_RETURN_IF_ERROR(intake.CheckComplete());
  return matched;
}

absl::Status Model::LoadParameters(const NamedTensors& tensors) {
  TANDEM_ASSIGN_OR_RETURN(const auto matched, Match(tensors));
  at::NoGradGuard no_grad;
  for (const auto& [parameter, whole] : matched) {
    if (parameter->held()) parameter->CopyFrom(whole);
  }
  OnWeightsChanged();
  return absl::OkStatus();
}

std::unique_ptr<PreparedWeights> Model::PrepareWeights() const {
  return std::make_unique<PreparedWeights>(store_->NewSet(), tied_);
}

void Model::Adopt(PreparedWeights& prepared) { store_->Swap(prepared.set_); }

}  // namespace tandem
