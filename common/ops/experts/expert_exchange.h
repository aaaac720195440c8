// The way of rows to the ranks that hold their experts, and back (expert parallelism,
// https://arxiv.org/abs/2006.16668). Each of n ranks holds E / n consecutive experts of a layer.
//
//   const auto exchange = ExpertExchange::Start(order.offsets, group, device);
//   const at::Tensor received = DispatchRows(rows, exchange);
//   const at::Tensor outputs = ...;  // of the received rows, by exchange->offsets()
//   const at::Tensor returned = ReturnRows(outputs, received, trains, exchange);
//
// There is no capacity: every row is sent, those of the rank's own experts to itself. A layer sends
// 8 E / n bytes to each other rank, the numbers of rows, and the rows of other ranks' experts there
// and back. The backward pass sends the rows' gradients the same two ways.
#ifndef TANDEM_COMMON_OPS_EXPERTS_EXPERT_EXCHANGE_H_
#define TANDEM_COMMON_OPS_EXPERTS_EXPERT_EXCHANGE_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "common/ops/experts/expert_parallel_group.h"

namespace tandem::ops {

// All methods that move rows are collective over the group, and throw c10::Error.
class ExpertExchange {
 public:
  // Tells every rank how many rows its experts get. `offsets` [E + 1] say where the rows of each
  // expert begin among this rank's rows, which are on `device`. Throws c10::Error if the ranks do
  // not divide the experts.
  static std::shared_ptr<const ExpertExchange> Start(const std::vector<int64_t>& offsets,
                                                     std::shared_ptr<ExpertParallelGroup> group,
                                                     at::Device device);

  // [E / n + 1]: where the rows of each of this rank's experts begin among the dispatched rows. The
  // rows of an expert are those of rank 0, then of rank 1, and so on.
  const std::vector<int64_t>& offsets() const { return offsets_; }

  // Sends this rank's rows [N, ...], sorted by expert, and returns those of its own experts
  // [R, ...], sorted by expert. Without a gradient.
  at::Tensor Dispatch(const at::Tensor& rows) const;
  // The inverse of Dispatch: [R, ...] -> [N, ...].
  at::Tensor Return(const at::Tensor& rows) const;

 private:
  explicit ExpertExchange(std::shared_ptr<ExpertParallelGroup> group) : group_(std::move(group)) {}

  const std::shared_ptr<ExpertParallelGroup> group_;
  std::vector<int64_t> sent_, received_;  // [n] numbers of rows, by rank
  std::vector<int64_t> offsets_;
  at::Tensor order_;  // [R] int64: the place of each dispatched row among those received
};

// ExpertExchange::Dispatch, differentiable.
at::Tensor DispatchRows(const at::Tensor& rows,
                        const std::shared_ptr<const ExpertExchange>& exchange);

// ExpertExchange::Return of the experts' `outputs` for the `dispatched` rows, differentiable.
// `experts_train` says whether any expert of the layer has a gradient, on this rank or another.
// Then, and where the dispatched rows have one, this rank takes part in the exchange of the
// backward pass, though it may have no row itself.
at::Tensor ReturnRows(const at::Tensor& outputs, const at::Tensor& dispatched, bool experts_train,
                      const std::shared_ptr<const ExpertExchange>& exchange);

}  // namespace tandem::ops

#endif  // TANDEM_COMMON_OPS_EXPERTS_EXPERT_EXCHANGE_H_
