#include "common/ops/experts/expert_exchange.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <utility>

#include "common/ops/linear/saved_object.h"
#include "common/tensor/aten/device_copies.h"

namespace tandem::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

using Exchange = std::shared_ptr<const ExpertExchange>;

const ExpertExchange& ExchangeOf(AutogradContext& context) {
  return *SavedObject<const ExpertExchange>(context.saved_data["exchange"]);
}

class DispatchFunction : public Function<DispatchFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& rows,
                            const Exchange& exchange) {
    context->saved_data["exchange"] = SaveObject(exchange);
    return exchange->Dispatch(rows);
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    return {ExchangeOf(*context).Return(gradients[0]), {}};
  }
};

class ReturnFunction : public Function<ReturnFunction> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& outputs,
                            const at::Tensor& /*anchor*/, const Exchange& exchange) {
    context->saved_data["exchange"] = SaveObject(exchange);
    return exchange->Return(outputs);
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    return {ExchangeOf(*context).Dispatch(gradients[0]), {}, {}};
  }
};

}  // namespace

std::shared_ptr<const ExpertExchange> ExpertExchange::Start(
    const std::vector<int64_t>& offsets, std::shared_ptr<ExpertParallelGroup> group,
    at::Device device) {
  const std::shared_ptr<ExpertExchange> exchange(new ExpertExchange(std::move(group)));
  ExpertParallelGroup& ranks = *exchange->group_;
  const auto num_experts = static_cast<int64_t>(offsets.size()) - 1;
  TORCH_CHECK(num_experts % ranks.size() == 0, ranks.size(), " ranks do not divide ", num_experts,
              " experts");
  const auto num_ranks = static_cast<size_t>(ranks.size());
  const auto own = static_cast<size_t>(num_experts / ranks.size());
  at::Tensor counts = at::empty({num_experts}, at::kLong);
  auto* const count = counts.mutable_data_ptr<int64_t>();
  for (size_t e = 0; e + 1 < offsets.size(); ++e) count[e] = offsets[e + 1] - offsets[e];
  const std::vector<int64_t> own_of_each(num_ranks, static_cast<int64_t>(own));
  // [n, E / n]
  const at::Tensor received = ranks.AllToAll(CopyToDevice(counts, device), own_of_each, own_of_each)
                                  .to(at::kCPU)
                                  .contiguous();
  const auto* const rows = received.const_data_ptr<int64_t>();

  std::vector<int64_t> begins;  // of each rank's rows of each expert, [n, E / n]
  int64_t total = 0;
  for (size_t r = 0; r < num_ranks; ++r) {
    exchange->sent_.push_back(offsets[(r + 1) * own] - offsets[r * own]);
    const int64_t before = total;
    for (size_t e = 0; e < own; ++e) {
      begins.push_back(total);
      total += rows[r * own + e];
    }
    exchange->received_.push_back(total - before);
  }
  at::Tensor order = at::empty({total}, at::kLong);
  auto* next = order.mutable_data_ptr<int64_t>();
  exchange->offsets_ = {0};
  for (size_t e = 0; e < own; ++e) {
    int64_t end = exchange->offsets_.back();
    for (size_t i = e; i < num_ranks * own; i += own) {
      for (int64_t row = 0; row < rows[i]; ++row) *next++ = begins[i] + row;
      end += rows[i];
    }
    exchange->offsets_.push_back(end);
  }
  exchange->order_ = CopyToDevice(order, device);
  return exchange;
}

at::Tensor ExpertExchange::Dispatch(const at::Tensor& rows) const {
  return group_->AllToAll(rows.contiguous(), sent_, received_).index_select(0, order_);
}

at::Tensor ExpertExchange::Return(const at::Tensor& rows) const {
  const at::Tensor by_rank = at::empty_like(rows, at::MemoryFormat::Contiguous);
  by_rank.index_copy_(0, order_, rows);
  return group_->AllToAll(by_rank, received_, sent_);
}

at::Tensor DispatchRows(const at::Tensor& rows, const Exchange& exchange) {
  return DispatchFunction::apply(rows, exchange);
}

at::Tensor ReturnRows(const at::Tensor& outputs, const at::Tensor& dispatched, bool experts_train,
                      const Exchange& exchange) {
  // Autograd calls a backward function only where an input has a gradient. The outputs of no rows
  // have none, while other ranks wait for this one.
  at::Tensor anchor = dispatched;
  if (experts_train && at::GradMode::is_enabled() && !dispatched.requires_grad()) {
    anchor = at::empty({0}, outputs.options()).requires_grad_();
  }
  return ReturnFunction::apply(outputs, anchor, exchange);
}

}  // namespace tandem::ops
