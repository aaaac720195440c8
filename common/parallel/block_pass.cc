#include "common/parallel/block_pass.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <utility>

namespace tandem::parallel {

BlockPass::BlockPass(const Model& model, RaggedBatch batch,
                     std::unique_ptr<AttentionContext> context)
    : model_(model),
      batch_(std::move(batch)),
      context_(std::move(context)),
      pass_(model.StartPass(batch_, *context_)) {}

at::Tensor BlockPass::Forward(int64_t block, const at::Tensor& hidden) {
  at::Tensor output = model_.RunBlock(block, hidden, pass_);
  if (!at::GradMode::is_enabled()) return output;
  at::Tensor leaf = output.detach();
  leaf.set_requires_grad(output.requires_grad());
  runs_.push_back({hidden, std::move(output)});
  return leaf;
}

at::Tensor BlockPass::ForwardAll() {
  at::Tensor hidden;
  for (int64_t block = 0; block < model_.num_blocks(); ++block) hidden = Forward(block, hidden);
  return hidden;
}

void BlockPass::BackwardAll(at::Tensor gradient) {
  while (!runs_.empty()) gradient = Backward(gradient);
}

at::Tensor BlockPass::Backward(const at::Tensor& gradient) {
  const Run run = std::move(runs_.back());
  runs_.pop_back();
  if (gradient.defined() && run.output.requires_grad()) run.output.backward(gradient);
  if (!run.input.defined()) return {};
  at::Tensor result = run.input.grad();
  run.input.mutable_grad().reset();
  return result;
}

}  // namespace tandem::parallel
