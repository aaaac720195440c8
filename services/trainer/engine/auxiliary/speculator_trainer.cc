#include "services/trainer/engine/auxiliary/speculator_trainer.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/base/errors/error.h"
#include "common/base/errors/not_finite.h"
#include "common/base/errors/status_macros.h"
#include "common/base/logging.h"
#include "common/loss/logits/output_rows.h"
#include "common/optim/learning_rate.h"
#include "common/ranks/rank_agreement.h"
#include "common/speculator/speculator_update.h"
#include "common/tensor/aten/aten_bytes.h"
#include "common/tensor/aten/device_copies.h"
#include "common/tensor/safetensors/safetensors.h"

namespace tandem::trainer {
namespace {

constexpr char kNotFinite[] = "speculator/updates_not_finite";

std::string OptimizerFile(const std::string& directory) {
  return absl::StrCat(directory, "/speculator_optimizer.safetensors");
}

std::string DigestOf(const speculator::Speculator& speculator) {
  return speculator::ManifestOf(speculator).digest;
}

absl::StatusOr<NamedTensors> ReadMoments(const std::string& directory) {
  const std::string file = OptimizerFile(directory);
  auto opened = SafetensorsFile::Open(file);
  if (absl::IsNotFound(opened.status())) {
    return absl::DataLossError(absl::StrCat(file, ": is missing next to the speculator"));
  }
  TANDEM_RETURN_IF_ERROR(opened.status());
  NamedTensors moments;
  for (const TensorView& view : (*opened)->tensors()) {
    moments.emplace_back(view.name, ToAten(view));
  }
  return moments;
}

}  // namespace

absl::StatusOr<std::unique_ptr<SpeculatorTrainer>> SpeculatorTrainer::Create(
    const EngineOptions& options, training::TrainingCore& core) {
  TANDEM_ASSIGN_OR_RETURN(auto adapter,
                          speculator::MakeSpeculatorAdapter(options.speculator.adapter, "adapter"));
  const Model& model = core.model();
  TANDEM_RETURN_IF_ERROR(adapter->BuildAndAttach(options.speculator,
                                                 {.hidden_size = model.config().hidden_size,
                                                  .vocab_size = model.config().vocab_size,
                                                  .num_token_ids = model.num_token_ids()},
                                                 model.device()));
  TANDEM_ASSIGN_OR_RETURN(const loss::LossImpl impl, loss::ParseLossImpl(options.loss_impl));
  return std::unique_ptr<SpeculatorTrainer>(new SpeculatorTrainer(
      options, core, std::move(adapter),
      {.impl = impl,
       .logits_chunk_bytes = LogitsChunkBytes(options.logits_chunk_bytes, model.num_token_ids())}));
}

SpeculatorTrainer::SpeculatorTrainer(const EngineOptions& options, training::TrainingCore& core,
                                     std::unique_ptr<speculator::SpeculatorAdapter> adapter,
                                     loss::LinearCrossEntropyOptions output_loss)
    : options_(options.speculator_optimizer),
      path_(options.speculator.path),
      core_(core),
      adapter_(std::move(adapter)),
      initial_digest_(DigestOf(adapter_->speculator())) {
  loss_options_.output_loss = std::move(output_loss);
  const at::NoGradGuard no_grad;
  gradient_ = at::zeros_like(adapter_->speculator().buffer());
  std::vector<training::AdamWParameter> updated;
  for (const speculator::SpeculatorParameter& parameter : adapter_->speculator().parameters()) {
    at::Tensor leaf = parameter.value;
    leaf.mutable_grad() =
        gradient_.narrow(0, leaf.storage_offset(), leaf.numel()).view(leaf.sizes());
    gradients_.push_back(leaf.mutable_grad());
    updated.push_back({.name = parameter.spec.name,
                       .values = leaf,
                       .decays = training::DecaysWeight(leaf.dim())});
  }
  optimizer_ = std::make_unique<training::AdamW>(std::move(updated), options_);
}

int64_t SpeculatorTrainer::ReadTokens(const TrainingRows& rows, size_t s) const {
  const auto hidden = static_cast<int64_t>(rows.sequences.sequences()[s].input.size());
  if (hidden == 0) return 0;
  return std::min(static_cast<int64_t>(rows.texts[s].size()), hidden + n_predict() + 1);
}

int64_t SpeculatorTrainer::CountTargets(const TrainingRows& rows,
                                        const training::SequenceRange& range) const {
  int64_t targets = 0;
  for (size_t s = range.begin; s < range.end; ++s) {
    targets += std::max<int64_t>(0, ReadTokens(rows, s) - (n_predict() + 1));
  }
  return targets;
}

bool SpeculatorTrainer::HasTargets(const TrainingRows& rows,
                                   const training::SequenceRange& range) const {
  return CountTargets(rows, range) > 0;
}

void SpeculatorTrainer::BeginUpdate(const TrainingRows& rows,
                                    const training::SequenceRange& range) {
  complete_ = false;
  targets_ = CountTargets(rows, range);
  const auto heads = static_cast<size_t>(n_predict());
  loss_options_.target_counts.assign(heads, targets_);
  loss_.assign(heads, 0);
  correct_.assign(heads, 0);
  gradient_.zero_();
}

absl::Status SpeculatorTrainer::AddGradients(const TrainingRows& rows,
                                             const training::MicroBatchInput& input,
                                             const at::Tensor& hidden) {
  if (targets_ == 0) return absl::OkStatus();
  speculator::SpeculatorBatch batch;
  std::vector<int64_t> tokens, offsets = {0}, positions;
  size_t next = 0;  // sequence of the micro-batch
  for (size_t s = input.sequences.begin; s < input.sequences.end; ++s) {
    const int64_t count = ReadTokens(rows, s);
    if (count == 0) continue;
    const int64_t last = std::ssize(rows.sequences.sequences()[s].input) - 1;
    for (int64_t t = 0; t < count; ++t) {
      tokens.push_back(rows.texts[s][static_cast<size_t>(t)]);
      // The tokens that the model has not read are targets alone: their rows are never used.
      positions.push_back(input.batch.RowOf(next, std::min(t, last)));
    }
    ++next;
    offsets.push_back(static_cast<int64_t>(tokens.size()));
  }
  if (tokens.empty()) return absl::OkStatus();
  const at::AutoGradMode with_gradients(true);
  batch.hidden = hidden.detach().index_select(0, CopyToDevice(positions, hidden.device()));
  batch.tokens = CopyToDevice(tokens, hidden.device());
  batch.sequences = speculator::PackedSequences(offsets);
  batch.labels = std::move(tokens);
  const auto report = adapter_->ComputeSpeculatorLoss(batch, loss_options_);
  if (IsNotFinite(report.status())) {
    // The sum over all ranks tells every rank.
    gradient_.fill_(std::numeric_limits<double>::quiet_NaN());
    return absl::OkStatus();
  }
  TANDEM_RETURN_IF_ERROR(report.status());
  for (size_t head = 0; head < loss_.size(); ++head) {
    loss_[head] += report->heads[head].loss;
    correct_[head] += static_cast<double>(report->heads[head].correct);
  }
  return absl::OkStatus();
}

absl::Status SpeculatorTrainer::FinishUpdate(std::map<std::string, double>& metrics) {
  // The numbers of the step's former update, but for the count.
  std::erase_if(metrics, [](const auto& metric) {
    return absl::StartsWith(metric.first, "speculator/") && metric.first != kNotFinite;
  });
  if (targets_ == 0) return absl::OkStatus();
  parallel::Strategy& strategy = core_.strategy();
  TANDEM_RETURN_IF_ERROR(strategy.ReduceTensor(gradient_));
  TANDEM_RETURN_IF_ERROR(strategy.Reduce(absl::MakeSpan(loss_), {}));
  TANDEM_RETURN_IF_ERROR(strategy.Reduce(absl::MakeSpan(correct_), {}));
  // Rank 0's: another machine may sum up in another order, and clip by another factor.
  TANDEM_ASSIGN_OR_RETURN(const double norm, ranks::FromRankZero<double>(strategy.ranks(), [&] {
                            return absl::StatusOr<double>(training::GlobalNorm(gradients_));
                          }));
  complete_ = std::isfinite(norm);
  metrics[kNotFinite] += complete_ ? 0 : 1;
  if (!complete_ && core_.frozen()) {
    return NotFiniteError("the gradient norm of the speculator is not finite");
  }
  if (!complete_) {
    Log(LogLevel::kWarning, "speculator_update_left_out",
        {{"reason", "its gradient norm is not finite"}});
    return absl::OkStatus();
  }
  const double factor = options_.max_grad_norm / (norm + 1e-6);
  if (options_.max_grad_norm > 0 && factor < 1) gradient_.mul_(factor);
  double loss = 0;
  for (size_t head = 0; head < loss_.size(); ++head) {
    loss += loss_[head];
    metrics[absl::StrCat("speculator/head_", head, "_accuracy")] =
        correct_[head] / static_cast<double>(targets_);
  }
  metrics["speculator/loss"] = loss;
  metrics["speculator/grad_norm"] = norm;
  metrics["speculator/learning_rate"] = training::LearningRateAt(options_, optimizer_->steps());
  return absl::OkStatus();
}

absl::Status SpeculatorTrainer::Update() {
  if (!std::exchange(complete_, false)) return absl::OkStatus();
  optimizer_->Step(gradients_, training::LearningRateAt(options_, optimizer_->steps()));
  return absl::OkStatus();
}

absl::Status SpeculatorTrainer::Save(const std::string& directory) {
  TANDEM_RETURN_IF_ERROR(adapter_->SaveCheckpoint(directory));
  return WriteNamedTensors(OptimizerFile(directory), optimizer_->State());
}

absl::StatusOr<training::CompanionWriter> SpeculatorTrainer::Copy(TensorCopies& copies) {
  TANDEM_ASSIGN_OR_RETURN(auto write_values, adapter_->CopyCheckpoint(copies));
  NamedTensors moments = optimizer_->State();
  for (auto& [name, tensor] : moments) {
    TANDEM_ASSIGN_OR_RETURN(tensor, copies.Add(tensor));
  }
  return [write_values = std::move(write_values),
          moments = std::move(moments)](const std::string& directory) -> absl::Status {
    TANDEM_RETURN_IF_ERROR(write_values(directory));
    return WriteNamedTensors(OptimizerFile(directory), moments);
  };
}

absl::Status SpeculatorTrainer::ReadCheckpoint(const training::LoadRequest& request, bool intact) {
  const std::string& directory = request.path;
  staged_ = {};
  auto read = adapter_->ReadCheckpoint(directory);
  if (absl::IsNotFound(read.status())) {
    Log(LogLevel::kWarning, "checkpoint_without_speculator",
        {{"path", directory}, {"speculator", intact ? "kept" : "initial"}});
    return intact ? absl::OkStatus() : ReadInitial();
  }
  TANDEM_RETURN_IF_ERROR(read.status());
  if (request.optimizer == training::OptimizerState::kFresh) {
    staged_.values = *std::move(read);
    return absl::OkStatus();
  }
  TANDEM_ASSIGN_OR_RETURN(NamedTensors moments, ReadMoments(directory));
  const absl::Status fits = optimizer_->CheckState(moments);
  if (!fits.ok()) {
    return absl::DataLossError(absl::StrCat(OptimizerFile(directory), ": ", fits.message()));
  }
  staged_ = {.values = *std::move(read), .moments = std::move(moments)};
  return absl::OkStatus();
}

absl::Status SpeculatorTrainer::ReadInitial() {
  staged_ = {};
  auto read = adapter_->ReadInitial();
  if (!read.ok()) return PrependFieldPath("speculator", read.status());
  if (DigestOf(**read) != initial_digest_) {
    return FieldError(
        absl::StatusCode::kFailedPrecondition, "speculator.path",
        absl::StrCat("the weights in ", path_, " have changed since the server started"));
  }
  staged_.values = *std::move(read);
  return absl::OkStatus();
}

void SpeculatorTrainer::Adopt() {
  complete_ = false;
  if (staged_.values != nullptr) adapter_->Adopt(*staged_.values);
  if (staged_.moments.has_value()) {
    TORCH_CHECK(optimizer_->LoadState(*staged_.moments).ok());  // was checked when it was read
  } else {
    optimizer_->Reset();
  }
  staged_ = {};
}

}  // namespace tandem::trainer
