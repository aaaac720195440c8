// Loads the senior and the junior of a rollout server, checks that they fit each other, and holds
// this rank's shard of each. The two lanes may differ in size, type, quantisation, ranks and
// device.
//
//   TANDEM_ASSIGN_OR_RETURN(const auto models, TandemModelManager::Load(options, ranks));
//   ModelRunner* junior = models->junior().runner();  // nullptr without a junior
#ifndef TANDEM_SERVICES_ROLLOUT_ENGINE_MODELS_TANDEM_MODEL_MANAGER_H_
#define TANDEM_SERVICES_ROLLOUT_ENGINE_MODELS_TANDEM_MODEL_MANAGER_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/coauthoring/vocabulary.h"
#include "common/model/model.h"
#include "common/tensor/weight_spec.h"
#include "common/weights/staged_weight_receiver.h"
#include "services/rollout/engine/models/torch_runner.h"
#include "services/rollout/engine/ranks/engine_ranks.h"
#include "services/rollout/engine/ranks/ranked_runner.h"
#include "services/rollout/engine/rollout_memory.h"
#include "services/rollout/engine/types.h"

namespace tandem::rollout {

class TandemModelManager {
 public:
  // One model on this rank.
  struct Lane {
    LaneRanks ranks;
    std::unique_ptr<TorchRunner> shard;    // nullptr without a model, or without a shard of it
    std::unique_ptr<RankedRunner> ranked;  // on rank 0, where other ranks have shards too
    std::string digest;                    // of the weights as loaded

    // Returns the runner that rank 0 generates with.
    ModelRunner* runner() const {
      return ranked != nullptr ? static_cast<ModelRunner*>(ranked.get()) : shard.get();
    }
  };

  // Loads the models onto the lanes' devices. Errors of Model::Load and Vocabulary::Load have the
  // field path "senior.model" or "junior.model"; FAILED_PRECONDITION (reason VOCABULARY_MISMATCH)
  // if the two do not share every id (padding rows beyond the ids may differ); INVALID_ARGUMENT for
  // tandem options out of range; errors of LoadSpeculator for "senior.speculator", which rank 0
  // loads. With a junior, both models need a tokenizer.json. The ranks'
  // `server` must outlive the result.
  static absl::StatusOr<std::unique_ptr<TandemModelManager>> Load(const EngineOptions& options,
                                                                  const EngineRanks& ranks);

  const Lane& senior() const { return senior_; }
  const Lane& junior() const { return junior_; }
  const EngineInfo& info() const { return info_; }
  const CacheBlocks& blocks() const { return blocks_; }
  const BoundarySets& boundaries() const { return *boundaries_; }
  // The senior's, which is the junior's too; nullptr without a tokenizer.json.
  const Vocabulary* vocabulary() const { return vocabulary_.has_value() ? &*vocabulary_ : nullptr; }
  // Those of both models.
  const std::vector<int32_t>& eos_token_ids() const { return eos_token_ids_; }
  // The whole parameters of the senior that a weight update brings, in the types in which it does.
  const std::vector<WeightSpec>& senior_parameters() const { return senior_parameters_; }
  // The head of a senior whose head is its embedding; an update may contain it.
  const std::optional<WeightSpec>& tied_head() const { return tied_head_; }
  // The senior's adapters.
  const ReceivedAdapter& adapter() const { return adapter_; }
  // The components that an update may bring beside the senior: on rank 0, the server's speculator.
  const std::vector<ReceivedComponent>& components() const { return components_; }

 private:
  TandemModelManager() = default;

  Lane senior_, junior_;
  EngineInfo info_;
  CacheBlocks blocks_;
  std::optional<Vocabulary> vocabulary_;
  std::unique_ptr<BoundarySets> boundaries_;
  std::vector<int32_t> eos_token_ids_;
  std::vector<WeightSpec> senior_parameters_;
  std::optional<WeightSpec> tied_head_;
  ReceivedAdapter adapter_;
  std::vector<ReceivedComponent> components_;
};

}  // namespace tandem::rollout

#endif  // TANDEM_SERVICES_ROLLOUT_ENGINE_MODELS_TANDEM_MODEL_MANAGER_H_
