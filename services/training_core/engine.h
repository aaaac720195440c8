// The interface that the engines of trainer and critic share. Plain structs, no tensors, no gRPC.
//
// A multi-rank server has an engine on each rank. Rank 0's engine is called; the others follow it.
//
// Methods are thread-safe. Those that take a call wait for their turn on the engine thread. They
// return CANCELLED or DEADLINE_EXCEEDED, with nothing done, if the call ends before its turn, and
// UNAVAILABLE after Shutdown. The other methods never wait for a running step.
#ifndef TANDEM_SERVICES_TRAINING_CORE_ENGINE_H_
#define TANDEM_SERVICES_TRAINING_CORE_ENGINE_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/base/call_scope.h"
#include "common/base/files/paths/confined_folder.h"
#include "common/base/machine/rank_environment.h"
#include "common/checkpoint/checkpoint.h"
#include "common/kernels/weight_format.h"
#include "common/model/config/compute_options.h"
#include "common/model/config/lora.h"
#include "common/model/model_summary.h"
#include "common/optim/optimizer_options.h"
#include "common/parallel/strategy_options.h"
#include "common/ranks/monitor/rank_timeouts.h"
#include "common/steps/step_report.h"
#include "common/steps/training_state.h"
#include "common/tensor/dtype.h"
#include "common/weights/weights_version.h"
#include "services/training_core/router_sums.h"

namespace tandem::training {

// A checkpoint to write to directory/name.
struct SaveRequest {
  std::string directory, name;
  int64_t keep = 0;  // checkpoints of the run that stay in the directory; 0: all
  // The version to save. A server that was restarted has another one, and a call that is repeated
  // does not write its initial weights.
  std::optional<int64_t> expected_version = std::nullopt;
  std::string root = {};  // ConfinedPath::root of `directory`
  // Whether to return once the state is copied, with Saved::pending. A request for the same
  // checkpoint, with the same expected_version, then joins that save.
  bool in_background = false;
};

// A checkpoint that is written or has failed.
struct CheckpointReport {
  absl::StatusOr<checkpoint::Saved> saved;
  double held_seconds = 0;     // that other calls waited for it
  double written_seconds = 0;  // after that, beside other calls
};

// Hears of every checkpoint, on a thread of the engine of rank 0.
using CheckpointListener = std::function<void(const CheckpointReport& report)>;

// From the resolved configuration (services/training_core/service/training_config.h). A size of 0
// was not set, and is refused.
struct TrainingOptions {
  std::string model;  // Hugging Face directory
  parallel::StrategyOptions strategy;
  RankEnvironment environment;  // of this process among the ranks of the server
  ranks::RankTimeouts rank_timeouts;
  // The settings that must be equal on every rank, as lines of text.
  std::string configuration;
  OptimizerOptions optimizer = {};
  int64_t micro_batch_tokens = 0;
  // Whether common prefixes of consecutive sequences stand once in a micro-batch; only on the CPU,
  // and not with context parallelism.
  bool shared_prefixes = false;
  int64_t max_model_len = 0;
  int64_t max_samples = 0;
  std::vector<std::string> freeze;  // common/model/config/freeze.h
  LoraOptions lora = {};
  // The storage of the matrices that lora does not train, and of other frozen models beside the
  // trained one.
  kernels::WeightFormat weight_format = kernels::WeightFormat::kDense;
  RouterLossCoefficients router_losses = {};
  ComputeOptions compute = {};
  // Whether checkpoints are written beside the next calls, from a copy of the state.
  bool checkpoint_snapshot = true;
  CheckpointListener on_checkpoint = {};  // may be empty
};

// The optimizer's state after a checkpoint is loaded, as tandem.types.v1.OptimizerState.
enum class OptimizerState {
  kKeep,   // the checkpoint's
  kFresh,  // moments of 0, and the beginning of the schedule
};

// A checkpoint to load.
struct LoadRequest {
  std::string path;
  OptimizerState optimizer = OptimizerState::kKeep;
  std::string root = {};  // ConfinedPath::root of `path`

  ConfinedPath confined() const { return {path, root}; }
};

struct EngineInfo {
  ModelSummary model;
  WeightsVersion weights;
  // Updates since the schedule began; those of the companion where the model is frozen.
  int64_t optimizer_steps = 0;
  int64_t companion_updates = 0;  // since its own schedule began; 0 without a companion
  // Progress of the pass that runs over a batch; 0 while no pass runs.
  int64_t micro_batches = 0, micro_batches_done = 0;
};

// The results of a batch of requests, up to the first one that is refused.
template <typename Result>
struct BatchResults {
  std::vector<Result> results;
  absl::Status error;  // of request results.size(); OK if every request has a result
};

class Engine {
 public:
  virtual ~Engine() = default;

  // Returns the state after the last call that changed it, and how far a pass is.
  virtual EngineInfo Info() const = 0;

  // UNAVAILABLE if work waits or runs, and nothing has progressed for ten minutes, here or on
  // another rank. Each transfer of a file that is read or written is progress.
  virtual absl::Status Health() const = 0;

  // Writes a checkpoint atomically, and prunes older ones. With checkpoint_snapshot only the
  // copying of the state has a turn on the engine thread. One save runs at a time; other saves, and
  // loads, wait for it. FAILED_PRECONDITION, with nothing written, for another version than the
  // expected one; other errors as common/checkpoint/checkpoint.h says.
  virtual absl::StatusOr<checkpoint::Saved> SaveCheckpoint(const CallScope& call,
                                                           const SaveRequest& request) = 0;
  // Whether there is state that no checkpoint holds.
  virtual bool unsaved() const = 0;
  virtual absl::Status LoadCheckpoint(const CallScope& call, const LoadRequest& request) = 0;
  // Loads the model's files again: version 0, a new optimizer and an empty table of steps.
  // FAILED_PRECONDITION ("base_model") if the files have changed since the server started.
  virtual absl::Status LoadBaseModel(const CallScope& call) = 0;
  virtual absl::Status ExportModel(const CallScope& call, const ConfinedPath& path,
                                   DType dtype) = 0;

  // Ends the engine thread after the running command. On a rank other than 0 it waits until rank 0
  // shuts down.
  virtual void Shutdown() = 0;
  // Whether rank 0 has shut down, and this rank can stop.
  virtual bool ended() const = 0;
};

}  // namespace tandem::training

#endif  // TANDEM_SERVICES_TRAINING_CORE_ENGINE_H_
