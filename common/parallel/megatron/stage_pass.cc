#include "common/parallel/megatron/stage_pass.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "common/base/errors/status_macros.h"
#include "common/parallel/context/ring_attention.h"
#include "common/ranks/rank_agreement.h"
#include "common/tensor/aten/catch_torch_errors.h"

namespace tandem::parallel {

StagePass::StagePass(const Stage& stage, std::vector<RaggedBatch> batches)
    : stage_(stage), batches_(std::move(batches)), first_trained_block_(stage.model.num_blocks()) {
  const ParallelMesh& mesh = stage_.mesh;
  if (mesh.shape.context > 1) {
    for (const RaggedBatch& batch : batches_) {
      shards_.push_back(MakeContextShard(batch, mesh.at.context, mesh.shape.context));
    }
  }
  for (const Parameter& parameter : stage_.model.DeclaredParameters()) {
    if (!parameter.trainable) continue;
    first_trained_block_ = std::min(first_trained_block_, parameter.spec.block);
  }
}

bool StagePass::EndsTheModel(int64_t virtual_stage) const {
  return stage_.is_last() && virtual_stage + 1 == stage_.shape.virtual_stages;
}

bool StagePass::TrainsBefore(int64_t block) const {
  return at::GradMode::is_enabled() && first_trained_block_ < block;
}

BlockRange StagePass::Blocks(int64_t virtual_stage) const {
  return BlocksOfVirtualStage(stage_.model.config().num_hidden_layers,
                              stage_.model.config().FirstLayerBlock(), stage_.shape, stage_.index(),
                              virtual_stage);
}

absl::Status StagePass::Run(Then then) {
  for (const PipelineAction& action :
       PipelineSchedule(stage_.shape, static_cast<int64_t>(batches_.size()), stage_.index())) {
    if (action.is_forward) {
      Forward(action, then);
    } else if (at::GradMode::is_enabled()) {
      Backward(action);
    }
  }
  forward_sends_.clear();
  backward_sends_.clear();
  return status_;
}

bool StagePass::Try(const char* what, absl::FunctionRef<absl::Status()> compute) {
  if (status_.ok()) status_ = CatchTorchErrors(what, compute);
  return status_.ok();
}

void StagePass::Forward(const PipelineAction& action, Then then) {
  const BlockRange blocks = Blocks(action.virtual_stage);
  at::Tensor hidden;
  if (Position(action.virtual_stage) > 0) {
    hidden = Receive(action.micro_batch, NeighbourAt(-1, /*is_forward=*/true));
    hidden.set_requires_grad(TrainsBefore(blocks.begin));
  }
  Open open;
  Try("forward", [&] {
    open.pass = StartPass(action.micro_batch);
    for (int64_t block = blocks.begin; block < blocks.end; ++block) {
      hidden = open.pass->Forward(block, hidden);
    }
    return absl::OkStatus();
  });
  if (EndsTheModel(action.virtual_stage)) {
    open.gradient = Finish(action.micro_batch, hidden, then);
  } else {
    if (!status_.ok()) hidden = EmptyHidden(action.micro_batch).zero_();
    Send(hidden.detach(), NeighbourAt(1, /*is_forward=*/true), forward_sends_);
  }
  if (!at::GradMode::is_enabled()) return;
  open_[{action.virtual_stage, action.micro_batch}] = std::move(open);
}

// Calls `then` and returns the gradient of this rank's hidden states.
at::Tensor StagePass::Finish(int64_t micro_batch, const at::Tensor& hidden, Then then) {
  const ParallelMesh& mesh = stage_.mesh;
  const auto index = static_cast<size_t>(micro_batch);
  const bool is_empty = batches_[index].num_tokens() == 0;
  at::Tensor gradient;
  Try("output", [&]() -> absl::Status {
    at::Tensor whole = hidden;
    if (!shards_.empty() && !is_empty) {
      whole = GatherContextRows(*mesh.context, shards_[index], hidden);
      whole.set_requires_grad(hidden.requires_grad());
    }
    // An error of one rank of the stage is an error of all, so that all skip the same work.
    absl::StatusOr<at::Tensor> computed = at::Tensor();
    const absl::Status own = CatchTorchErrors("output", [&] {
      if (!is_empty) computed = then(micro_batch, batches_[index], whole);
      return computed.status();
    });
    TANDEM_RETURN_IF_ERROR(ranks::Agree(*mesh.coupled, own));
    gradient = *std::move(computed);
    if (gradient.defined() && !shards_.empty()) {
      gradient = ScatterContextRows(*mesh.context, shards_[index], gradient);
    }
    // Other replicas' backward passes exchange rows with this one.
    if (!gradient.defined() && hidden.requires_grad() && mesh.shape.expert > 1) {
      gradient = at::zeros_like(hidden);
    }
    return absl::OkStatus();
  });
  return gradient;
}

void StagePass::Backward(const PipelineAction& action) {
  const BlockRange blocks = Blocks(action.virtual_stage);
  const auto found = open_.find({action.virtual_stage, action.micro_batch});
  Open open = std::move(found->second);
  open_.erase(found);
  at::Tensor gradient = std::move(open.gradient);
  if (!EndsTheModel(action.virtual_stage) && TrainsBefore(blocks.end)) {
    gradient = Receive(action.micro_batch, NeighbourAt(1, /*is_forward=*/false));
  }
  Try("backward", [&] {
    gradient = open.pass->BackwardAll(std::move(gradient));
    return absl::OkStatus();
  });
  if (Position(action.virtual_stage) == 0 || !TrainsBefore(blocks.begin)) return;
  if (!status_.ok() || !gradient.defined()) gradient = EmptyHidden(action.micro_batch).zero_();
  Send(gradient, NeighbourAt(-1, /*is_forward=*/false), backward_sends_);
}

std::unique_ptr<BlockPass> StagePass::StartPass(int64_t micro_batch) const {
  const auto index = static_cast<size_t>(micro_batch);
  if (shards_.empty()) {
    return std::make_unique<BlockPass>(stage_.model, batches_[index],
                                       std::make_unique<CausalContext>(), stage_.recompute);
  }
  return std::make_unique<BlockPass>(
      stage_.model, shards_[index].batch,
      std::make_unique<RingContext>(stage_.mesh.context, shards_[index]), stage_.recompute);
}

at::Tensor StagePass::EmptyHidden(int64_t micro_batch) const {
  const auto index = static_cast<size_t>(micro_batch);
  const int64_t tokens =
      shards_.empty() ? batches_[index].num_tokens() : shards_[index].batch.num_tokens();
  const int64_t ranks = stage_.mesh.shape.tensor;
  return at::empty({(tokens + ranks - 1) / ranks, stage_.model.config().hidden_size},
                   at::device(stage_.model.device()).dtype(stage_.model.dtype()));
}

StagePass::Neighbour StagePass::NeighbourAt(int64_t step, bool is_forward) const {
  const ParallelMesh& mesh = stage_.mesh;
  const int64_t stages = stage_.shape.stages, to = stage_.index() + step;
  const bool wraps = to < 0 || to == stages;
  const auto& group = is_forward ? (wraps ? mesh.forward_wrap : mesh.forward)
                                 : (wraps ? mesh.backward_wrap : mesh.backward);
  return {.group = *group, .rank = static_cast<int>((to + stages) % stages)};
}

at::Tensor StagePass::Receive(int64_t micro_batch, const Neighbour& from) const {
  at::Tensor tensor = EmptyHidden(micro_batch);
  from.group.Recv(tensor, from.rank);
  return tensor;
}

void StagePass::Send(const at::Tensor& tensor, const Neighbour& to, Sends& sends) {
  Sent& sent = sends.emplace_back();
  sent.tensor = tensor.contiguous();
  sent.handle = to.group.SendAsync(sent.tensor, to.rank);
  if (static_cast<int64_t>(sends.size()) > kSendsInFlight) sends.pop_front();
}

}  // namespace tandem::parallel
