#include "common/model/families/blocks/routed_experts.h"

#include "absl/strings/str_cat.h"
#include "common/ops/experts/expert_exchange.h"
#include "common/ops/experts/expert_rows.h"
#include "common/ops/linear/grouped_linear.h"
#include "common/ops/linear/linear_stack.h"
#include "common/ops/ops.h"

namespace tandem {

RoutedExperts::RoutedExperts(const DecoderOptions& options, const std::string& network,
                             const Placement& placement, ParameterStore& store)
    : num_experts_(options.experts.routing.num_experts),
      held_(placement.experts),
      group_(held_.count > 1 ? placement.expert_group : nullptr) {
  const ExpertNames& names = options.expert_names;
  const int64_t first = held_.Begin(num_experts_), end = first + held_.Size(num_experts_);
  for (int64_t i = 0; i < num_experts_; ++i) {
    const std::string expert = absl::StrCat(network, "experts.", i, ".");
    for (const std::string& name : {names.gate, names.up, names.down}) {
      for (const char* matrix : {".weight", ".lora_A.weight"}) {
        const Parameter* const parameter = store.Find(absl::StrCat(expert, name, matrix));
        train_ = train_ || (parameter != nullptr && parameter->trainable);
      }
    }
    if (i < first || i >= end) continue;
    gate_up_.push_back(&store.TakeLinear({expert + names.gate, expert + names.up}));
    down_.push_back(&store.TakeLinear({expert + names.down}));
  }
  are_stacked_ = group_ == nullptr && ops::AreStacked(gate_up_) && ops::AreStacked(down_);
}

template <typename Offsets>
at::Tensor RoutedExperts::Outputs(const at::Tensor& rows, const Offsets& offsets) const {
  return ops::GroupedLinear(ops::SwiGlu(ops::GroupedLinear(rows, offsets, gate_up_)), offsets,
                            down_);
}

at::Tensor RoutedExperts::Forward(const at::Tensor& x, const Routing& routing) const {
  if (are_stacked_ && ops::CanGroupOnDevice(x)) {
    const auto order = ops::ExpertRows::OnDevice(
        routing.experts, num_experts_, held_.Begin(num_experts_), held_.Size(num_experts_));
    const at::Tensor outputs = Outputs(ops::GatherExpertRows(x, order), order.device_offsets);
    return ops::CombineExpertRows(outputs, routing.weights, order);
  }
  if (group_ == nullptr) {
    const auto order = ops::ExpertRows::OfRange(
        routing.experts, num_experts_, held_.Begin(num_experts_), held_.Size(num_experts_));
    const at::Tensor outputs = Outputs(ops::GatherExpertRows(x, order), order.offsets);
    return ops::CombineExpertRows(outputs, routing.weights, order);
  }
  const auto order = ops::ExpertRows::Of(routing.experts, num_experts_);
  const auto exchange = ops::ExpertExchange::Start(order.offsets, group_, x.device());
  const at::Tensor rows = ops::DispatchRows(ops::GatherExpertRows(x, order), exchange);
  const at::Tensor outputs =
      ops::ReturnRows(Outputs(rows, exchange->offsets()), rows, train_, exchange);
  return ops::CombineExpertRows(outputs, routing.weights, order);
}

}  // namespace tandem
