// The interface through which the trainer's engine calls the critic; the service implements it over
// gRPC.
#ifndef TANDEM_SERVICES_TRAINER_ENGINE_AUXILIARY_CRITIC_CONNECTION_H_
#define TANDEM_SERVICES_TRAINER_ENGINE_AUXILIARY_CRITIC_CONNECTION_H_

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/base/call_scope.h"
#include "common/steps/mini_batches.h"
#include "common/tensor/vision_reference.h"
#include "common/weights/weights_version.h"

namespace tandem::trainer {

// The trainer's calls of its critic. They block, with the deadline, the cancellation and the
// request id of the train step's call, and call `progress` with every message of the critic.
class CriticConnection {
 public:
  struct Call {
    const CallScope& scope;
    std::function<void()> progress;
    const Blobs& blobs;  // of the sequences' images, which the critic is sent if it lacks them
  };
  // The train step of a call. The critic answers a repeated step with the same values, even after
  // it has learnt the step.
  struct Step {
    std::string run_id;
    int64_t step = 0;
    std::string request_id;
  };
  struct Sequence {
    std::vector<int32_t> prompt_token_ids;
    std::vector<int32_t> response_token_ids;
    std::vector<VisionReference> vision_inputs = {};
  };
  struct Values {
    std::vector<std::vector<float>> values;  // [S][L]
    std::vector<float> final_values;         // [S]
    WeightsVersion weights;                  // the critic's
  };
  struct TrainRequest {
    Step step;
    int64_t expected_version = 0;
    double value_clip = 0;
    training::UpdateOptions updates;
    std::vector<Sequence> sequences;
    std::vector<std::vector<float>> old_values;  // [S][L]
    std::vector<std::vector<float>> returns;     // [S][L]
    // [S][L], 1 where the token counts in the loss; empty: every token counts.
    std::vector<std::vector<uint8_t>> loss_masks;
  };
  virtual ~CriticConnection() = default;
  virtual absl::StatusOr<Values> ComputeValues(const Call& call, const Step& step,
                                               const std::vector<Sequence>& sequences) = 0;
  // Returns the critic's metrics ("critic/loss", ...). NotFiniteError when the critic skipped the
  // step.
  virtual absl::StatusOr<std::map<std::string, double>> TrainStep(const Call& call,
                                                                  const TrainRequest& request) = 0;
};

}  // namespace tandem::trainer

#endif  // TANDEM_SERVICES_TRAINER_ENGINE_AUXILIARY_CRITIC_CONNECTION_H_
