// A model in training, on its engine thread: what the engines of trainer and critic share. Each of
// them adds its loss.
#ifndef TANDEM_SERVICES_TRAINING_TRAINING_CORE_H_
#define TANDEM_SERVICES_TRAINING_TRAINING_CORE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/base/engine_thread.h"
#include "common/base/status_macros.h"
#include "common/base/struct_bytes.h"
#include "common/model/model.h"
#include "common/model/ragged_batch.h"
#include "common/parallel/server_ranks.h"
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
  // Joins the other ranks and loads the model (blocks), where and as the options say. Metrics of
  // the optimizer are reported under `metric_prefix`. Another strategy than that of the options is
  // for tests. FAILED_PRECONDITION if the ranks have other configurations or model files.
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
                                                   const std::string& name, int64_t keep) {
    return save_checkpoint_(call, {.directory = directory, .name = name, .keep = keep});
  }
  absl::Status LoadCheckpoint(const CallScope& call, const std::string& path) {
    return load_checkpoint_(call, path);
  }
  absl::Status LoadBaseModel(const CallScope& call) { return load_base_model_(call, {}); }
  absl::Status ExportModel(const CallScope& call, const std::string& path, DType dtype) {
    return export_model_(call, {.path = path, .dtype = dtype});
  }
  void Shutdown();
  bool ended() const { return ended_; }

  // What an engine does for a call. Every rank does it, rank 0 in the call's turn: `body` runs on
  // the engine thread, and must do the same everywhere. What it wants of the world outside, it gets
  // by FromRankZero; the call is rank 0's. Its result is a Status or StatusOr.
  template <typename Request, typename Result>
  using Command = std::function<Result(const CallScope& call, const Request& request)>;
  // Of a command that is its name alone.
  struct NoRequest {};

  // What a command needs before it runs.
  enum class Needs {
    kNothing,
    // Weights whose digest is known. DATA_LOSS after an update that broke off, until a checkpoint
    // or the base model is loaded.
    kWeights,
  };

  // Returns what runs the command; what `body` throws becomes a Status that names it. All commands
  // are added before Start.
  template <typename Request, typename Result>
  Command<Request, Result> AddCommand(const std::string& name, Command<Request, Result> body,
                                      Needs needs = Needs::kWeights) {
    const auto execute = [this, name, body = std::move(body), needs](
                             const CallScope& call, const Request& request) -> Result {
      Result result = CatchTorchErrors(name, [&]() -> Result {
        if (needs == Needs::kWeights) TANDEM_RETURN_IF_ERROR(PrepareWeights());
        return body(call, request);
      });
      CheckSameOutcome(name, ToStatus(result));
      return result;
    };
    commands_[name] = [execute](const CallScope& call, const std::string& bytes) -> absl::Status {
      TANDEM_ASSIGN_OR_RETURN(const Request request, FromBytes<Request>(bytes));
      (void)execute(call, request);  // rank 0 answers
      return absl::OkStatus();
    };
    return [this, name, execute](const CallScope& call, const Request& request) {
      return thread_.Run(call, [&]() -> Result {
        if (ranks_->size() > 1) {
          ranks_->Announce(
              {.name = name, .request_id = call.request_id, .request = ToBytes(request)});
        }
        return execute(call, request);
      });
    };
  }
  // Ranks other than 0 do from now on what rank 0 does.
  void Start();

  // Runs `body` on the engine thread while the engine is being made: on every rank, with one
  // result.
  absl::Status Together(absl::string_view what, absl::FunctionRef<absl::Status()> body);
  void NoteProgress() { thread_.NoteProgress(); }

  // What follows is for the engine thread.

  // What `ask` returns on rank 0, where alone it runs, however long.
  template <typename T>
  absl::StatusOr<T> FromRankZero(absl::FunctionRef<absl::StatusOr<T>()> ask) {
    return ranks_->FromRankZero<T>(ask);
  }
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

  static absl::Status ToStatus(const absl::Status& status) { return status; }
  template <typename T>
  static absl::Status ToStatus(const absl::StatusOr<T>& result) {
    return result.status();
  }
  void AddCommands();
  absl::Status ReadCheckpoint(const std::string& path);
  absl::Status ReadBaseModel();
  absl::Status PrepareWeights();
  // Ends all ranks when they have gone different ways.
  void CheckSameOutcome(const std::string& command, const absl::Status& status);
  // The life of the thread that waits for commands of rank 0.
  void Follow();

  absl::Status Load(LoadOptions load, std::unique_ptr<parallel::Strategy> strategy);
  absl::Status LoadModel(const LoadOptions& load);
  absl::Status OnEveryRank(absl::string_view what, absl::FunctionRef<absl::Status()> body);
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
  absl::Status RefreshWeights();
  void RecordWeights(std::string digest);

  const std::string metric_prefix_;
  const TrainingOptions options_;
  std::shared_ptr<parallel::ServerRanks> ranks_;
  // Errors are of the request's bytes alone.
  std::map<std::string, std::function<absl::Status(const CallScope&, const std::string& request)>>
      commands_;
  struct SaveRequest {
    std::string directory, name;
    int64_t keep = 0;
  };
  struct ExportRequest {
    std::string path;
    DType dtype = DType::kFloat32;
  };
  Command<SaveRequest, absl::StatusOr<checkpoint::Saved>> save_checkpoint_;
  Command<std::string, absl::Status> load_checkpoint_;
  Command<NoRequest, absl::Status> load_base_model_;
  Command<ExportRequest, absl::Status> export_model_;
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

  EngineThread thread_;  // it uses everything above
  bool started_ = false;
  std::atomic<bool> ended_ = false;
  std::once_flag shut_down_;
  std::thread follower_;  // of a rank other than 0; last: it uses the engine thread
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
  bool ended() const final { return core_->ended(); }

 protected:
  explicit CoreEngine(std::unique_ptr<TrainingCore> core) : core_(std::move(core)) {}

  const std::unique_ptr<TrainingCore> core_;
};

}  // namespace tandem::training

#endif  // TANDEM_SERVICES_TRAINING_TRAINING_CORE_H_
