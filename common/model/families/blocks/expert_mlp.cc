#include "common/model/families/blocks/expert_mlp.h"

#include <ATen/ATen.h>

#include "common/model/families/blocks/row_sigmoid.h"
#include "common/ops/ops.h"
#include "common/ops/shards/rank_sum.h"
#include "common/ops/shards/token_shards.h"

namespace tandem {

ExpertMlp::ExpertMlp(const DecoderOptions& options, int64_t index, const std::string& network,
                     const Placement& placement, ParameterStore& store)
    : group_(placement.shard_group),
      router_(options.experts.routing, network, options.experts.LayersBefore(index),
              /*records=*/group_ == nullptr || group_->rank() == 0, store),
      experts_(options, network, placement, store) {
  if (options.experts.shared_intermediate_size == 0) return;
  // Without the group, because Forward adds up the ranks' summands of all experts together.
  shared_ = std::make_unique<GatedMlp>(network + options.expert_names.shared, options.activation,
                                       /*group=*/nullptr, store);
  if (options.experts.shared_gate)
    shared_gate_ = &store.TakeLinear({network + "shared_expert_gate"});
}

at::Tensor ExpertMlp::Output(const at::Tensor& x, const ModelPass& pass) const {
  at::Tensor sum = experts_.Forward(x, router_.Route(x, pass));
  if (shared_ == nullptr) return sum;
  const at::Tensor shared = shared_->Forward(x, /*residual=*/{}, pass);
  if (shared_gate_ == nullptr) return sum + shared;
  return sum + RowSigmoid(shared_gate_->Forward(x)) * shared;
}

at::Tensor ExpertMlp::Forward(const at::Tensor& x, const at::Tensor& residual,
                              const ModelPass& pass) const {
  at::Tensor output = Output(x, pass);
  if (group_ != nullptr) {
    output =
        pass.shards_tokens ? ops::ScatterSum(output, group_) : ops::SumInRankOrder(output, group_);
  }
  return residual.defined() ? residual + output : output;
}

}  // namespace tandem
