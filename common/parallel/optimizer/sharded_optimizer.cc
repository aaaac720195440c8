#include "common/parallel/optimizer/sharded_optimizer.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <utility>

#include "absl/types/span.h"
#include "common/base/errors/not_finite.h"
#include "common/base/errors/status_macros.h"
#include "common/optim/learning_rate.h"
#include "common/parallel/optimizer/shard_plan.h"
#include "common/ranks/rank_agreement.h"
#include "common/tensor/aten/catch_torch_errors.h"
#include "common/tensor/aten/tensor_copies.h"

namespace tandem::parallel {

bool BufferTrains(const Model& model, int64_t buffer) {
  const std::vector<Parameter>& parameters = model.DeclaredParameters();
  return std::any_of(parameters.begin(), parameters.end(), [&](const Parameter& parameter) {
    return parameter.trainable && parameter.value.defined() && parameter.buffer == buffer;
  });
}

void ViewGradients(const Model& model, int64_t buffer, const at::Tensor& gradients) {
  for (const Parameter& parameter : model.DeclaredParameters()) {
    if (!parameter.trainable || parameter.buffer != buffer || !parameter.value.defined()) continue;
    at::Tensor leaf = parameter.value;
    leaf.mutable_grad() =
        gradients.narrow(0, leaf.storage_offset(), leaf.numel()).view(leaf.sizes());
  }
}

std::vector<OptimizerShard> ShardsOfBuffer(const Model& model, int64_t buffer, int64_t shards,
                                           int64_t index, const at::Tensor& values,
                                           const at::Tensor& gradients) {
  std::vector<OptimizerShard> result;
  for (const ShardRange& range :
       PlanShard(model.DeclaredParameters(), buffer, shards * values.numel(), shards, index)) {
    const Parameter& parameter = *range.parameter;
    if (!parameter.trainable) continue;
    result.push_back({.range = {.parameter = parameter.spec.name,
                                .shape = parameter.spec.shape,
                                .shard = parameter.shard,
                                .offset = range.offset,
                                .numel = range.numel},
                      .values = values.narrow(0, range.shard_offset, range.numel),
                      .gradient = gradients.narrow(0, range.shard_offset, range.numel)});
  }
  return result;
}

absl::StatusOr<std::unique_ptr<ShardedOptimizer>> ShardedOptimizer::Create(
    std::vector<OptimizerShard> shards, const OptimizerOptions& options, const Model& model,
    std::shared_ptr<ranks::Communicator> ranks, bool on_cpu) {
  std::vector<std::string> trained;
  for (const Parameter& parameter : model.DeclaredParameters()) {
    if (parameter.trainable) trained.push_back(parameter.spec.name);
  }
  if (trained.empty()) {
    return absl::InvalidArgumentError("no parameter of the model requires a gradient");
  }
  return std::unique_ptr<ShardedOptimizer>(new ShardedOptimizer(
      std::move(shards), options, std::move(trained), std::move(ranks), on_cpu));
}

ShardedOptimizer::ShardedOptimizer(std::vector<OptimizerShard> shards,
                                   const OptimizerOptions& options,
                                   std::vector<std::string> trained,
                                   std::shared_ptr<ranks::Communicator> ranks, bool on_cpu)
    : options_(options),
      ranks_(std::move(ranks)),
      shards_(std::move(shards)),
      trained_(std::move(trained)) {
  std::vector<training::AdamWParameter> updated;
  for (const OptimizerShard& shard : shards_) {
    gradients_.push_back(shard.gradient);
    masters_.push_back(on_cpu ? shard.values.to(at::kCPU) : shard.values);
    updated.push_back(
        {.name = shard.range.parameter,
         .values = masters_.back(),
         .decays = training::DecaysWeight(static_cast<int64_t>(shard.range.shape.size()))});
  }
  optimizer_ = std::make_unique<training::AdamW>(std::move(updated), options_);
}

double ShardedOptimizer::GradientNorm() const {
  std::vector<at::Tensor> counted;
  for (const OptimizerShard& shard : shards_) {
    if (shard.counts) counted.push_back(shard.gradient);
  }
  const double own = training::GlobalNorm(counted);
  double squares = own * own;
  ranks::ReduceNumbers(*ranks_, absl::MakeSpan(&squares, 1), ranks::Reduction::kSum);
  return std::sqrt(squares);
}

absl::StatusOr<OptimizerReport> ShardedOptimizer::Step(Model& model,
                                                       const OptimizerOverrides& overrides,
                                                       absl::FunctionRef<void()> after_update) {
  const OptimizerOptions options = Overridden(options_, overrides);
  const double grad_norm = GradientNorm();
  if (!std::isfinite(grad_norm)) return NotFiniteError("the gradient norm is not finite");
  const double factor = options.max_grad_norm / (grad_norm + 1e-6);
  if (options.max_grad_norm > 0 && factor < 1 && !gradients_.empty()) {
    at::_foreach_mul_(gradients_, factor);
  }
  OptimizerReport report = {.grad_norm = grad_norm,
                            .learning_rate = training::LearningRateAt(options, steps())};
  const absl::Status updated = CatchTorchErrors("update", [&] {
    Update(report.learning_rate, options);
    after_update();
    return absl::OkStatus();
  });
  if (!updated.ok()) return absl::DataLossError(updated.message());
  model.OnWeightsChanged();
  return report;
}

void ShardedOptimizer::Update(double learning_rate, const OptimizerOptions& options) {
  std::vector<at::Tensor> gradients;
  for (size_t i = 0; i < shards_.size(); ++i) {
    gradients.push_back(gradients_[i].to(masters_[i].device()));
  }
  optimizer_->Step(gradients, learning_rate, options);
  for (size_t i = 0; i < shards_.size(); ++i) {
    if (!masters_[i].is_same(shards_[i].values)) shards_[i].values.copy_(masters_[i]);
  }
}

void ShardedOptimizer::OnValuesReplaced() {
  for (size_t i = 0; i < shards_.size(); ++i) {
    if (!masters_[i].is_same(shards_[i].values)) masters_[i].copy_(shards_[i].values);
  }
}

std::pair<std::vector<ParameterRange>, NamedTensors> ShardedOptimizer::CountedState() const {
  std::vector<ParameterRange> ranges;
  std::set<std::string> left_out;
  for (const OptimizerShard& shard : shards_) {
    if (shard.counts) {
      ranges.push_back(shard.range);
    } else {
      left_out.insert(shard.range.parameter);
    }
  }
  NamedTensors state = optimizer_->State();
  std::erase_if(
      state, [&](const auto& tensor) { return left_out.contains(ParameterOfState(tensor.first)); });
  return {std::move(ranges), std::move(state)};
}

absl::Status ShardedOptimizer::Save(const std::string& directory) const {
  const auto [ranges, state] = CountedState();
  return ranks::Agree(*ranks_->patient(), WriteOptimizerState(directory, ranks_->rank(),
                                                              ranks_->size(), ranges, state));
}

absl::StatusOr<OptimizerWriter> ShardedOptimizer::Copy(TensorCopies& copies) const {
  auto counted = CountedState();
  for (auto& [name, tensor] : counted.second) {
    TANDEM_ASSIGN_OR_RETURN(tensor, copies.Add(tensor));
  }
  return [rank = ranks_->rank(), size = ranks_->size(),
          copied = std::move(counted)](const std::string& directory) {
    return WriteOptimizerState(directory, rank, size, copied.first, copied.second);
  };
}

absl::Status ShardedOptimizer::Load(const std::string& directory) {
  std::vector<ParameterRange> ranges;
  for (const OptimizerShard& shard : shards_) ranges.push_back(shard.range);
  // No rank changes its state before all ranks have read theirs.
  const absl::StatusOr<NamedTensors> state = ReadOptimizerState(directory, ranges, trained_);
  absl::Status status = state.status();
  if (status.ok()) status = optimizer_->CheckState(*state);
  TANDEM_RETURN_IF_ERROR(ranks::Agree(*ranks_->patient(), status));
  return optimizer_->LoadState(*state);
}

}  // namespace tandem::parallel
