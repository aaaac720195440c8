#include "services/rollout/engine/models/tandem_model_manager.h"

#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/errors/error.h"
#include "common/base/errors/error_reasons.h"
#include "common/base/errors/status_macros.h"
#include "common/base/logging.h"
#include "common/model/passes/layer_cache.h"
#include "common/speculator/speculator_files.h"
#include "common/speculator/speculator_update.h"
#include "services/rollout/engine/blocks/lane_storage.h"

namespace tandem::rollout {
namespace {

struct ModelAndVocabulary {
  std::shared_ptr<Model> model;
  absl::StatusOr<Vocabulary> vocabulary;  // NOT_FOUND without a tokenizer.json
};

absl::StatusOr<ModelAndVocabulary> LoadOne(const LaneOptions& lane, const Placement& placement) {
  const std::string& directory = lane.model;
  ModelAndVocabulary loaded = {.model = nullptr, .vocabulary = Vocabulary::Load(directory)};
  int64_t num_token_ids = 0;
  if (loaded.vocabulary.ok()) {
    num_token_ids = loaded.vocabulary->size();
  } else if (!absl::IsNotFound(loaded.vocabulary.status())) {
    return loaded.vocabulary.status();
  }
  TANDEM_ASSIGN_OR_RETURN(loaded.model, Model::Load(directory, {.num_token_ids = num_token_ids,
                                                                .lora = lane.lora,
                                                                .placement = placement}));
  return loaded;
}

// Returns the model as the server reports it. The lane's type is not that of the activations where
// maps are packed.
ModelSummary SummaryOf(const ModelAndVocabulary& loaded, const LaneOptions& options) {
  const int64_t longest = loaded.model->config().LongestSequence(options.max_model_len);
  ModelSummary summary = loaded.model->Summary(longest);
  if (loaded.vocabulary.ok()) summary.vocabulary_digest = loaded.vocabulary->Digest();
  summary.dtype = options.dtype;
  summary.quantization = options.quantization;
  return summary;
}

// A tokenizer may have more ids than one of the models has embeddings.
absl::Status CheckSameTokenIds(const Model& senior, const Model& junior) {
  if (senior.num_token_ids() == junior.num_token_ids()) return absl::OkStatus();
  return WithReason(absl::FailedPreconditionError(absl::StrCat(
                        "has embeddings for ", junior.num_token_ids(),
                        " ids of the tokenizer, but the senior for ", senior.num_token_ids(),
                        ": both can only write tokens that both have")),
                    reason::kVocabularyMismatch);
}

// Loads the speculator onto the senior's device.
absl::StatusOr<std::unique_ptr<const speculator::Speculator>> LoadSpeculatorOf(
    const Model& senior, const EngineOptions& options) {
  auto loaded = speculator::LoadSpeculator(options.senior_speculator,
                                           {.num_token_ids = senior.num_token_ids(),
                                            .device = senior.device(),
                                            .packs_heads = HasPackedLanes(options.compute)});
  if (!loaded.ok()) return PrependFieldPath("senior.speculator", loaded.status());
  return loaded;
}

// Errors name the field of the lane.
absl::StatusOr<TandemModelManager::Lane> MakeLane(
    Author author, const LaneRanks& ranks, std::shared_ptr<Model> model, const LaneBlocks& blocks,
    const LaneOptions& options, DType cache_dtype, ranks::ServerRanks* server,
    std::unique_ptr<const speculator::Speculator> speculator, std::optional<c10::Stream> stream) {
  const bool adapts = author == Author::kSenior;
  TandemModelManager::Lane lane{.ranks = ranks,
                                .shard = nullptr,
                                .ranked = nullptr,
                                .digest = adapts ? model->weights_digest() : model->base_digest()};
  if (!ranks.holds()) return lane;
  std::optional<int64_t> graph_tokens;
  if (!options.enforce_eager) {
    absl::Status supported = DecodeGraphs::CheckSupported(*model, cache_dtype);
    if (supported.ok() && speculator != nullptr) {
      supported = absl::UnimplementedError(
          "passes whose hidden states a speculator reads are not captured");
    }
    if (!supported.ok()) return PrependFieldPath("enforce_eager", supported);
    graph_tokens = model->config().LongestSequence(options.max_model_len);
  }
  lane.shard = std::make_unique<TorchRunner>(
      std::move(model), blocks.total(), cache_dtype, std::move(speculator),
      adapts ? TorchRunner::Adapters::kOn : TorchRunner::Adapters::kOff,
      // The ranks of a sharded lane compute a pass together, on the streams of their collectives.
      ranks.sharded() ? std::nullopt : stream, graph_tokens);
  if (ranks.sharded() && server->leads()) {
    lane.ranked = std::make_unique<RankedRunner>(author, server, lane.shard.get());
  }
  return lane;
}

}  // namespace

absl::StatusOr<std::unique_ptr<TandemModelManager>> TandemModelManager::Load(
    const EngineOptions& options, const EngineRanks& ranks) {
  auto manager = std::unique_ptr<TandemModelManager>(new TandemModelManager);
  EngineInfo& info = manager->info_;
  absl::StatusOr<ModelAndVocabulary> senior = LoadOne(options.senior, ranks.senior.placement);
  if (!senior.ok()) {
    const bool of_lora = FieldPath(senior.status()).value_or("").starts_with("lora");
    return PrependFieldPath(of_lora ? "senior" : "senior.model", senior.status());
  }
  info.senior = SummaryOf(*senior, options.senior);
  const ModelConfig& config = senior->model->config();
  std::set<int32_t> eos_token_ids(config.eos_token_ids.begin(), config.eos_token_ids.end());

  std::shared_ptr<Model> junior_model;
  if (!options.junior.model.empty()) {
    if (!senior->vocabulary.ok()) {
      return PrependFieldPath("senior.model", senior->vocabulary.status());
    }
    absl::StatusOr<ModelAndVocabulary> junior =
        SharesBaseModel(options) ? senior : LoadOne(options.junior, ranks.junior.placement);
    absl::Status status = junior.status();
    if (status.ok()) status = junior->vocabulary.status();
    if (status.ok()) status = Vocabulary::CheckSame(*senior->vocabulary, *junior->vocabulary);
    if (status.ok()) status = CheckSameTokenIds(*senior->model, *junior->model);
    if (!status.ok()) return PrependFieldPath("junior.model", status);
    const std::vector<int64_t>& junior_eos = junior->model->config().eos_token_ids;
    eos_token_ids.insert(junior_eos.begin(), junior_eos.end());
    info.junior = SummaryOf(*junior, options.junior);
    info.junior->num_parameters -= junior->model->num_adapter_parameters();
    info.junior_version = junior->model->base_digest();
    junior_model = std::move(junior->model);
  }
  manager->eos_token_ids_.assign(eos_token_ids.begin(), eos_token_ids.end());
  if (senior->vocabulary.ok()) manager->vocabulary_ = *std::move(senior->vocabulary);
  manager->boundaries_ = std::make_unique<BoundarySets>(manager->vocabulary_.value_or(Vocabulary()),
                                                        manager->eos_token_ids_);
  TANDEM_RETURN_IF_ERROR(
      PrependFieldPath("tandem", tandem::Validate(options.tandem, info.senior.num_token_ids)));

  info.sentence_boundary_token_ids = manager->boundaries_->sentence().ids();
  info.word_boundary_token_ids =
      manager->boundaries_->Resolve({.selection_strategy = SelectionStrategy::kWord})->ids();
  info.max_num_seqs = options.max_num_seqs;
  const LaneStorage senior_storage = StorageOf(options.senior, options);
  for (const Parameter& parameter : senior->model->DeclaredParameters()) {
    const ParameterSpec& spec = parameter.spec;
    if (!senior->model->IsSent(spec)) continue;
    manager->senior_parameters_.push_back(
        {.name = spec.name, .dtype = StoredType(spec, senior_storage), .shape = spec.shape});
    // Both are compared, in the same type.
    if (senior->model->tied() && spec.name == kEmbeddingName) {
      manager->tied_head_ = manager->senior_parameters_.back();
      manager->tied_head_->name = kLmHeadName;
    }
  }
  manager->adapter_ = {.settings = senior->model->lora().Text(),
                       .kept = senior->model->kept_sums()};
  std::unique_ptr<const speculator::Speculator> speculator;
  if (!options.senior_speculator.empty() && ranks.server->leads()) {
    TANDEM_ASSIGN_OR_RETURN(speculator, LoadSpeculatorOf(*senior->model, options));
    info.speculator_heads = speculator->sizes().n_predict;
    manager->components_ = {speculator::ReceivedBy(*speculator)};
  }
  manager->blocks_ = ranks.blocks;
  if (ranks.server->leads()) {
    Log(LogLevel::kInfo, "kv_cache",
        {{"senior_tokens", ranks.blocks.senior.generator * kKvBlockTokens},
         {"junior_tokens", ranks.blocks.junior.generator * kKvBlockTokens},
         {"max_num_seqs", options.max_num_seqs},
         {"max_model_len", info.senior.max_model_len}});
  }
  ranks::ServerRanks* const server = ranks.server.get();
  const std::optional<c10::Stream> stream = TorchRunner::NewStream(senior->model->device());
  if (junior_model != nullptr) {
    const bool shares = junior_model == senior->model;
    const auto own = shares ? stream : TorchRunner::NewStream(junior_model->device());
    absl::StatusOr<Lane> lane =
        MakeLane(Author::kJunior, ranks.junior, std::move(junior_model), ranks.blocks.junior,
                 options.junior, StorageOf(options.junior, options).cache_dtype, server,
                 /*speculator=*/nullptr, own);
    if (!lane.ok()) return PrependFieldPath("junior", lane.status());
    manager->junior_ = *std::move(lane);
  }
  absl::StatusOr<Lane> lane = MakeLane(
      Author::kSenior, ranks.senior, std::move(senior->model), ranks.blocks.senior, options.senior,
      StorageOf(options.senior, options).cache_dtype, server, std::move(speculator), stream);
  if (!lane.ok()) return PrependFieldPath("senior", lane.status());
  manager->senior_ = *std::move(lane);
  return manager;
}

}  // namespace tandem::rollout
