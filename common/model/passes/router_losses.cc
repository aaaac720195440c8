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

// The tokens of all sequences, M of them. A row of the batch is a token of every sequence that
// shares it.
struct SequenceTokens {
  at::Tensor sequences;  // [M] int64
  at::Tensor rows;       // [M] int64; undefined where token i is row i
};

SequenceTokens TokensOf(const RaggedBatch& batch) {
  std::vector<int64_t> sequences, rows;
  for (size_t s = 0; s + 1 < batch.offsets.size(); ++s) {
    const ops::SequenceRuns sequence(batch.offsets, batch.tables.prefixes.get(), s);
    for (const ops::RowRun& run : sequence.runs()) {
      sequences.insert(sequences.end(), static_cast<size_t>(run.rows), static_cast<int64_t>(s));
      for (int64_t i = 0; i < run.rows; ++i) rows.push_back(run.row + i);
    }
  }
  const at::Device device = batch.tokens.device();
  return {.sequences = CopyToDevice(sequences, device),
          .rows = batch.tables.prefixes == nullptr ? at::Tensor() : CopyToDevice(rows, device)};
}

// Returns how often each number below `size` is among `values`, [size] int64. On a GPU the host
// does not wait, as it does for at::bincount.
at::Tensor Counts(const at::Tensor& values, int64_t size) {
  return at::zeros({size}, values.options()).scatter_add_(0, values, at::ones_like(values));
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
  const SequenceTokens tokens = TokensOf(pass.batch);
  const bool shared = tokens.rows.defined();
  at::Tensor loads, fractions, counts;
  {
    const at::NoGradGuard no_grad;
    const at::Tensor taken = shared ? experts.index_select(0, tokens.rows) : experts;
    loads = Counts((tokens.sequences.unsqueeze(1) * count + taken).flatten(), num_sequences * count)
                .view({num_sequences, count})
                .to(at::kDouble);
    const at::Tensor all = pass.context.SumOverRanks(loads);
    const at::Tensor lengths = all.sum(1, /*keepdim=*/true) / rule_.num_experts_per_tok;
    fractions = (all / lengths.clamp_min(1)).to(at::kFloat).index_select(0, tokens.sequences);
    if (shared) {
      fractions = at::zeros({logits.size(0), count}, fractions.options())
                      .index_add_(0, tokens.rows, fractions);
      counts = Counts(tokens.rows, logits.size(0)).to(at::kFloat);
    }
  }
  const at::Tensor balance = (Probabilities(logits, rule_.score) * fractions).sum() * count;
  const at::Tensor squares = at::logsumexp(logits, {1}).square();
  const at::Tensor z = (shared ? squares * counts : squares).sum();
  const at::Tensor losses = at::stack({balance, z}).detach().to(at::kDouble);
  sums_[place].copy_(at::cat({loads.sum(0), losses}));
  const bool has_loss = scales_.load_balancing > 0 || scales_.z > 0;
  if (!has_loss || !at::GradMode::is_enabled() || !logits.requires_grad()) return weights;
  return AttachLossFunction::apply(weights, balance * scales_.load_balancing + z * scales_.z);
}

}  // namespace tandem
