// Loads the two models and their vocabularies, and checks that they fit each other.
#ifndef TANDEM_SERVICES_ROLLOUT_ENGINE_LOADED_MODELS_H_
#define TANDEM_SERVICES_ROLLOUT_ENGINE_LOADED_MODELS_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/model/model.h"
#include "common/tandem/vocabulary.h"
#include "services/rollout/engine/types.h"

namespace tandem::rollout {

struct LoadedModels {
  std::unique_ptr<Model> senior;
  std::unique_ptr<Model> junior;  // null without a junior
  std::unique_ptr<BoundarySets> boundaries;
  std::vector<int32_t> eos_token_ids;  // of either model
  std::string senior_digest;
  std::string junior_digest;
  int64_t max_model_len = 0;
  EngineInfo info;
};

// INVALID_ARGUMENT for options out of range.
absl::Status CheckOptions(const EngineOptions& options);

// Loads the models onto the lanes' devices. Errors of Model::Load and Vocabulary::Load have the
// field path "senior_model" or "junior_model"; FAILED_PRECONDITION (reason VOCABULARY_MISMATCH) if
// the two do not share every id (padding rows beyond the ids may differ); INVALID_ARGUMENT for
// tandem options out of range. With a junior, both models need a tokenizer.json.
absl::StatusOr<LoadedModels> LoadModels(const EngineOptions& options, const Placement& senior,
                                        const Placement& junior);

}  // namespace tandem::rollout

#endif  // TANDEM_SERVICES_ROLLOUT_ENGINE_LOADED_MODELS_H_
