#include "common/parallel/zero/block_pass.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <utility>

#include "common/parallel/memory/recomputed_attention.h"

namespace tandem::parallel {

namespace {

std::unique_ptr<AttentionContext> Wrapped(std::unique_ptr<AttentionContext> context,
                                          Recompute recompute) {
  if (recompute != Recompute::kSelective) return context;
  return std::make_unique<RecomputedAttention>(std::move(context));
}

}  // namespace

BlockPass::BlockPass(const Model& model, RaggedBatch batch,
                     std::unique_ptr<AttentionContext> context, Recompute recompute)
    : model_(model),
      recompute_(recompute),
      batch_(std::move(batch)),
      context_(Wrapped(std::move(context), recompute)),
      pass_(model.StartPass(batch_, *context_)) {}

at::Tensor BlockPass::Forward(int64_t block, const at::Tensor& hidden) {
  at::Tensor output = model_.RunBlock(block, hidden, pass_);
  if (!at::GradMode::is_enabled()) return output;
  at::Tensor leaf = output.detach();
  leaf.set_requires_grad(output.requires_grad());
  // Not the embedding, which keeps nothing and whose parameters may be released by then; nor the
  // final norm, which runs back first.
  const bool is_layer = block > 0 && block + 1 < model_.num_blocks();
  const bool recomputes = recompute_ == Recompute::kFull && is_layer && output.requires_grad();
  if (recomputes) output.reset();
  runs_.push_back({block, hidden, std::move(output), recomputes});
  return leaf;
}

at::Tensor BlockPass::ForwardAll() {
  at::Tensor hidden;
  for (int64_t block = 0; block < model_.num_blocks(); ++block) hidden = Forward(block, hidden);
  return hidden;
}

at::Tensor BlockPass::BackwardAll(at::Tensor gradient) {
  while (!runs_.empty()) gradient = Backward(gradient);
  return gradient;
}

at::Tensor BlockPass::Backward(const at::Tensor& gradient) {
  Run run = std::move(runs_.back());
  runs_.pop_back();
  if (run.recomputes) run.output = model_.RunBlock(run.block, run.input, pass_);
  if (gradient.defined() && run.output.requires_grad()) run.output.backward(gradient);
  if (!run.input.defined()) return {};
  at::Tensor result = run.input.grad();
  run.input.mutable_grad().reset();
  return result;
}

}  // namespace tandem::parallel
