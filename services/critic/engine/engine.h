// The critic engine: a value head on any model. Plain structs, no tensors, no gRPC. Methods block
// and are serialised by the engine; they are thread-safe.
#ifndef TANDEM_SERVICES_CRITIC_ENGINE_ENGINE_H_
#define TANDEM_SERVICES_CRITIC_ENGINE_ENGINE_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/weights_version.h"
#include "common/checkpoint/checkpoint.h"
#include "common/model/model_summary.h"
#include "common/tensor/dtype.h"
#include "common/training/optimizer_options.h"

namespace tandem::critic {

struct EngineOptions {
  std::string model;  // Hugging Face directory, with or without a value head
  bool untie_embeddings = false;
  uint64_t value_head_seed = 0;
  OptimizerOptions optimizer;
  int64_t micro_batch_tokens = 2048;
  int64_t max_model_len = 2048;
  int64_t max_samples = 4096;
  int num_threads = 0;  // 0: physical cores
};

struct ValuesRequest {
  std::vector<int32_t> prompt_token_ids;
  std::vector<int32_t> response_token_ids;
};

struct ValuesResult {
  std::vector<float> values;  // [L]: value t is predicted from the state before response token t
  float final_value = 0;      // after the last token
  WeightsVersion weights;
};

struct ValueSample {
  std::vector<int32_t> prompt_token_ids;
  std::vector<int32_t> response_token_ids;
  std::vector<float> old_values;   // [L]
  std::vector<float> returns;      // [L]
  std::vector<uint8_t> loss_mask;  // [L], or empty for all
};

struct TrainStepRequest {
  std::string run_id;
  int64_t step = 0;
  std::string request_id;
  int64_t expected_version = 0;
  double value_clip = 0.2;
  std::vector<ValueSample> samples;
};

struct TrainStepResult {
  int64_t step = 0;
  WeightsVersion weights;  // after the step
  std::map<std::string, double> metrics;
  bool replayed = false;
};

struct EngineInfo {
  ModelSummary model;
  WeightsVersion weights;
  int64_t optimizer_steps = 0;
  bool value_head_from_checkpoint = false;  // else drawn from the seed
};

class Engine {
 public:
  virtual ~Engine() = default;

  // As of the last call that changed it: never waits for a running one.
  virtual EngineInfo Info() const = 0;

  // Value t comes from hidden state prompt + t - 1 (forward_func_values: output[:, :-1]).
  virtual absl::StatusOr<ValuesResult> ComputeValues(const ValuesRequest& request) = 0;

  // One optimizer update over the whole batch; errors, fencing and replay as in the trainer's
  // engine, with paths from "samples[i]." on.
  virtual absl::StatusOr<TrainStepResult> TrainStep(const TrainStepRequest& request) = 0;

  virtual absl::StatusOr<checkpoint::Saved> SaveCheckpoint(const std::string& directory,
                                                           const std::string& name,
                                                           int64_t keep) = 0;
  virtual absl::Status LoadCheckpoint(const std::string& path) = 0;
  virtual absl::Status ExportModel(const std::string& path, DType dtype) = 0;
};

// Loads the model (blocks).
absl::StatusOr<std::unique_ptr<Engine>> CreateEngine(const EngineOptions& options);

}  // namespace tandem::critic

#endif  // TANDEM_SERVICES_CRITIC_ENGINE_ENGINE_H_
