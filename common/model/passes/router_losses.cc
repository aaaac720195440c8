#include "common/model/passes/router_losses.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <vector>

#include "common/tensor/aten/device_copies.h"

namespace tandem {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

// Returns `x`. Backward: the scalar `loss` gets the gradient 1, as a summand of the loss.
class AttachLossFunction : public Function<AttachLossFunction> {
 public:
  static at::Tensor forward(AutogradContext*, const at::Tensor& x, const at::Tensor& loss) {
    TORCH_CHECK(loss.dim() == 0 && loss.scalar_type() == x.scalar_type(), "not a loss");
    return x.view_as(x);
  }

  static variable_list backward(AutogradContext*, variable_list gradients) {
    return {gradients[0], at::ones({}, gradients[0].options())};
  }
};

// Returns the sequence of every token, [T] int64.
at::Tensor SequencesOf(const RaggedBatch& batch) {
  std::vector<int64_t> sequences;
  sequences.reserve(static_cast<size_t>(batch.num_tokens()));
  for (size_t s = 0; s + 1 < batch.offsets.size(); ++s) {
    sequences.insert(sequences.end(), static_cast<size_t>(batch.offsets[s + 1] - batch.offsets[s]),
                     static_cast<int64_t>(s));
  }
  return CopyToDevice(sequences, batch.tokens.device());
}

at::Tensor Probabilities(const at::Tensor& logits, RouterScore score) {
  if (score == RouterScore::kSoftmax) return at::softmax(logits, -1);
  const at::Tensor scores = at::sigmoid(logits);
  return scores / scores.sum(-1, /*keepdim=*/true).clamp_min(1e-20);
}

}  // namespace

RouterLosses::RouterLosses(const ExpertOptions& experts, int64_t num_hidden_layers,
                           const Scales& scales, at::Device device)
    : rule_(experts.routing),
      scales_(scales),
      sums_(at::zeros({experts.LayersBefore(num_hidden_layers), experts.routing.num_experts + 2},
                      at::device(device).dtype(at::kDouble))) {}

at::Tensor RouterLosses::Record(int64_t place, const at::Tensor& weights, const at::Tensor& logits,
                                const at::Tensor& experts, const ModelPass& pass) {
  const int64_t count = rule_.num_experts;
  const auto num_sequences = static_cast<int64_t>(pass.batch.offsets.size()) - 1;
  const at::Tensor sequences = SequencesOf(pass.batch);
  at::Tensor loads, fractions;
  {
    const at::NoGradGuard no_grad;
    loads = at::bincount((sequences.unsqueeze(1) * count + experts).flatten(), /*weights=*/{},
                         num_sequences * count)
                .view({num_sequences, count})
                .to(at::kDouble);
    const at::Tensor all = pass.context.SumOverRanks(loads);
    const at::Tensor tokens = all.sum(1, /*keepdim=*/true) / rule_.num_experts_per_tok;
    fractions = (all / tokens.clamp_min(1)).to(at::kFloat).index_select(0, sequences);
  }
  const at::Tensor balance = (Probabilities(logits, rule_.score) * fractions).sum() * count;
  const at::Tensor z = at::logsumexp(logits, {1}).square().sum();
  const at::Tensor losses = at::stack({balance, z}).detach().to(at::kDouble);
  sums_[place].copy_(at::cat({loads.sum(0), losses}));
  const bool has_loss = scales_.load_balancing > 0 || scales_.z > 0;
  if (!has_loss || !at::GradMode::is_enabled() || !logits.requires_grad()) return weights;
  return AttachLossFunction::apply(weights, balance * scales_.load_balancing + z * scales_.z);
}

}  // namespace tandem
