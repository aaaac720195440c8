// A model in training on its engine thread: the base of the engines of trainer and critic, which
// add their losses.
#ifndef TANDEM_SERVICES_TRAINING_CORE_TRAINING_CORE_H_
#define TANDEM_SERVICES_TRAINING_CORE_TRAINING_CORE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
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
#include "common/base/errors/memory_error.h"
#include "common/base/errors/status_macros.h"
#include "common/base/files/paths/confined_folder.h"
#include "common/coauthoring/vocabulary.h"
#include "common/model/model.h"
#include "common/model/passes/ragged_batch.h"
#include "common/model/passes/router_losses.h"
#include "common/parallel/strategy.h"
#include "common/ranks/command_table.h"
#include "common/ranks/server_ranks.h"
#include "common/steps/micro_batches.h"
#include "common/steps/sequence_check.h"
#include "common/tensor/aten/catch_torch_errors.h"
#include "services/training_core/checkpoint_writer.h"
#include "services/training_core/companion.h"
#include "services/training_core/engine.h"
#include "services/training_core/memory_settings.h"
#include "services/training_core/router_sums.h"
#include "services/training_core/sequence_rows.h"

namespace tandem::training {

// The input of one pass, and the rows of its hidden states that enter the loss.
struct MicroBatchInput {
  const RaggedBatch& batch;
  std::vector<int64_t> positions = {};  // [N], of the rows among the hidden states
  std::vector<int64_t> labels = {};     // [N]
  MicroBatch sequences = {};            // the sequences of the pass, in their SequenceBatch
  RowRange rows = {};                   // the N rows, in the same SequenceBatch
};

// Returns the rows of the sequences `range` of `sequences`. `batch` holds those of them that have
// an input.
MicroBatchInput SelectRows(const RaggedBatch& batch, const SequenceBatch& sequences,
                           const SequenceRange& range);

class TrainingCore {
 public:
  // Joins the other ranks and loads the model; blocks. Metrics of the optimizer are reported under
  // `metric_prefix`. Tests give a `strategy` in place of the one in the options.
  // FAILED_PRECONDITION if configurations or model files of the ranks differ.
  static absl::StatusOr<std::unique_ptr<TrainingCore>> Create(
      const std::string& kind, const std::string& metric_prefix, const TrainingOptions& options,
      const LoadOptions& load, std::unique_ptr<parallel::Strategy> strategy = nullptr);
  ~TrainingCore() { Shutdown(); }

  // As in training::Engine.
  EngineInfo Info() const;
  absl::Status Health();
  bool unsaved() const { return changes_ != saved_changes_; }
  absl::StatusOr<checkpoint::Saved> SaveCheckpoint(const CallScope& call,
                                                   const SaveRequest& request);
  absl::Status LoadCheckpoint(const CallScope& call, const LoadRequest& request) {
    return WithoutSaves(call, [&] { return load_checkpoint_(call, request); });
  }
  absl::Status LoadBaseModel(const CallScope& call) {
    return WithoutSaves(call, [&] { return load_base_model_(call, {}); });
  }
  absl::Status ExportModel(const CallScope& call, const ConfinedPath& path, DType dtype) {
    return export_model_(call, {.path = path.path, .root = path.root, .dtype = dtype});
  }
  void Shutdown();
  bool ended() const { return ended_; }

  // The body of a command, which an engine runs for a call. Every rank runs it on its engine
  // thread, rank 0 in the call's turn, and it must do the same on every rank: it asks the world
  // outside through FromRankZero alone. `call` is rank 0's. The result is a Status or StatusOr.
  template <typename Request, typename Result>
  using Command = std::function<Result(const CallScope& call, const Request& request)>;
  // The request of a command that has no arguments.
  struct NoRequest {};

  // The state that a command needs.
  enum class Needs {
    kNothing,
    // Weights; their digest may not be known. DATA_LOSS after an update that broke off, until a
    // checkpoint or the base model is loaded.
    kWeights,
    // The same, and their digest, to which every rank contributes the values that it answers for.
    kDigest,
  };

  // Returns what runs the command; what `body` throws becomes a Status that names it. All commands
  // are added before Start.
  template <typename Request, typename Result>
  Command<Request, Result> AddCommand(const std::string& name, Command<Request, Result> body,
                                      Needs needs = Needs::kDigest) {
    const auto execute = [this, name, body = std::move(body), needs](
                             const CallScope& call, const Request& request) -> Result {
      Result result = CatchTorchErrors(name, [&]() -> Result {
        if (needs != Needs::kNothing) TANDEM_RETURN_IF_ERROR(PrepareWeights());
        if (needs == Needs::kDigest) TANDEM_RETURN_IF_ERROR(PrepareDigest());
        return body(call, request);
      });
      micro_batches_ = micro_batches_done_ = 0;
      if (absl::Status status = ToStatus(result); !status.ok()) {
        result = NameMemorySettings(std::move(status), kMemorySettings);
      }
      CheckSameOutcome(name, ToStatus(result));
      return result;
    };
    commands_.Add<Request>(
        name, [execute](const std::string& request_id, const Request& request) -> absl::Status {
          CallScope call;
          call.request_id = request_id;
          (void)execute(call, request);  // rank 0 answers
          return absl::OkStatus();
        });
    return [this, name, execute](const CallScope& call, const Request& request) {
      return thread_.Run(call, [&]() -> Result {
        ranks_->Announce(name, call.request_id, request);
        return execute(call, request);
      });
    };
  }
  // Lets ranks other than 0 execute the commands of rank 0, until rank 0 shuts down.
  void Start();

  // Sets a model that trains, is saved and is loaded with the core's; before Start. It must live
  // until Shutdown.
  void SetCompanion(Companion* companion) { companion_ = companion; }

  // Runs `body` on the engine thread of every rank, before Start. An error of one rank is the
  // result on all ranks.
  absl::Status OnAllRanks(absl::string_view what, absl::FunctionRef<absl::Status()> body);
  // Returns FAILED_PRECONDITION if `what` has another value on another rank; before Start.
  absl::Status CheckSameOnAllRanks(absl::string_view what, const std::string& value) {
    return thread_.Run({}, [&] { return ranks_->CheckSame(what, value); });
  }
  void NoteProgress() { thread_.NoteProgress(); }

  // The methods below are called on the engine thread.

  // Runs `ask` on rank 0 alone, however long it takes, and returns its result on every rank.
  template <typename T>
  absl::StatusOr<T> FromRankZero(absl::FunctionRef<absl::StatusOr<T>()> ask) {
    return ranks_->FromRankZero<T>(ask);
  }
  Model& model() { return strategy_->model(); }
  // Whether the model is frozen (LoadOptions::freeze_all): the companion trains alone. The strategy
  // then has no optimizer: it runs Forward, and no ForwardBackward.
  bool frozen() const { return strategy_->model().num_trainable_parameters() == 0; }
  parallel::Strategy& strategy() { return *strategy_; }
  // Returns the loss::MetricReduction over the ranks.
  auto reduction() {
    return [this](absl::Span<double> sums, absl::Span<double> maxima) {
      return strategy_->Reduce(sums, maxima);
    };
  }
  const RouterLossCoefficients& router_losses() const { return options_.router_losses; }
  TrainingState& state() { return state_; }
  // Returns the vocabulary of the tokenizer.json beside the model, or nullptr without one.
  const Vocabulary* vocabulary() const { return vocabulary_.has_value() ? &*vocabulary_ : nullptr; }
  SequenceLimits limits() const;
  // Computes the digest of the weights, unless it is known. Collective.
  absl::Status PrepareDigest();
  // MakePromptImages for the model.
  absl::StatusOr<std::shared_ptr<const PromptImages>> ImagesOf(
      absl::Span<const int32_t> prompt, absl::Span<const int32_t> response,
      absl::Span<const VisionReference> references, const Blobs& blobs);
  // The digest is empty while it is not known (PrepareDigest).
  WeightsVersion weights() const;

  // Leaves the gradients of one update with the strategy, or with the companion alone where the
  // model is frozen, and adds its metrics to the report.
  using UpdateGradients = std::function<absl::Status(StepReport& report)>;

  // Does a step exactly once. `prepare` checks the batch and returns its updates, or marks the step
  // as skipped. An update with a NotFiniteError, its own or the optimizer's, is left out; if all
  // are, the step is skipped with that message as its reason. Once the last update is applied, the
  // step counts and its report is in the table of done steps: a later failure is repaired, now or
  // by the next call, and a repeat gets the report. An error before the first update changes
  // nothing; an error after it is DATA_LOSS. All updates of the model are made with `overrides`.
  absl::StatusOr<StepResult> Step(
      const StepIdentity& identity,
      absl::FunctionRef<absl::StatusOr<std::vector<UpdateGradients>>(StepReport& report)> prepare,
      const OptimizerOverrides& overrides = {});

  // Runs the model over the sequences in micro-batches, without gradients; health sees progress
  // after each. Returns the results of `output`, which is called once for each micro-batch, one
  // after the other.
  using RowOutput = absl::FunctionRef<absl::StatusOr<std::vector<double>>(
      const MicroBatchInput& input, const at::Tensor& hidden)>;
  absl::StatusOr<std::vector<double>> Forward(const SequenceBatch& sequences, RowOutput output);

  // Runs another model, which every rank holds whole, as Forward does; its own routers choose.
  absl::StatusOr<std::vector<double>> ForwardFrozen(const Model& frozen,
                                                    const SequenceBatch& sequences,
                                                    RowOutput output);

  // Runs the model over the sequences `range` in micro-batches, and leaves the gradients of `loss`,
  // a parallel::LossFunction, and of the routers' losses with the strategy.
  struct PassReport {
    int64_t micro_batches = 0;
    // The fraction of the sequences' tokens that the model did not read, since a sequence before
    // has the same; nothing where prefixes are not shared.
    std::optional<double> shared_fraction = std::nullopt;
    RouterSums routers = {};
  };
  using RowLoss = absl::FunctionRef<absl::StatusOr<at::Tensor>(const MicroBatchInput& input,
                                                               const at::Tensor& hidden)>;
  absl::StatusOr<PassReport> ForwardBackward(const SequenceBatch& sequences,
                                             const SequenceRange& range, RowLoss loss);

 private:
  TrainingCore(std::string kind, std::string metric_prefix, const TrainingOptions& options);

  static absl::Status ToStatus(const absl::Status& status) { return status; }
  template <typename T>
  static absl::Status ToStatus(const absl::StatusOr<T>& result) {
    return result.status();
  }
  void AddCommands();
  // Runs `body` while no checkpoint is being written.
  absl::Status WithoutSaves(const CallScope& call, absl::FunctionRef<absl::Status()> body);
  // The command of SaveCheckpoint, which starts the save or, without checkpoint_snapshot, makes it.
  absl::StatusOr<checkpoint::Saved> StartCheckpoint(const SaveRequest& request);
  absl::Status ReadCheckpoint(const LoadRequest& request);
  absl::Status ReadBaseModel();
  absl::Status PrepareWeights();
  // Ends all ranks if their outcomes differ.
  void CheckSameOutcome(const std::string& command, const absl::Status& status);
  // Runs on a thread of its own, and executes the commands of rank 0.
  void Follow();

  absl::Status Load(LoadOptions load, std::unique_ptr<parallel::Strategy> strategy);
  absl::Status LoadModel(LoadOptions load);
  absl::Status RunAndAgree(absl::string_view what, absl::FunctionRef<absl::Status()> body);
  // Sequences of a batch, cut into micro-batches.
  struct Pass {
    const SequenceBatch& sequences;
    std::vector<MicroBatch> micro_batches;
    // CommonPrefixes of the sequences; empty: they share no prefix.
    std::vector<int64_t> shared;

    int64_t count() const { return static_cast<int64_t>(micro_batches.size()); }
    // Numbers of tokens of the sequences, and of those that stand for one of a sequence before.
    int64_t num_tokens() const;
    int64_t num_shared_tokens() const;
    // Returns the sequences of a micro-batch that the model reads, and where their own rows start.
    struct Input {
      std::vector<const SequenceRows*> sequences;
      std::vector<int64_t> starts;
    };
    Input InputOf(const MicroBatch& micro_batch) const;
  };
  Pass PlanPass(const SequenceBatch& sequences, const SequenceRange& range) const;
  // Returns the input of a micro-batch, with SequenceRows::routed_experts where `replays`.
  RaggedBatch Input(const Pass& pass, int64_t micro_batch, bool replays);
  // Returns BatchRouting::given of the `rows` rows of a batch; undefined if no sequence has routed
  // experts.
  at::Tensor RoutedExpertsOf(const Pass::Input& input, int64_t rows);
  static MicroBatchInput RowsOf(const Pass& pass, int64_t micro_batch, const RaggedBatch& batch);
  // Returns the sums over all ranks of what the routers recorded on this one.
  RouterSums SumOfRouters(absl::Span<const std::shared_ptr<RouterLosses>> recorded);
  // Makes the updates, completes the report and records it. NotFiniteError if every update was left
  // out.
  absl::Status MakeUpdates(const StepIdentity& identity, absl::Span<const UpdateGradients> updates,
                           const OptimizerOverrides& overrides, StepReport& report);
  // The updates of a step so far.
  struct Updates {
    OptimizerOverrides overrides = {};
    StepReport* entry = nullptr;  // in the table of done steps, from the first update on
    int64_t applied = 0;
    int64_t not_finite = 0;
    double grad_norm = 0;  // sum
    double learning_rate = 0;
    bool known = true;  // whether norm and rate of every update are known
  };
  absl::Status MakeUpdate(const StepIdentity& identity, const UpdateGradients& gradients,
                          StepReport& report, Updates& updates);
  absl::Status ApplyUpdate(Updates& updates);
  // Makes the update of the companion, beside a model that is frozen.
  absl::Status ApplyCompanionUpdate(Updates& updates);
  void Report(const Updates& updates) const;
  absl::Status UpdateCompanion();
  // Replaces weights and state, and the companion's by those that it has read. `load_optimizer`
  // runs first; if it fails, nothing has changed.
  absl::Status Replace(absl::string_view source, absl::FunctionRef<absl::Status()> load_optimizer,
                       const NamedTensors& weights, TrainingState state);
  // Publishes the state after a step, with the digest of the weights unless that can wait.
  absl::Status PublishState(bool defer_digest);
  // Publishes the state; `digest` may be empty.
  void RecordWeights(std::string digest);
  // Number of updates of the model, or of the companion where the model is frozen.
  int64_t optimizer_steps() const;

  const std::string metric_prefix_;
  const TrainingOptions options_;
  std::shared_ptr<ranks::ServerRanks> ranks_;
  ranks::CommandTable commands_;
  struct ExportRequest {
    std::string path, root;
    DType dtype = DType::kFloat32;
  };
  Command<SaveRequest, absl::StatusOr<checkpoint::Saved>> save_checkpoint_;
  Command<LoadRequest, absl::Status> load_checkpoint_;
  Command<NoRequest, absl::Status> load_base_model_;
  Command<ExportRequest, absl::Status> export_model_;
  std::optional<Vocabulary> vocabulary_;
  std::string vocabulary_digest_;  // empty without one
  std::string base_digest_;        // of the base model's weights
  std::unique_ptr<parallel::Strategy> strategy_;
  Companion* companion_ = nullptr;
  bool companion_intact_ = true;  // false from an update or a load that broke off, to the next load
  TrainingState state_;
  bool copies_stale_ = false;  // the model's copies of its weights lack the last update
  bool digest_known_ = false;  // of the weights
  TensorSums frozen_sums_;     // see ParametersDigest
  absl::Status broken_;        // why the weights cannot be used; OK: they can
  // Number of changes of the state, and of those that a checkpoint or a load covers.
  std::atomic<int64_t> changes_ = 0, saved_changes_ = 0;
  std::atomic<int64_t> micro_batches_ = 0, micro_batches_done_ = 0;  // of the pass that runs

  mutable std::mutex info_mutex_;
  EngineInfo info_;

  TensorCopies save_copies_;                         // what the writer writes
  std::shared_ptr<ranks::Communicator> save_ranks_;  // where the ranks' writers meet
  CheckpointWriter writer_;
  EngineThread thread_;                          // uses everything above
  std::atomic<int64_t> progress_of_others_ = 0;  // as Health saw it last
  bool started_ = false;
  std::atomic<bool> ended_ = false;
  std::once_flag shut_down_;
  std::thread follower_;  // on a rank other than 0; last, as it uses the engine thread
};

// Implements the methods of training::Engine, for an interface that extends it, with the core.
template <typename Interface>
class CoreEngine : public Interface {
 public:
  EngineInfo Info() const final { return core_->Info(); }
  absl::Status Health() const final { return core_->Health(); }
  bool unsaved() const final { return core_->unsaved(); }
  absl::StatusOr<checkpoint::Saved> SaveCheckpoint(const CallScope& call,
                                                   const SaveRequest& request) final {
    return core_->SaveCheckpoint(call, request);
  }
  absl::Status LoadCheckpoint(const CallScope& call, const LoadRequest& request) final {
    return core_->LoadCheckpoint(call, request);
  }
  absl::Status LoadBaseModel(const CallScope& call) final { return core_->LoadBaseModel(call); }
  absl::Status ExportModel(const CallScope& call, const ConfinedPath& path, DType dtype) final {
    return core_->ExportModel(call, path, dtype);
  }
  void Shutdown() final { core_->Shutdown(); }
  bool ended() const final { return core_->ended(); }

 protected:
  explicit CoreEngine(std::unique_ptr<TrainingCore> core) : core_(std::move(core)) {}

  const std::unique_ptr<TrainingCore> core_;
};

}  // namespace tandem::training

#endif  // TANDEM_SERVICES_TRAINING_CORE_TRAINING_CORE_H_
