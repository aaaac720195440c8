// The trainer engine: GRPO-family and supervised training of the senior. Plain structs, no tensors,
// no gRPC. Methods block and are serialised by the engine; they are thread-safe.
#ifndef TANDEM_SERVICES_TRAINER_ENGINE_ENGINE_H_
#define TANDEM_SERVICES_TRAINER_ENGINE_ENGINE_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/weights_version.h"
#include "common/checkpoint/checkpoint.h"
#include "common/loss/loss_scale.h"
#include "common/loss/policy_loss.h"
#include "common/model/model_summary.h"
#include "common/tandem/trajectory.h"
#include "common/tensor/dtype.h"
#include "common/tensor/weight_transfer.h"
#include "common/training/optimizer_options.h"

namespace tandem::trainer {

struct EngineOptions {
  std::string model;            // Hugging Face directory of the senior
  std::string reference_model;  // empty: no KL to a reference
  OptimizerOptions optimizer;
  int64_t micro_batch_tokens = 2048;
  int64_t logits_chunk_bytes = 64 << 20;
  int64_t max_model_len = 2048;
  int64_t max_samples = 4096;
  int num_threads = 0;  // 0: physical cores
};

enum class AdvantageEstimator {
  kGroupRelative,
  kGroupRelativeNoStd,
  kLeaveOneOut,
  kGae,
  kProvided,
};

enum class OldLogprobs {
  kSenior,      // the senior's, as recorded
  kAuthor,      // the writer's, as recorded
  kRecomputed,  // the trainer's own before the update: ratio 1
  kProvided,    // with each sample
};

struct PolicyObjective {
  loss::PolicyLossOptions loss;
  double junior_token_loss_weight = 0.0;
  OldLogprobs old_logprobs = OldLogprobs::kSenior;
  AdvantageEstimator advantage_estimator = AdvantageEstimator::kGroupRelative;
  loss::LossScaleOptions scale;
  double junior_kl_coefficient = 0.0;  // lambda_jun; above 0 is UNIMPLEMENTED
  double gae_gamma = 1.0;
  double gae_lambda = 1.0;
  bool bootstrap_truncated = false;
  bool whiten_advantages = false;
  int64_t max_staleness = 0;
};

struct PolicySample {
  Trajectory trajectory;
  std::string group_id;
  std::optional<double> reward;
  std::vector<float> advantages;    // [L] with kProvided
  std::vector<float> old_logprobs;  // [L] with OldLogprobs::kProvided
};

struct SupervisedObjective {
  loss::Aggregation aggregation = loss::Aggregation::kTokenMean;
};

struct SupervisedSample {
  std::vector<int32_t> prompt_token_ids;
  std::vector<int32_t> response_token_ids;
};

struct PolicyBatch {
  PolicyObjective objective;
  std::vector<PolicySample> samples;
};

struct SupervisedBatch {
  SupervisedObjective objective;
  std::vector<SupervisedSample> samples;
};

struct TrainStepRequest {
  std::string run_id;
  int64_t step = 0;
  std::string request_id;
  int64_t expected_version = 0;
  std::variant<PolicyBatch, SupervisedBatch> batch;
};

struct StepReport {
  std::string run_id;
  int64_t step = 0;
  WeightsVersion weights;  // after the step
  bool skipped = false;
  std::string skip_reason;
  std::map<std::string, double> metrics;  // docs/metrics.md
};

struct TrainStepResult {
  StepReport report;
  bool replayed = false;  // the reply comes from the table of done requests
};

// The critic as the trainer sees it; the service implements it over gRPC.
class CriticConnection {
 public:
  struct Sequence {
    std::vector<int32_t> prompt_token_ids;
    std::vector<int32_t> response_token_ids;
  };
  struct Values {
    std::vector<std::vector<float>> values;  // [S][L]
    std::vector<float> final_values;         // [S]
    WeightsVersion weights;                  // the critic's
  };
  struct TrainRequest {
    std::string run_id;
    int64_t step = 0;
    std::string request_id;
    int64_t expected_version = 0;
    std::vector<Sequence> sequences;
    std::vector<std::vector<float>> old_values;  // [S][L]
    std::vector<std::vector<float>> returns;     // [S][L]
  };
  virtual ~CriticConnection() = default;
  virtual absl::StatusOr<Values> ComputeValues(const std::vector<Sequence>& sequences) = 0;
  // Returns the critic's metrics ("critic/loss", ...).
  virtual absl::StatusOr<std::map<std::string, double>> TrainStep(const TrainRequest& request) = 0;
};

struct LogProbsRequest {
  std::vector<int32_t> prompt_token_ids;
  std::vector<int32_t> response_token_ids;
  double temperature = 1.0;
};

struct LogProbsResult {
  std::vector<float> logprobs;   // [L]
  std::vector<float> entropies;  // [L]
  WeightsVersion weights;
};

struct EngineInfo {
  ModelSummary model;
  WeightsVersion weights;
  int64_t optimizer_steps = 0;
  int64_t micro_batch_tokens = 0;
};

class Engine {
 public:
  virtual ~Engine() = default;

  // As of the last call that changed it: never waits for a running one.
  virtual EngineInfo Info() const = 0;

  // One optimizer update over the whole batch. Fails closed, with nothing changed here (with GAE
  // the critic may have learnt the step; a repeat finds that out): INVALID_ARGUMENT with the
  // field's path ("samples[3].trajectory.authorship_mask", "policy.kl_coefficient", "run_id"),
  // OUT_OF_RANGE too long, FAILED_PRECONDITION (reasons STALE_POLICY_VERSION, TRAJECTORY_TOO_OLD,
  // UNKNOWN_POLICY_VERSION, NO_CRITIC, NO_REFERENCE_MODEL), ALREADY_EXISTS (reason
  // REQUEST_ID_REUSED), UNIMPLEMENTED, INTERNAL for a loss or gradient that is not finite.
  virtual absl::StatusOr<TrainStepResult> TrainStep(const TrainStepRequest& request) = 0;

  virtual absl::StatusOr<LogProbsResult> ComputeLogProbs(const LogProbsRequest& request) = 0;

  // A copy of the current weights, for publishing.
  virtual absl::StatusOr<std::shared_ptr<const WeightSource>> Snapshot() = 0;

  // Writes directory/name atomically; keeps the newest `keep` step directories (0: all).
  virtual absl::StatusOr<checkpoint::Saved> SaveCheckpoint(const std::string& directory,
                                                           const std::string& name,
                                                           int64_t keep) = 0;
  virtual absl::Status LoadCheckpoint(const std::string& path) = 0;
  virtual absl::Status ExportModel(const std::string& path, DType dtype) = 0;
};

// Loads the model (blocks). `critic` may be null: GAE is then refused.
absl::StatusOr<std::unique_ptr<Engine>> CreateEngine(const EngineOptions& options,
                                                     std::shared_ptr<CriticConnection> critic);

}  // namespace tandem::trainer

#endif  // TANDEM_SERVICES_TRAINER_ENGINE_ENGINE_H_
