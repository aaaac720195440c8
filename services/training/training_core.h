// A model in training, on its engine thread: what the engines of trainer and critic share. Each of
// them adds its loss.
#ifndef TANDEM_SERVICES_TRAINING_TRAINING_CORE_H_
#define TANDEM_SERVICES_TRAINING_TRAINING_CORE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/base/engine_thread.h"
#include "common/base/status_macros.h"
#include "common/model/model.h"
#include "common/model/ragged_batch.h"
#include "common/parallel/strategy.h"
#include "common/tandem/vocabulary.h"
#include "common/tensor/catch_torch_errors.h"
#include "common/training/micro_batches.h"
#include "common/training/sequence_check.h"
#include "services/training/engine.h"
#include "services/training/sequence_rows.h"

namespace tandem::training {

// What the model read in one pass, and the rows of its hidden states that enter the loss.
struct MicroBatchInput {
  const RaggedBatch& batch;
  std::vector<int64_t> positions = {};  // [N], rows of the hidden states
  std::vector<int64_t> labels = {};     // [N]
  size_t first_row = 0;                 // of these rows, among those of all sequences
  MicroBatch sequences = {};            // which of them they are
};

// What the model reads of some sequences, on its device.
RaggedBatch MakeBatch(absl::Span<const SequenceRows> sequences, at::Device device);

// The rows of the sequences that `batch` consists of.
MicroBatchInput SelectRows(const RaggedBatch& batch, absl::Span<const SequenceRows> sequences);

class TrainingCore {
 public:
  // Loads the model (blocks), where and as the options say. Metrics of the optimizer are reported
  // under `metric_prefix`. Another strategy than that of the options is for tests.
  static absl::StatusOr<std::unique_ptr<TrainingCore>> Create(
      const std::string& kind, const std::string& metric_prefix, const TrainingOptions& options,
      const LoadOptions& load, std::unique_ptr<parallel::Strategy> strategy = nullptr);
  ~TrainingCore() { Shutdown(); }

  // As training::Engine promises.
  EngineInfo Info() const;
  absl::Status Health() const { return thread_.Health(); }
  bool unsaved() const { return unsaved_; }
  absl::StatusOr<checkpoint::Saved> SaveCheckpoint(const CallScope& call,
                                                   const std::string& directory,
                                                   const std::string& name, int64_t keep);
  absl::Status LoadCheckpoint(const CallScope& call, const std::string& path);
  absl::Status LoadBaseModel(const CallScope& call);
  absl::Status ExportModel(const CallScope& call, const std::string& path, DType dtype);
  void Shutdown() { thread_.Shutdown(); }

  // Runs `body`, which returns a Status or StatusOr, in the call's turn, with weights whose digest
  // is known; what it throws becomes a Status that names `what`. DATA_LOSS after an update that
  // broke off, until a checkpoint or the base model is loaded.
  template <typename Body>
  auto Run(const CallScope& call, absl::string_view what, Body&& body) {
    return thread_.Run(call, [&] {
      return CatchTorchErrors(what, [&]() -> std::invoke_result_t<Body&> {
        TANDEM_RETURN_IF_ERROR(broken_);
        RefreshWeights();
        return body();
      });
    });
  }
  void NoteProgress() { thread_.NoteProgress(); }

  // What follows is for the engine thread.

  Model& model() { return strategy_->model(); }
  parallel::Strategy& strategy() { return *strategy_; }
  // Adds up over the ranks what a loss has counted: a loss::MetricReduction.
  auto reduction() {
    return [this](absl::Span<double> sums, absl::Span<double> maxima) {
      return strategy_->Reduce(sums, maxima);
    };
  }
  TrainingState& state() { return state_; }
  // Of the tokenizer.json beside the model; nullptr without one.
  const Vocabulary* vocabulary() const { return vocabulary_.has_value() ? &*vocabulary_ : nullptr; }
  SequenceLimits limits() const;
  WeightsVersion weights() const;

  // Leaves the gradients of one update with the strategy, and its reports.
  using UpdateGradients = std::function<absl::Status(StepReport& report)>;

  // Does a step once. `prepare` checks the batch and says what the gradients of each of its updates
  // are; it may mark the step as skipped instead. An update with a NotFiniteError, its own or the
  // optimizer's, is left out; without any update the step is skipped, with the message as the
  // reason. As soon as the last update is applied the step counts and its report is in the table of
  // done steps: a failure after that is repaired, now or by the next call, and a repeat gets the
  // report. An error before the first update changes nothing; after it, or as Run says: DATA_LOSS.
  absl::StatusOr<StepResult> Step(
      const StepIdentity& identity,
      absl::FunctionRef<absl::StatusOr<std::vector<UpdateGradients>>(StepReport& report)> prepare);

  // Runs the model over the sequences in micro-batches, between which the engine's progress is
  // noted, without gradients. Returns what `output` says of the rows of each, one after the other.
  using RowOutput = absl::FunctionRef<absl::StatusOr<std::vector<double>>(
      const MicroBatchInput& input, const at::Tensor& hidden)>;
  absl::StatusOr<std::vector<double>> Forward(absl::Span<const SequenceRows> sequences,
                                              RowOutput output);

  // The same of another model, whole on every rank.
  absl::StatusOr<std::vector<double>> ForwardFrozen(const Model& frozen,
                                                    absl::Span<const SequenceRows> sequences,
                                                    RowOutput output);

  // As Forward with gradients, which it leaves with the strategy; `loss` is a
  // parallel::LossFunction. Returns the number of micro-batches.
  using RowLoss = absl::FunctionRef<absl::StatusOr<at::Tensor>(const MicroBatchInput& input,
                                                               const at::Tensor& hidden)>;
  absl::StatusOr<int64_t> ForwardBackward(absl::Span<const SequenceRows> sequences, RowLoss loss);

 private:
  TrainingCore(std::string kind, std::string metric_prefix, const TrainingOptions& options);

  absl::Status Load(LoadOptions load, std::unique_ptr<parallel::Strategy> strategy);
  // Sequences, how they are cut, and the first row of each.
  struct Pass {
    absl::Span<const SequenceRows> sequences;
    std::vector<MicroBatch> micro_batches;
    std::vector<size_t> first_rows;

    int64_t count() const { return static_cast<int64_t>(micro_batches.size()); }
  };
  Pass PlanPass(absl::Span<const SequenceRows> sequences) const;
  RaggedBatch Input(const Pass& pass, int64_t micro_batch);
  static MicroBatchInput RowsOf(const Pass& pass, int64_t micro_batch, const RaggedBatch& batch);
  // Makes the updates and enters the report, which it completes. NotFiniteError when every one of
  // them was left out.
  absl::Status MakeUpdates(const StepIdentity& identity, absl::Span<const UpdateGradients> updates,
                           StepReport& report);
  // What the updates of a step have done so far.
  struct Updates {
    StepReport* entry = nullptr;  // in the table, from the first one on
    int64_t applied = 0;
    int64_t not_finite = 0;
    double grad_norm = 0;  // sum
    double learning_rate = 0;
    bool known = true;  // what the optimizer says
  };
  absl::Status MakeUpdate(const StepIdentity& identity, const UpdateGradients& gradients,
                          StepReport& report, Updates& updates);
  absl::Status ApplyUpdate(Updates& updates);
  void Report(const Updates& updates) const;
  // Puts weights and state in the place of those that are there. `load_optimizer` comes first; when
  // it fails, nothing has changed.
  absl::Status Replace(absl::string_view source, absl::FunctionRef<absl::Status()> load_optimizer,
                       const NamedTensors& weights, TrainingState state);
  // Brings what follows from weights that changed up to date: the model's copies, the digest.
  void RefreshWeights();
  void RecordWeights(std::string digest);

  const std::string metric_prefix_;
  const TrainingOptions options_;
  std::optional<Vocabulary> vocabulary_;
  std::string vocabulary_digest_;  // empty without one
  std::unique_ptr<parallel::Strategy> strategy_;
  TrainingState state_;
  bool copies_stale_ = false;    // the model has not been told of its last update
  bool weights_changed_ = true;  // since the digest was computed
  absl::Status broken_;          // why these weights are of no use
  std::atomic<bool> unsaved_ = false;

  mutable std::mutex info_mutex_;
  EngineInfo info_;

  EngineThread thread_;  // last: it uses everything above
};

// Implements, for an interface that extends training::Engine, what the core does.
template <typename Interface>
class CoreEngine : public Interface {
 public:
  EngineInfo Info() const final { return core_->Info(); }
  absl::Status Health() const final { return core_->Health(); }
  bool unsaved() const final { return core_->unsaved(); }
  absl::StatusOr<checkpoint::Saved> SaveCheckpoint(const CallScope& call,
                                                   const std::string& directory,
                                                   const std::string& name, int64_t keep) final {
    return core_->SaveCheckpoint(call, directory, name, keep);
  }
  absl::Status LoadCheckpoint(const CallScope& call, const std::string& path) final {
    return core_->LoadCheckpoint(call, path);
  }
  absl::Status LoadBaseModel(const CallScope& call) final { return core_->LoadBaseModel(call); }
  absl::Status ExportModel(const CallScope& call, const std::string& path, DType dtype) final {
    return core_->ExportModel(call, path, dtype);
  }
  void Shutdown() final { core_->Shutdown(); }

 protected:
  explicit CoreEngine(std::unique_ptr<TrainingCore> core) : core_(std::move(core)) {}

  const std::unique_ptr<TrainingCore> core_;
};

}  // namespace tandem::training

#endif  // TANDEM_SERVICES_TRAINING_TRAINING_CORE_H_
