#include "common/model/families/expert_mlp.h"

#include <ATen/ATen.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/model/families/row_sigmoid.h"
#include "common/ops/expert_rows.h"
#include "common/ops/grouped_linear.h"
#include "common/ops/ops.h"
#include "common/ops/rank_sum.h"
#include "common/ops/token_shards.h"

namespace tandem {

ExpertMlp::ExpertMlp(const DecoderOptions& options, const std::string& layer,
                     std::shared_ptr<ops::TensorParallelGroup> group, ParameterStore& store)
    : group_(std::move(group)),
      router_(options.experts.routing, layer + options.expert_names.network, store) {
  const ExpertNames& names = options.expert_names;
  const std::string network = layer + names.network;
  for (int64_t i = 0; i < options.experts.routing.num_experts; ++i) {
    const std::string expert = absl::StrCat(network, "experts.", i, ".");
    gate_up_.push_back(&store.TakeLinear({expert + names.gate, expert + names.up}));
    down_.push_back(&store.TakeLinear({expert + names.down}));
  }
  if (options.experts.shared_intermediate_size == 0) return;
  const std::string shared = network + names.shared;
  shared_ = std::make_unique<SharedExpert>(SharedExpert{
      .gate_up = store.TakeLinear({shared + "gate_proj", shared + "up_proj"}),
      .down = store.TakeLinear({shared + "down_proj"}),
      .gate = options.experts.shared_gate ? &store.TakeLinear({network + "shared_expert_gate"})
                                          : nullptr});
}

at::Tensor ExpertMlp::Output(const at::Tensor& x) const {
  const Routing routing = router_.Route(x);
  const auto order = ops::ExpertRows::Of(routing.experts, static_cast<int64_t>(down_.size()));
  const at::Tensor rows = ops::GatherExpertRows(x, order);
  const at::Tensor inner = ops::SwiGlu(ops::GroupedLinear(rows, order.offsets, gate_up_));
  const at::Tensor outputs = ops::GroupedLinear(inner, order.offsets, down_);
  const at::Tensor sum = ops::CombineExpertRows(outputs, routing.weights, order);
  if (shared_ == nullptr) return sum;
  const at::Tensor shared = shared_->down.Forward(ops::SwiGlu(shared_->gate_up.Forward(x)));
  if (shared_->gate == nullptr) return sum + shared;
  return sum + RowSigmoid(shared_->gate->Forward(x)) * shared;
}

at::Tensor ExpertMlp::Forward(const at::Tensor& x, const at::Tensor& residual,
                              const ModelPass& pass) const {
  at::Tensor output = Output(x);
  if (group_ != nullptr) {
    output =
        pass.shards_tokens ? ops::ScatterSum(output, group_) : ops::SumInRankOrder(output, group_);
  }
  return residual.defined() ? residual + output : output;
}

}  // namespace tandem
