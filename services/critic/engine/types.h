// Options, requests and results of the critic engine.
#ifndef TANDEM_SERVICES_CRITIC_ENGINE_TYPES_H_
#define TANDEM_SERVICES_CRITIC_ENGINE_TYPES_H_

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "common/loss/value_loss.h"
#include "common/steps/mini_batches.h"
#include "common/tensor/vision_reference.h"
#include "common/weights/weights_version.h"
#include "services/training_core/engine.h"

namespace tandem::critic {

using training::EngineInfo;
using training::StepReport;
using training::StepResult;

struct EngineOptions : training::TrainingOptions {
  bool untie_embeddings = false;
  uint64_t value_head_seed = 0;
};

struct ValuesRequest {
  std::vector<int32_t> prompt_token_ids = {};
  std::vector<int32_t> response_token_ids = {};
  // The train step that the values are for; empty: no step, and nothing is kept.
  std::string run_id = {};
  std::string request_id = {};
  std::vector<VisionReference> vision_inputs = {};  // in the order of their tokens
  Blobs blobs = {};                                 // their pixels

  bool operator==(const ValuesRequest&) const = default;
};

// Requests that are evaluated together.
struct ValuesBatch {
  std::vector<ValuesRequest> requests;

  bool operator==(const ValuesBatch&) const = default;
};

struct ValuesResult {
  std::vector<float> values;  // [L]: value t is predicted from the state before response token t
  float final_value = 0;      // after the last token
  WeightsVersion weights;     // the critic's, when it computed them
};

struct ValueSample {
  std::vector<int32_t> prompt_token_ids;
  std::vector<int32_t> response_token_ids;
  std::vector<float> old_values = {};               // [L]
  std::vector<float> returns = {};                  // [L]
  std::vector<uint8_t> loss_mask = {};              // [L], or empty for all
  std::vector<VisionReference> vision_inputs = {};  // in the order of their tokens
  // [L + 1], of any sign, for the value before each response token and that after the last one; in
  // place of old_values, returns and loss_mask.
  std::vector<float> weights = {};

  bool operator==(const ValueSample&) const = default;
};

struct TrainStepRequest : training::StepIdentity {
  double value_clip = loss::kDefaultValueClip;
  training::UpdateOptions updates;
  std::vector<ValueSample> samples;
  Blobs blobs = {};  // of the samples' images

  // Used by common/base/struct_bytes.h.
  using Base = training::StepIdentity;
  static constexpr auto kOwnFields =
      std::tuple(&TrainStepRequest::value_clip, &TrainStepRequest::updates,
                 &TrainStepRequest::samples, &TrainStepRequest::blobs);

  bool operator==(const TrainStepRequest&) const = default;
};

}  // namespace tandem::critic

#endif  // TANDEM_SERVICES_CRITIC_ENGINE_TYPES_H_
