#include "common/parallel/piece_optimizer.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <utility>

#include "absl/types/span.h"
#include "common/base/status_macros.h"
#include "common/parallel/optimizer_step.h"
#include "common/parallel/rank_agreement.h"
#include "common/parallel/shard_plan.h"

namespace tandem::parallel {

bool BlockTrains(const Model& model, int64_t block) {
  const std::vector<Parameter>& parameters = model.DeclaredParameters();
  return std::any_of(parameters.begin(), parameters.end(), [&](const Parameter& parameter) {
    return parameter.trainable && parameter.spec.block == block;
  });
}

void ViewGradients(const Model& model, int64_t block, const at::Tensor& gradients) {
  for (const Parameter& parameter : model.DeclaredParameters()) {
    if (!parameter.trainable || parameter.spec.block != block) continue;
    at::Tensor leaf = parameter.value;
    leaf.mutable_grad() =
        gradients.narrow(0, leaf.storage_offset(), leaf.numel()).view(leaf.sizes());
  }
}

std::vector<OptimizerPiece> PiecesOfBlock(const Model& model, int64_t block, int64_t parts,
                                          int64_t index, const at::Tensor& values,
                                          const at::Tensor& gradients) {
  std::vector<OptimizerPiece> pieces;
  for (const ShardPiece& piece :
       PlanShard(model.DeclaredParameters(), block, parts * values.numel(), parts, index)) {
    const Parameter& parameter = *piece.parameter;
    if (!parameter.trainable) continue;
    pieces.push_back({.slice = {.parameter = parameter.spec.name,
                                .shape = parameter.spec.shape,
                                .shard = parameter.shard,
                                .offset = piece.offset,
                                .numel = piece.numel},
                      .values = values.narrow(0, piece.shard_offset, piece.numel),
                      .gradient = gradients.narrow(0, piece.shard_offset, piece.numel)});
  }
  return pieces;
}

PieceOptimizer::PieceOptimizer(std::vector<OptimizerPiece> pieces, const OptimizerOptions& options,
                               const Model& model, std::shared_ptr<Communicator> ranks, bool on_cpu)
    : options_(options), ranks_(std::move(ranks)), pieces_(std::move(pieces)) {
  for (const Parameter& parameter : model.DeclaredParameters()) {
    if (parameter.trainable) trained_.push_back(parameter.spec.name);
  }
  std::vector<training::AdamWParameter> updated;
  for (const OptimizerPiece& piece : pieces_) {
    gradients_.push_back(piece.gradient);
    masters_.push_back(on_cpu ? piece.values.to(at::kCPU) : piece.values);
    updated.push_back(
        {.name = piece.slice.parameter,
         .values = masters_.back(),
         .decays = training::DecaysWeight(static_cast<int64_t>(piece.slice.shape.size()))});
  }
  optimizer_ = std::make_unique<training::AdamW>(std::move(updated), options_);
}

double PieceOptimizer::GradientNorm() const {
  std::vector<at::Tensor> counted;
  for (const OptimizerPiece& piece : pieces_) {
    if (piece.counts) counted.push_back(piece.gradient);
  }
  const double own = training::GlobalNorm(counted);
  double squares = own * own;
  ReduceNumbers(*ranks_, absl::MakeSpan(&squares, 1), Reduction::kSum);
  return std::sqrt(squares);
}

absl::StatusOr<OptimizerReport> PieceOptimizer::Step(Model& model, absl::FunctionRef<void()> then) {
  return ClipAndUpdate(
      options_, steps(), GradientNorm(), gradients_,
      [&](double learning_rate) {
        Update(learning_rate);
        then();
      },
      model);
}

void PieceOptimizer::Update(double learning_rate) {
  std::vector<at::Tensor> gradients;
  for (size_t i = 0; i < pieces_.size(); ++i) {
    gradients.push_back(gradients_[i].to(masters_[i].device()));
  }
  optimizer_->Step(gradients, learning_rate);
  for (size_t i = 0; i < pieces_.size(); ++i) pieces_[i].values.copy_(masters_[i]);
}

void PieceOptimizer::OnValuesReplaced() {
  for (size_t i = 0; i < pieces_.size(); ++i) masters_[i].copy_(pieces_[i].values);
}

absl::Status PieceOptimizer::Save(const std::string& directory) const {
  std::vector<StateSlice> slices;
  std::set<std::string> left_out;
  for (const OptimizerPiece& piece : pieces_) {
    if (piece.counts) {
      slices.push_back(piece.slice);
    } else {
      left_out.insert(piece.slice.parameter);
    }
  }
  NamedTensors state = optimizer_->State();
  std::erase_if(
      state, [&](const auto& tensor) { return left_out.contains(ParameterOfState(tensor.first)); });
  return Agree(*ranks_,
               WriteOptimizerState(directory, ranks_->rank(), ranks_->size(), slices, state));
}

absl::Status PieceOptimizer::Load(const std::string& directory) {
  std::vector<StateSlice> slices;
  for (const OptimizerPiece& piece : pieces_) slices.push_back(piece.slice);
  // Nobody changes anything before all can.
  const absl::StatusOr<NamedTensors> state = ReadOptimizerState(directory, slices, trained_);
  absl::Status status = state.status();
  if (status.ok()) status = optimizer_->CheckState(*state);
  TANDEM_RETURN_IF_ERROR(Agree(*ranks_, status));
  return optimizer_->LoadState(*state);
}

}  // namespace tandem::parallel
