// Loading: two models, their vocabularies, and the checks that they belong together.
#ifndef TANDEM_SERVICES_ROLLOUT_ENGINE_LOADED_MODELS_H_
#define TANDEM_SERVICES_ROLLOUT_ENGINE_LOADED_MODELS_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/model/model.h"
#include "common/tandem/vocabulary.h"
#include "common/tensor/named_tensors.h"
#include "common/tensor/weight_transfer.h"
#include "services/rollout/engine/types.h"

namespace tandem::rollout {

struct LoadedModels {
  std::unique_ptr<Model> senior;
  std::unique_ptr<Model> junior;  // null without one
  std::unique_ptr<BoundarySets> boundaries;
  std::vector<int32_t> eos_token_ids;  // of either model
  std::string senior_digest;
  std::string junior_digest;
  int64_t max_model_len = 0;
  EngineInfo info;
};

// INVALID_ARGUMENT for options out of range.
absl::Status CheckOptions(const EngineOptions& options);

// Onto where the lanes' models live. Errors of Model::Load and Vocabulary::Load with "senior_model"
// or "junior_model" as field path; FAILED_PRECONDITION (reason VOCABULARY_MISMATCH) when the two do
// not share every id; INVALID_ARGUMENT for tandem options out of range. A tokenizer.json is needed
// as soon as there is a junior.
absl::StatusOr<LoadedModels> LoadModels(const EngineOptions& options, const Placement& senior,
                                        const Placement& junior);

// The tensors that `manifest` lays out in `stream`, in the stream's memory: only to be read.
absl::StatusOr<NamedTensors> TensorsIn(const WeightManifest& manifest,
                                       absl::Span<const std::byte> stream);

}  // namespace tandem::rollout

#endif  // TANDEM_SERVICES_ROLLOUT_ENGINE_LOADED_MODELS_H_
