#include "services/training_core/training_core.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "common/base/errors/error.h"
#include "common/base/errors/not_finite.h"
#include "common/base/errors/status_macros.h"
#include "common/base/logging.h"
#include "common/base/steady_time.h"
#include "common/model/compute_setup.h"
#include "common/model/vision/image_batch.h"
#include "common/ops/attention/shared_prefixes.h"
#include "common/parallel/create_strategy.h"
#include "common/parallel/whole_parameters.h"
#include "common/ranks/rank_agreement.h"
#include "common/tensor/aten/device_copies.h"
#include "services/training_core/training_checkpoint.h"

namespace tandem::training {
namespace {

// Longer than a micro-batch of a large model, or the critic's step that a trainer waits for, takes
// on a small machine.
constexpr absl::Duration kStallLimit = absl::Minutes(10);

double SecondsSince(SteadyTime time) { return absl::ToDoubleSeconds(SteadyTime::Now() - time); }

std::vector<double> Concatenated(const std::vector<std::vector<double>>& outputs) {
  std::vector<double> all;
  for (const std::vector<double>& output : outputs) {
    all.insert(all.end(), output.begin(), output.end());
  }
  return all;
}

// Refuses a checkpoint whose tokenizer.json gives token ids another meaning than the running
// model's, of the digest `ours`. There is nothing to compare where either has no tokenizer.
absl::Status CheckVocabulary(const std::string& path, const std::string& ours) {
  const absl::StatusOr<Vocabulary> vocabulary = Vocabulary::Load(path);
  if (ours.empty() || absl::IsNotFound(vocabulary.status())) return absl::OkStatus();
  if (!vocabulary.ok()) return PrependFieldPath("path", vocabulary.status());
  if (vocabulary->Digest() == ours) return absl::OkStatus();
  return InvalidField("path",
                      absl::StrCat(path, " holds a different model: its tokenizer.json has ",
                                   "a different vocabulary"));
}

// Refuses losses of routers for a model that has none.
absl::Status CheckRouterLosses(const RouterLossCoefficients& coefficients,
                               const ModelConfig& config) {
  if (config.decoder.experts.LayersBefore(config.num_hidden_layers) > 0) return absl::OkStatus();
  for (const auto& [field, coefficient] :
       {std::pair{"router_aux_loss_coef", coefficients.load_balancing},
        std::pair{"router_z_loss_coef", coefficients.z}}) {
    if (coefficient == 0) continue;
    return InvalidField(field, "needs a mixture of experts, but no layer of the model has experts");
  }
  return absl::OkStatus();
}

}  // namespace

MicroBatchInput SelectRows(const RaggedBatch& batch, const SequenceBatch& sequences,
                           const SequenceRange& range) {
  MicroBatchInput selected = {.batch = batch, .sequences = range, .rows = sequences.Rows(range)};
  size_t next = 0;  // in the batch
  for (const SequenceRows& sequence : range.Of(sequences.sequences())) {
    if (sequence.input.empty()) continue;
    for (const int64_t position : sequence.positions) {
      selected.positions.push_back(batch.RowOf(next, position));
    }
    selected.labels.insert(selected.labels.end(), sequence.labels.begin(), sequence.labels.end());
    ++next;
  }
  return selected;
}

absl::StatusOr<std::unique_ptr<TrainingCore>> TrainingCore::Create(
    const std::string& kind, const std::string& metric_prefix, const TrainingOptions& options,
    const LoadOptions& load, std::unique_ptr<parallel::Strategy> strategy) {
  for (const auto& [field, value] : {std::pair{"micro_batch_tokens", options.micro_batch_tokens},
                                     std::pair{"max_model_len", options.max_model_len},
                                     std::pair{"max_samples", options.max_samples}}) {
    if (value < 1) return InvalidField(field, "must be positive");
  }
  std::unique_ptr<TrainingCore> core(new TrainingCore(kind, metric_prefix, options));
  TANDEM_RETURN_IF_ERROR(core->thread_.Run({}, [&] {
    return NameMemorySettings(
        CatchTorchErrors("model", [&] { return core->Load(load, std::move(strategy)); }),
        kMemorySettings);
  }));
  return core;
}

TrainingCore::TrainingCore(std::string kind, std::string metric_prefix,
                           const TrainingOptions& options)
    : metric_prefix_(std::move(metric_prefix)),
      options_(options),
      state_{.kind = kind},
      writer_(kind, kStallLimit),
      thread_({.name = std::move(kind), .stall_limit = kStallLimit}) {
  AddCommands();
}

void TrainingCore::AddCommands() {
  save_checkpoint_ = AddCommand<SaveRequest, absl::StatusOr<checkpoint::Saved>>(
      "checkpoint",
      [this](const CallScope&, const SaveRequest& request) { return StartCheckpoint(request); });
  load_checkpoint_ = AddCommand<LoadRequest, absl::Status>(
      "checkpoint to load",
      [this](const CallScope&, const LoadRequest& request) { return ReadCheckpoint(request); },
      Needs::kNothing);
  load_base_model_ = AddCommand<NoRequest, absl::Status>(
      "base model", [this](const CallScope&, const NoRequest&) { return ReadBaseModel(); },
      Needs::kNothing);
  export_model_ = AddCommand<ExportRequest, absl::Status>(
      "export",
      [this](const CallScope&, const ExportRequest& request) {
        return training::ExportModel(*strategy_, {request.path, request.root}, request.dtype);
      },
      Needs::kWeights);
}

absl::Status TrainingCore::Load(LoadOptions load, std::unique_ptr<parallel::Strategy> strategy) {
  TANDEM_ASSIGN_OR_RETURN(load.placement, SetUpCompute(options_.compute));
  load.freeze = options_.freeze;
  load.lora = options_.lora;
  load.placement.weight_format = options_.weight_format;
  load.computes_digest = false;
  TANDEM_ASSIGN_OR_RETURN(ranks_,
                          ranks::ServerRanks::Connect({.environment = options_.environment,
                                                       .device = load.placement.device,
                                                       .timeouts = options_.rank_timeouts}));
  TANDEM_RETURN_IF_ERROR(ranks_->CheckSame("configuration", options_.configuration));
  std::vector<int> everyone(static_cast<size_t>(ranks_->size()));
  std::iota(everyone.begin(), everyone.end(), 0);
  save_ranks_ = ranks_->world()->Split("checkpoints", {everyone},
                                       {.device = at::kCPU, .timeout = ranks::kNoTimeLimit});
  strategy_ = std::move(strategy);
  if (strategy_ == nullptr) {
    auto created = parallel::CreateStrategy(options_.strategy, ranks_->world());
    TANDEM_RETURN_IF_ERROR(ranks_->Agree(created.status()));
    strategy_ = *std::move(created);
  }
  TANDEM_RETURN_IF_ERROR(RunAndAgree("model", [&] { return LoadModel(load); }));
  TANDEM_RETURN_IF_ERROR(ranks_->CheckSame("model", model().source_mark()));
  TANDEM_RETURN_IF_ERROR(ranks_->CheckSame("tokenizer.json", vocabulary_digest_));
  if (!frozen()) {
    TANDEM_RETURN_IF_ERROR(RunAndAgree("optimizer", [&] {
      return PrependFieldPath("optimizer", strategy_->BuildOptimizer(options_.optimizer));
    }));
  }
  TANDEM_RETURN_IF_ERROR(PrepareDigest());
  base_digest_ = weights().digest;
  return absl::OkStatus();
}

absl::Status TrainingCore::LoadModel(LoadOptions load) {
  // Metrics count sentences and clients compare the digest; a model without a tokenizer trains too.
  absl::StatusOr<Vocabulary> vocabulary = Vocabulary::Load(options_.model);
  if (vocabulary.ok()) {
    load.num_token_ids = vocabulary->size();
    vocabulary_ = *std::move(vocabulary);
    vocabulary_digest_ = vocabulary_->Digest();
  } else if (!absl::IsNotFound(vocabulary.status())) {
    return PrependFieldPath("model", vocabulary.status());
  }
  if (const absl::Status loaded = strategy_->LoadModel(options_.model, load); !loaded.ok()) {
    const std::string field(FieldPath(loaded).value_or(""));
    const bool of_options = field.starts_with("freeze") || field.starts_with("strategy") ||
                            field.starts_with("lora") || field == "untie_embeddings";
    return of_options ? loaded : PrependFieldPath("model", loaded);
  }
  return CheckRouterLosses(options_.router_losses, model().config());
}

absl::Status TrainingCore::RunAndAgree(absl::string_view what,
                                       absl::FunctionRef<absl::Status()> body) {
  return ranks_->Agree(CatchTorchErrors(what, body));
}

absl::Status TrainingCore::OnAllRanks(absl::string_view what,
                                      absl::FunctionRef<absl::Status()> body) {
  return thread_.Run({}, [&] { return RunAndAgree(what, body); });
}

void TrainingCore::Start() {
  started_ = true;
  if (!ranks_->leads()) follower_ = std::thread([this] { Follow(); });
}

void TrainingCore::Follow() {
  ranks_->Follow(commands_,
                 [this](const std::string& request_id, absl::FunctionRef<absl::Status()> execute) {
                   CallScope call;
                   call.request_id = request_id;
                   return thread_.Run(call, [&] { return execute(); });
                 });
  ended_ = true;
}

void TrainingCore::Shutdown() {
  std::call_once(shut_down_, [this] {
    if (follower_.joinable()) follower_.join();
    if (started_ && ranks_->leads()) {
      thread_.Post([this] { ranks_->AnnounceEnd(); }).IgnoreError();  // the queue has room for it
    }
    thread_.Shutdown();
    writer_.Shutdown();
  });
}

absl::StatusOr<checkpoint::Saved> TrainingCore::SaveCheckpoint(const CallScope& call,
                                                               const SaveRequest& request) {
  if (const auto joined = writer_.Join(call, request); joined.has_value()) return *joined;
  TANDEM_ASSIGN_OR_RETURN(const std::shared_ptr<CheckpointWriter::Save> save,
                          writer_.Reserve(call));
  absl::StatusOr<checkpoint::Saved> saved = save_checkpoint_(call, request);
  if (!saved.ok() || !saved->pending) {
    writer_.Release(save);
    return saved;
  }
  return request.in_background ? saved : writer_.Wait(call, *save);
}

absl::StatusOr<checkpoint::Saved> TrainingCore::StartCheckpoint(const SaveRequest& request) {
  if (request.expected_version.has_value()) {
    TANDEM_RETURN_IF_ERROR(CheckExpectedVersion(state_, *request.expected_version));
  }
  const SteadyTime begun = SteadyTime::Now();
  // LoadBaseModel reads them again.
  std::vector<std::string> in_use = {options_.model};
  if (companion_ != nullptr) in_use.push_back(companion_->initial_directory());
  TANDEM_ASSIGN_OR_RETURN(
      StartedSave started,
      StartSave({request.directory, request.root}, request.name, request.keep,
                {.strategy = *strategy_, .state = state_, .companion = companion_},
                options_.checkpoint_snapshot ? &save_copies_ : nullptr, in_use));
  const auto done = [this, changes = changes_.load()](const CheckpointReport& report) {
    if (report.saved.ok()) saved_changes_ = changes;
    if (options_.on_checkpoint && ranks_->leads()) options_.on_checkpoint(report);
  };
  if (!options_.checkpoint_snapshot) {
    CheckpointReport report = {.saved = std::move(started).Finish(*strategy_->ranks().patient())};
    report.held_seconds = SecondsSince(begun);
    done(report);
    return report.saved;
  }
  const std::string path = started.path();
  TANDEM_RETURN_IF_ERROR(writer_.Start(
      request, std::move(started), save_ranks_,
      [done, held = SecondsSince(begun),
       copied = SteadyTime::Now()](const absl::StatusOr<checkpoint::Saved>& saved) {
        done({.saved = saved, .held_seconds = held, .written_seconds = SecondsSince(copied)});
      }));
  return checkpoint::Saved{.path = path, .pending = true};
}

absl::Status TrainingCore::WithoutSaves(const CallScope& call,
                                        absl::FunctionRef<absl::Status()> body) {
  TANDEM_ASSIGN_OR_RETURN(const std::shared_ptr<CheckpointWriter::Save> reserved,
                          writer_.Reserve(call));
  const absl::Cleanup release = [&] { writer_.Release(reserved); };
  return body();
}

absl::Status TrainingCore::PrepareWeights() {
  TANDEM_RETURN_IF_ERROR(broken_);
  if (copies_stale_) model().OnWeightsChanged();
  copies_stale_ = false;
  return absl::OkStatus();
}

void TrainingCore::CheckSameOutcome(const std::string& command, const absl::Status& status) {
  if (ranks_->size() == 1) return;
  const absl::Status same =
      ranks_->CheckSame(absl::StrCat("outcome of '", command, "'"),
                        absl::StrCat(ErrorLine(status), ", version ", state_.version, " after ",
                                     optimizer_steps(), " updates"));
  if (!same.ok()) ranks_->Fail(std::string(same.message()));
}

SequenceLimits TrainingCore::limits() const {
  const Model& model = strategy_->model();
  return {.num_token_ids = model.num_token_ids(),
          .max_model_len = model.config().LongestSequence(options_.max_model_len)};
}

int64_t TrainingCore::optimizer_steps() const {
  if (!frozen()) return strategy_->optimizer_steps();
  return companion_ == nullptr ? 0 : companion_->updates();
}

WeightsVersion TrainingCore::weights() const {
  return {.version = state_.version, .digest = state_.lineage.DigestOf(state_.version)};
}

absl::Status TrainingCore::Health() {
  // What runs here may wait for the disk of another rank.
  const int64_t progress = ranks_->progress_of_others();
  if (progress_of_others_.exchange(progress) != progress) {
    thread_.NoteProgressOfOthers();
    writer_.NoteProgressOfOthers();
  }
  TANDEM_RETURN_IF_ERROR(thread_.Health());
  return writer_.Health();
}

EngineInfo TrainingCore::Info() const {
  const std::lock_guard lock(info_mutex_);
  EngineInfo info = info_;
  info.micro_batches = micro_batches_;
  info.micro_batches_done = micro_batches_done_;
  return info;
}

absl::Status TrainingCore::PrepareDigest() {
  if (digest_known_) return absl::OkStatus();
  TANDEM_ASSIGN_OR_RETURN(std::string digest, parallel::ParametersDigest(*strategy_, frozen_sums_));
  RecordWeights(std::move(digest));
  return absl::OkStatus();
}

absl::Status TrainingCore::PublishState(bool defer_digest) {
  if (!defer_digest || digest_known_) return PrepareDigest();
  RecordWeights(/*digest=*/"");
  return absl::OkStatus();
}

void TrainingCore::RecordWeights(std::string digest) {
  EngineInfo info;
  info.model = model().Summary(limits().max_model_len);
  info.model.vocabulary_digest = vocabulary_digest_;
  info.optimizer_steps = optimizer_steps();
  if (companion_ != nullptr) info.companion_updates = companion_->updates();
  info.weights = {.version = state_.version, .digest = std::move(digest)};
  digest_known_ = !info.weights.digest.empty();
  if (digest_known_) state_.lineage.Record(info.weights);
  const std::lock_guard lock(info_mutex_);
  info_ = std::move(info);
}

absl::StatusOr<StepResult> TrainingCore::Step(
    const StepIdentity& identity,
    absl::FunctionRef<absl::StatusOr<std::vector<UpdateGradients>>(StepReport& report)> prepare,
    const OptimizerOverrides& overrides) {
  TANDEM_ASSIGN_OR_RETURN(std::optional<StepReport> stored, AdmitStep(state_, identity));
  if (stored.has_value()) {
    TANDEM_RETURN_IF_ERROR(PublishState(identity.defer_digest));
    stored->weights.digest = state_.lineage.DigestOf(stored->weights.version);
    return StepResult{.report = *std::move(stored), .replayed = true};
  }
  // A shutdown during the step must save the step.
  absl::Cleanup restore = [this, before = changes_++] { changes_ = before; };
  StepReport report{.run_id = identity.run_id, .step = identity.step};
  report.weights.version = state_.version;
  const absl::StatusOr<std::vector<UpdateGradients>> updates = prepare(report);
  absl::Status status = updates.status();
  if (status.ok() && !report.skipped) status = MakeUpdates(identity, *updates, overrides, report);
  const bool not_finite = IsNotFinite(status);
  if (not_finite) {
    report.skipped = true;
    report.skip_reason = std::string(status.message());
  } else if (!status.ok()) {
    if (!broken_.ok()) std::move(restore).Cancel();  // the former weights are lost
    return status;
  }
  if (report.skipped) {
    state_.ledger.Record(identity.request_id, identity.payload_digest, report);
  }
  std::move(restore).Cancel();
  TANDEM_RETURN_IF_ERROR(PrepareWeights());
  TANDEM_RETURN_IF_ERROR(PublishState(identity.defer_digest));
  report.weights = weights();
  return StepResult{.report = std::move(report), .not_finite = not_finite};
}

absl::Status TrainingCore::MakeUpdates(const StepIdentity& identity,
                                       absl::Span<const UpdateGradients> updates,
                                       const OptimizerOverrides& overrides, StepReport& report) {
  Updates done = {.overrides = overrides};
  absl::Status left_out;
  for (const UpdateGradients& gradients : updates) {
    absl::Status status =
        CatchTorchErrors("update", [&] { return MakeUpdate(identity, gradients, report, done); });
    if (!status.ok() && done.applied == 0 && done.entry != nullptr) {
      state_.ledger.RemoveNewest();
      done.entry = nullptr;
    }
    if (IsNotFinite(status)) {
      ++done.not_finite;
      if (updates.size() > 1) {
        Log(LogLevel::kWarning, "update_left_out", {{"reason", status.message()}});
      }
      left_out = std::move(status);
    } else if (!status.ok()) {
      if (done.applied > 0 && broken_.ok()) {
        broken_ = absl::DataLossError(absl::StrCat("a step failed after ", done.applied, " of its ",
                                                   updates.size(), " updates: load a checkpoint (",
                                                   status.message(), ")"));
      }
      return broken_.ok() ? status : broken_;
    }
  }
  if (done.applied == 0) return left_out;
  Report(done);
  report = *done.entry;
  return absl::OkStatus();
}

absl::Status TrainingCore::MakeUpdate(const StepIdentity& identity,
                                      const UpdateGradients& gradients, StepReport& report,
                                      Updates& updates) {
  TANDEM_RETURN_IF_ERROR(PrepareWeights());
  TANDEM_RETURN_IF_ERROR(gradients(report));
  // The entry is complete before the update, so that nothing can fail after it.
  if (updates.entry == nullptr) {
    updates.entry = &state_.ledger.Record(identity.request_id, identity.payload_digest, report);
  } else {
    updates.entry->metrics = report.metrics;
  }
  if (frozen()) return ApplyCompanionUpdate(updates);
  for (const char* name : {"grad_norm", "learning_rate", "updates", "updates_not_finite"}) {
    updates.entry->metrics[absl::StrCat(metric_prefix_, name)] = 0;
  }
  return ApplyUpdate(updates);
}

absl::Status TrainingCore::ApplyUpdate(Updates& updates) {
  const int64_t steps_before = strategy_->optimizer_steps();
  const auto optimizer =
      CatchTorchErrors("update", [&] { return strategy_->OptimizerStep(updates.overrides); });
  if (absl::IsDataLoss(optimizer.status())) {
    broken_ = absl::DataLossError(
        absl::StrCat("an update failed half-way and left unusable weights: load a checkpoint (",
                     optimizer.status().message(), ")"));
    return broken_;
  }
  if (strategy_->optimizer_steps() == steps_before) return optimizer.status();
  // The update is applied: the step counts, whatever fails from here on.
  if (updates.applied++ == 0) updates.entry->weights.version = ++state_.version;
  digest_known_ = false;
  if (optimizer.ok()) {
    updates.grad_norm += optimizer->grad_norm;
    updates.learning_rate = optimizer->learning_rate;
  } else {
    copies_stale_ = true;
    updates.known = false;
    Log(LogLevel::kWarning, "failure_after_update", {{"error", optimizer.status().ToString()}});
  }
  return UpdateCompanion();
}

absl::Status TrainingCore::ApplyCompanionUpdate(Updates& updates) {
  // A version of its own for the companion, of a model that stays as it is.
  std::string digest = weights().digest;
  TANDEM_RETURN_IF_ERROR(UpdateCompanion());
  if (updates.applied++ == 0) updates.entry->weights.version = ++state_.version;
  RecordWeights(std::move(digest));
  return absl::OkStatus();
}

absl::Status TrainingCore::UpdateCompanion() {
  if (companion_ == nullptr) return absl::OkStatus();
  const absl::Status status = RunAndAgree("companion update", [&] { return companion_->Update(); });
  if (!status.ok()) {
    // The model has an update that its companion lacks, or has in part.
    companion_intact_ = false;
    broken_ = absl::DataLossError(absl::StrCat(
        "an update of the speculator failed half-way: load a checkpoint (", status.message(), ")"));
  }
  return broken_;
}

void TrainingCore::Report(const Updates& updates) const {
  if (frozen()) return;  // the model has no update to report
  std::map<std::string, double>& metrics = updates.entry->metrics;
  const auto set = [&](const char* name, double value) {
    metrics.at(absl::StrCat(metric_prefix_, name)) = value;
  };
  const auto applied = static_cast<double>(updates.applied);
  set("updates", applied);
  set("updates_not_finite", static_cast<double>(updates.not_finite));
  set("grad_norm", updates.grad_norm / applied);
  set("learning_rate", updates.learning_rate);
  if (updates.known && updates.learning_rate == 0) {
    Log(LogLevel::kWarning, "learning_rate_is_zero",
        {{"updates", optimizer_steps()}, {"total_steps", options_.optimizer.total_steps}});
  }
  if (updates.known) return;
  for (const char* name : {"grad_norm", "learning_rate"}) {
    metrics.erase(absl::StrCat(metric_prefix_, name));
  }
}

TrainingCore::Pass TrainingCore::PlanPass(const SequenceBatch& sequences,
                                          const SequenceRange& range) const {
  std::vector<int64_t> lengths;
  for (const SequenceRows& sequence : range.Of(sequences.sequences())) {
    lengths.push_back(static_cast<int64_t>(sequence.input.size()));
  }
  Pass pass = {.sequences = sequences, .micro_batches = {}, .shared = {}};
  std::vector<int64_t> shared;
  if (options_.shared_prefixes) {
    pass.shared = CommonPrefixes(sequences.sequences());
    // Sequences count as kLeastOwnRows tokens at least: attention copies keys for each.
    for (size_t i = 0; i < lengths.size(); ++i) {
      const int64_t most = std::max<int64_t>(lengths[i] - ops::kLeastOwnRows, 0);
      shared.push_back(std::min(pass.shared[range.begin + i], most));
    }
  }
  pass.micro_batches = PlanMicroBatches(lengths, options_.micro_batch_tokens,
                                        strategy_->data_parallel_size(), shared);
  for (MicroBatch& micro_batch : pass.micro_batches) {
    micro_batch.begin += range.begin;
    micro_batch.end += range.begin;
  }
  return pass;
}

TrainingCore::Pass::Input TrainingCore::Pass::InputOf(const MicroBatch& micro_batch) const {
  Input input;
  for (size_t s = micro_batch.begin; s < micro_batch.end; ++s) {
    const SequenceRows& sequence = sequences.sequences()[s];
    if (sequence.input.empty()) continue;
    input.starts.push_back(shared.empty() || input.sequences.empty() ? 0 : shared[s]);
    input.sequences.push_back(&sequence);
  }
  return input;
}

at::Tensor TrainingCore::RoutedExpertsOf(const Pass::Input& input, int64_t rows) {
  if (std::ranges::all_of(input.sequences, [](const SequenceRows* sequence) {
        return sequence->routed_experts.empty();
      })) {
    return {};
  }
  const RoutingCache layout = model().config().RoutingLayout();
  const at::Tensor experts =
      at::full({rows, layout.layers, layout.experts_per_token}, -1, at::kInt);
  int32_t* id = experts.data_ptr<int32_t>();
  for (size_t i = 0; i < input.sequences.size(); ++i) {
    const SequenceRows& sequence = *input.sequences[i];
    const int64_t per_token = layout.ids_per_token(), start = input.starts[i];
    if (!sequence.routed_experts.empty()) {
      std::copy(sequence.routed_experts.begin() + start * per_token, sequence.routed_experts.end(),
                id);
    }
    id += (std::ssize(sequence.input) - start) * per_token;
  }
  return CopyToDevice(experts, model().device());
}

RaggedBatch TrainingCore::Input(const Pass& pass, int64_t micro_batch, bool replays) {
  NoteProgress();
  micro_batches_ = pass.count();
  micro_batches_done_ = micro_batch;
  const Pass::Input read = pass.InputOf(pass.micro_batches[static_cast<size_t>(micro_batch)]);
  std::vector<std::vector<int64_t>> inputs;
  for (const SequenceRows* sequence : read.sequences) inputs.push_back(sequence->input);
  RaggedBatch batch = MakeRaggedBatch(inputs, model().device(), read.starts);
  if (replays) batch.routing.given = RoutedExpertsOf(read, batch.num_tokens());
  if (!model().config().vision.has_value()) return batch;
  ImageBatch collected(*model().config().vision);
  for (size_t i = 0; i < inputs.size(); ++i) {
    collected.AddTokens(read.sequences[i]->images.get(), read.starts[i],
                        std::ssize(inputs[i]) - read.starts[i]);
  }
  batch.images = collected.Take(model().device());
  return batch;
}

absl::StatusOr<std::shared_ptr<const PromptImages>> TrainingCore::ImagesOf(
    absl::Span<const int32_t> prompt, absl::Span<const int32_t> response,
    absl::Span<const VisionReference> references, const Blobs& blobs) {
  const std::optional<VisionConfig>& vision = model().config().vision;
  return MakePromptImages(vision.has_value() ? &*vision : nullptr, prompt, response, references,
                          blobs);
}

MicroBatchInput TrainingCore::RowsOf(const Pass& pass, int64_t micro_batch,
                                     const RaggedBatch& batch) {
  return SelectRows(batch, pass.sequences, pass.micro_batches[static_cast<size_t>(micro_batch)]);
}

absl::StatusOr<std::vector<double>> TrainingCore::Forward(const SequenceBatch& sequences,
                                                          RowOutput output) {
  const Pass pass = PlanPass(sequences, sequences.all());
  TANDEM_ASSIGN_OR_RETURN(
      const std::vector<std::vector<double>> outputs,
      strategy_->Forward(
          pass.count(), [&](int64_t i) { return Input(pass, i, /*replays=*/true); },
          [&](int64_t i, const RaggedBatch& batch, const at::Tensor& hidden) {
            return output(RowsOf(pass, i, batch), hidden);
          }));
  return Concatenated(outputs);
}

absl::StatusOr<std::vector<double>> TrainingCore::ForwardFrozen(const Model& frozen,
                                                                const SequenceBatch& sequences,
                                                                RowOutput output) {
  const Pass pass = PlanPass(sequences, sequences.all());
  TANDEM_ASSIGN_OR_RETURN(const std::vector<std::vector<double>> outputs,
                          strategy_->ParallelMap(pass.count(), [&](int64_t i) {
                            const at::NoGradGuard no_grad;
                            const RaggedBatch batch = Input(pass, i, /*replays=*/false);
                            CausalContext context;
                            return output(RowsOf(pass, i, batch),
                                          frozen.HiddenStates(batch, context));
                          }));
  return Concatenated(outputs);
}

int64_t TrainingCore::Pass::num_tokens() const {
  int64_t tokens = 0;
  for (const MicroBatch& range : micro_batches) {
    for (const SequenceRows& sequence : range.Of(sequences.sequences())) {
      tokens += static_cast<int64_t>(sequence.input.size());
    }
  }
  return tokens;
}

int64_t TrainingCore::Pass::num_shared_tokens() const {
  int64_t tokens = 0;
  for (const MicroBatch& range : micro_batches) {
    for (const int64_t start : InputOf(range).starts) tokens += start;
  }
  return tokens;
}

absl::StatusOr<TrainingCore::PassReport> TrainingCore::ForwardBackward(
    const SequenceBatch& sequences, const SequenceRange& range, RowLoss loss) {
  const Pass pass = PlanPass(sequences, range);
  const ModelConfig& config = model().config();
  const ExpertOptions& experts = config.decoder.experts;
  const int64_t expert_layers = experts.LayersBefore(config.num_hidden_layers);
  const auto choices = static_cast<double>(pass.num_tokens() * expert_layers);
  std::vector<std::shared_ptr<RouterLosses>> routers;
  TANDEM_RETURN_IF_ERROR(strategy_->ForwardBackward(
      pass.count(),
      [&](int64_t i) {
        RaggedBatch batch = Input(pass, i, /*replays=*/true);
        if (expert_layers == 0) return batch;
        routers.push_back(std::make_shared<RouterLosses>(
            experts, config.num_hidden_layers,
            RouterLosses::Scales{.load_balancing = options_.router_losses.load_balancing / choices,
                                 .z = options_.router_losses.z / choices},
            model().device()));
        batch.routing.losses = routers.back();
        return batch;
      },
      [&](int64_t i, const RaggedBatch& batch, const at::Tensor& hidden) {
        return loss(RowsOf(pass, i, batch), hidden);
      }));
  PassReport report = {.micro_batches = pass.count()};
  if (options_.shared_prefixes) {
    report.shared_fraction =
        static_cast<double>(pass.num_shared_tokens()) / static_cast<double>(pass.num_tokens());
  }
  if (expert_layers > 0) report.routers = SumOfRouters(routers);
  return report;
}

RouterSums TrainingCore::SumOfRouters(absl::Span<const std::shared_ptr<RouterLosses>> recorded) {
  const ModelConfig& config = model().config();
  const ExpertOptions& experts = config.decoder.experts;
  const int64_t layers = experts.LayersBefore(config.num_hidden_layers),
                count = experts.routing.num_experts;
  at::Tensor sums = at::zeros({layers, count + 2}, at::device(model().device()).dtype(at::kDouble));
  for (const std::shared_ptr<RouterLosses>& losses : recorded) sums += losses->sums();
  sums = sums.to(at::kCPU);  // the host waits once, whatever the micro-batches
  ranks::ReduceNumbers(strategy_->ranks(),
                       absl::MakeSpan(sums.data_ptr<double>(), static_cast<size_t>(sums.numel())),
                       ranks::Reduction::kSum);
  RouterSums result;
  result.experts_per_token = experts.routing.num_experts_per_tok;
  for (int64_t layer = 0; layer < layers; ++layer) {
    const double* const row = sums.const_data_ptr<double>() + layer * (count + 2);
    result.loads.emplace_back(row, row + count);
    result.load_balancing += row[count];
    result.z += row[count + 1];
  }
  return result;
}

absl::Status TrainingCore::ReadCheckpoint(const LoadRequest& request) {
  const std::string& path = request.path;
  TANDEM_ASSIGN_OR_RETURN(TrainingCheckpoint read,
                          ReadTraining(request.confined(), *strategy_, state_.kind));
  TANDEM_RETURN_IF_ERROR(
      RunAndAgree("tokenizer", [&] { return CheckVocabulary(path, vocabulary_digest_); }));
  if (companion_ != nullptr) {
    TANDEM_RETURN_IF_ERROR(RunAndAgree(
        "checkpoint", [&] { return companion_->ReadCheckpoint(request, companion_intact_); }));
  }
  const auto load_optimizer = [&] {
    if (frozen()) return absl::OkStatus();
    return request.optimizer == OptimizerState::kFresh ? strategy_->ResetOptimizer()
                                                       : strategy_->LoadOptimizer(path);
  };
  return Replace(path, load_optimizer, read.weights.tensors, std::move(read.state));
}

absl::Status TrainingCore::ReadBaseModel() {
  absl::Status changed = FieldError(
      absl::StatusCode::kFailedPrecondition, "base_model",
      absl::StrCat("the weights in ", options_.model, " have changed since the server started"));
  SourceParameters base;
  TANDEM_RETURN_IF_ERROR(RunAndAgree("base model", [&]() -> absl::Status {
    absl::StatusOr<SourceParameters> read = model().ReadSource();
    if (!read.ok()) return PrependFieldPath("base_model", read.status());
    if (read->Mark() != model().source_mark()) return changed;
    base = *std::move(read);
    return companion_ == nullptr ? absl::OkStatus() : companion_->ReadInitial();
  }));
  TANDEM_RETURN_IF_ERROR(Replace(
      options_.model, [&] { return frozen() ? absl::OkStatus() : strategy_->ResetOptimizer(); },
      base.tensors, TrainingState{.kind = state_.kind}));
  if (weights().digest == base_digest_) return absl::OkStatus();
  // The mark does not see every change.
  broken_ = absl::DataLossError(
      absl::StrCat(changed.message(), ": load a checkpoint before anything else"));
  return changed;
}

absl::Status TrainingCore::Replace(absl::string_view source,
                                   absl::FunctionRef<absl::Status()> load_optimizer,
                                   const NamedTensors& weights, TrainingState state) {
  TANDEM_RETURN_IF_ERROR(load_optimizer());
  // The optimizer has its new state, which does not fit the old weights.
  broken_ = absl::DataLossError(
      absl::StrCat("loading ", source, " failed half-way: load a checkpoint before anything else"));
  frozen_sums_ = {};
  TANDEM_RETURN_IF_ERROR(strategy_->LoadParameters(weights));
  if (companion_ != nullptr) {
    companion_intact_ = false;
    TANDEM_RETURN_IF_ERROR(RunAndAgree("companion weights", [&] {
      companion_->Adopt();
      return absl::OkStatus();
    }));
    companion_intact_ = true;
  }
  state_ = std::move(state);
  broken_ = absl::OkStatus();
  digest_known_ = false;
  saved_changes_ = changes_.load();
  TANDEM_RETURN_IF_ERROR(PrepareWeights());
  return PrepareDigest();
}

}  // namespace tandem::training
