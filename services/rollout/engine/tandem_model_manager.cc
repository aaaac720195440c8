#include "services/rollout/engine/loaded_models.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"

namespace tandem::rollout {
namespace {

struct ModelAndVocabulary {
  std::unique_ptr<Model> model;
  absl::StatusOr<Vocabulary> vocabulary;  // NOT_FOUND without a tokenizer.json
};

absl::StatusOr<ModelAndVocabulary> LoadOne(const std::string& directory,
                                           const Placement& placement) {
  ModelAndVocabulary loaded = {.model = nullptr, .vocabulary = Vocabulary::Load(directory)};
  int64_t num_token_ids = 0;
  if (loaded.vocabulary.ok()) {
    num_token_ids = loaded.vocabulary->size();
  } else if (!absl::IsNotFound(loaded.vocabulary.status())) {
    return loaded.vocabulary.status();
  }
  TANDEM_ASSIGN_OR_RETURN(loaded.model, Model::Load(directory, {.num_token_ids = num_token_ids,
                                                                .placement = placement}));
  return loaded;
}

}  // namespace

absl::Status CheckOptions(const EngineOptions& options) {
  const std::pair<const char*, int64_t> positive[] = {
      {"max_num_seqs", options.max_num_seqs},
      {"max_model_len", options.max_model_len},
      {"max_batched_tokens", options.max_batched_tokens},
      {"max_queue", options.max_queue}};
  for (const auto& [field, value] : positive) {
    if (value < 1) return InvalidField(field, absl::StrCat("must be at least 1, got ", value));
  }
  if (options.max_model_len < 2) {
    return InvalidField("max_model_len", "must hold a prompt token and a response token");
  }
  if (options.compute.num_threads < 0) {
    return InvalidField("compute.num_threads", "must not be negative");
  }
  if (options.senior_model.empty()) return InvalidField("senior_model", "is required");
  return absl::OkStatus();
}

absl::StatusOr<LoadedModels> LoadModels(const EngineOptions& options, const Placement& senior,
                                        const Placement& junior) {
  LoadedModels result;
  absl::StatusOr<ModelAndVocabulary> loaded = LoadOne(options.senior_model, senior);
  if (!loaded.ok()) return PrependFieldPath("senior_model", loaded.status());
  const absl::StatusOr<Vocabulary> vocabulary = std::move(loaded->vocabulary);
  result.senior = std::move(loaded->model);
  const ModelConfig& config = result.senior->config();
  result.max_model_len = config.LongestSequence(options.max_model_len);
  std::set<int32_t> eos_token_ids(config.eos_token_ids.begin(), config.eos_token_ids.end());

  if (!options.junior_model.empty()) {
    if (!vocabulary.ok()) return PrependFieldPath("senior_model", vocabulary.status());
    loaded = LoadOne(options.junior_model, junior);
    absl::Status status = loaded.status();
    if (status.ok()) status = loaded->vocabulary.status();
    if (status.ok()) status = Vocabulary::CheckSame(*vocabulary, *loaded->vocabulary);
    if (!status.ok()) return PrependFieldPath("junior_model", status);
    result.junior = std::move(loaded->model);
    const ModelConfig& junior_config = result.junior->config();
    eos_token_ids.insert(junior_config.eos_token_ids.begin(), junior_config.eos_token_ids.end());
    result.max_model_len = junior_config.LongestSequence(result.max_model_len);
    result.junior_digest = result.junior->weights_digest();
    result.info.junior = result.junior->Summary(result.max_model_len);
    result.info.junior->vocabulary_digest = loaded->vocabulary->Digest();
  }
  result.eos_token_ids.assign(eos_token_ids.begin(), eos_token_ids.end());
  result.boundaries = std::make_unique<BoundarySets>(vocabulary.ok() ? *vocabulary : Vocabulary(),
                                                     result.eos_token_ids);
  TANDEM_RETURN_IF_ERROR(
      PrependFieldPath("tandem", tandem::Validate(options.tandem, result.senior->num_token_ids())));

  result.senior_digest = result.senior->weights_digest();
  EngineInfo& info = result.info;
  info.senior = result.senior->Summary(result.max_model_len);
  if (vocabulary.ok()) info.senior.vocabulary_digest = vocabulary->Digest();
  info.junior_version = result.junior_digest;
  info.sentence_boundary_token_ids = result.boundaries->sentence().ids();
  info.word_boundary_token_ids =
      result.boundaries->Resolve({.selection_strategy = SelectionStrategy::kWord})->ids();
  info.max_num_seqs = options.max_num_seqs;
  return result;
}

}  // namespace tandem::rollout
