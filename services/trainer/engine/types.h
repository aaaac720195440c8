// Options, requests and results of the trainer engine.
#ifndef TANDEM_SERVICES_TRAINER_ENGINE_TYPES_H_
#define TANDEM_SERVICES_TRAINER_ENGINE_TYPES_H_

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <variant>
#include <vector>

#include "common/base/files/paths/same_place.h"
#include "common/coauthoring/trajectory.h"
#include "common/optim/optimizer_options.h"
#include "common/parallel/strategy_options.h"
#include "common/speculator/speculator_settings.h"
#include "common/tensor/vision_reference.h"
#include "common/weights/weight_transfer.h"
#include "common/weights/weights_version.h"
#include "services/trainer/engine/steps/objective.h"
#include "services/training_core/engine.h"

namespace tandem::trainer {

using training::EngineInfo;
using training::StepReport;
using training::StepResult;

struct EngineOptions : training::TrainingOptions {
  std::string reference_model;  // empty: no KL to a reference
  std::string junior_model;     // empty: no KL to the junior over the vocabulary
  std::string teacher_model;    // empty: no distillation over the vocabulary
  // Implementation of the fused output loss (loss::ParseLossImpl).
  std::string loss_impl;
  int64_t logits_chunk_bytes = 0;  // 0: LogitsChunkBytes says
  // Without an adapter no speculator trains beside the model.
  speculator::SpeculatorSettings speculator;
  bool freeze_base_model = false;  // the speculator, which is there, trains alone
  OptimizerOptions speculator_optimizer = {};
  // The most bytes of this rank's GPU that its part of a copy of the weights for receivers with
  // GPUs may take; 0: such a copy is in a file.
  int64_t weights_copy_bytes = 0;
};

// A copy of the weights for publishing.
struct SnapshotRequest {
  // The types in which receivers want tensors, each set once; none: float32.
  std::vector<TensorTypes> receivers = {};
  // Whether receivers may read it in the memory of the trainer's GPUs.
  bool on_gpu = false;
};

// Returns `configured`, or the default for 0. With fewer rows at a time, reading and writing the
// gradient of a large output layer for each chunk costs more than its products.
constexpr int64_t LogitsChunkBytes(int64_t configured, int64_t vocab_size) {
  constexpr int64_t kRows = 256, kMinBytes = 48 << 20;
  if (configured > 0) return configured;
  return std::max(kMinBytes, kRows * vocab_size * static_cast<int64_t>(sizeof(float)));
}

// Whether a frozen model of the trainer is the one that its adapters adapt: it then computes with
// the same weights, without adapters. Ranks that hold only parts of the model load another one.
inline bool IsBaseModel(const std::string& directory, const std::string& model, bool adapts,
                        const parallel::StrategyOptions& strategy) {
  const bool whole =
      strategy.name == "single" || (strategy.name == "zero" && strategy.zero.stage < 3);
  return adapts && whole && !directory.empty() && SamePlace(directory, model);
}

// A teacher's distributions over the tokens of a response.
struct TeacherTokens {
  std::string name;      // in reports; may be empty
  TopTokens top_tokens;  // at each of the L places; none where the trainer's model is the teacher

  bool operator==(const TeacherTokens&) const = default;
};

struct PolicySample {
  Trajectory trajectory;
  std::string group_id;
  std::optional<double> reward;
  std::vector<float> advantages;          // [L] with kProvided
  std::vector<float> old_logprobs;        // [L] with OldLogprobs::kProvided
  std::vector<float> reference_logprobs;  // [L] with ReferenceLogprobs::kProvided
  TeacherTokens teacher;                  // with distillation

  bool operator==(const PolicySample&) const = default;
};

struct SupervisedSample {
  std::vector<int32_t> prompt_token_ids;
  std::vector<int32_t> response_token_ids;
  std::vector<VisionReference> vision_inputs = {};  // in the order of their tokens
  std::vector<float> weights = {};                  // [L], of any sign; empty: each is 1
  TeacherTokens teacher = {};                       // with distillation

  bool operator==(const SupervisedSample&) const = default;
};

struct PolicyBatch {
  PolicyObjective objective;
  std::vector<PolicySample> samples;

  bool operator==(const PolicyBatch&) const = default;
};

struct SupervisedBatch {
  SupervisedObjective objective;
  std::vector<SupervisedSample> samples;

  bool operator==(const SupervisedBatch&) const = default;
};

struct TrainStepRequest : training::StepIdentity {
  std::variant<PolicyBatch, SupervisedBatch> batch;
  Blobs blobs = {};                   // of the samples' images
  OptimizerOverrides optimizer = {};  // of the model's optimizer

  // Used by common/base/struct_bytes.h.
  using Base = training::StepIdentity;
  static constexpr auto kOwnFields =
      std::tuple(&TrainStepRequest::batch, &TrainStepRequest::blobs, &TrainStepRequest::optimizer);

  bool operator==(const TrainStepRequest&) const = default;
};

struct LogProbsRequest {
  std::vector<int32_t> prompt_token_ids;
  std::vector<int32_t> response_token_ids;
  double temperature = 1.0;
  std::vector<VisionReference> vision_inputs = {};  // in the order of their tokens
  Blobs blobs = {};                                 // their pixels
  bool reference = false;                           // of the reference policy

  bool operator==(const LogProbsRequest&) const = default;
};

// Requests that are evaluated together.
struct LogProbsBatch {
  std::vector<LogProbsRequest> requests;

  bool operator==(const LogProbsBatch&) const = default;
};

struct LogProbsResult {
  std::vector<float> logprobs;   // [L]
  std::vector<float> entropies;  // [L]
  WeightsVersion weights;        // empty for the reference policy
};

}  // namespace tandem::trainer

#endif  // TANDEM_SERVICES_TRAINER_ENGINE_TYPES_H_
