#include "common/ranks/communicator_group.h"

#include <ATen/ATen.h>

#include <numeric>
#include <utility>
#include <vector>

namespace tandem::ranks {
namespace {

at::Tensor EmptyRows(int64_t rows, const at::Tensor& like) {
  std::vector<int64_t> shape = like.sizes().vec();
  shape[0] = rows;
  return at::empty(shape, like.options().requires_grad(false));
}

at::Tensor AllReduced(Communicator& communicator, const at::Tensor& values, Reduction reduction) {
  at::Tensor result = values.clone(at::MemoryFormat::Contiguous);
  communicator.AllReduce(result, reduction);
  return result;
}

}  // namespace

CommunicatorGroup::CommunicatorGroup(std::shared_ptr<Communicator> communicator)
    : communicator_(std::move(communicator)) {}

at::Tensor CommunicatorGroup::AllGather(const at::Tensor& shard) {
  at::Tensor whole = EmptyRows(shard.size(0) * size(), shard);
  communicator_->AllGather(whole, shard);
  return whole;
}

at::Tensor CommunicatorGroup::ReduceScatter(const at::Tensor& whole) {
  at::Tensor shard = EmptyRows(whole.size(0) / size(), whole);
  communicator_->ReduceScatter(shard, whole);
  return shard;
}

at::Tensor CommunicatorGroup::Sum(const at::Tensor& values) {
  return AllReduced(*communicator_, values, Reduction::kSum);
}

at::Tensor CommunicatorGroup::Max(const at::Tensor& values) {
  return AllReduced(*communicator_, values, Reduction::kMax);
}

ExpertCommunicatorGroup::ExpertCommunicatorGroup(std::shared_ptr<Communicator> communicator)
    : communicator_(std::move(communicator)) {}

at::Tensor ExpertCommunicatorGroup::AllToAll(const at::Tensor& rows,
                                             const std::vector<int64_t>& sent,
                                             const std::vector<int64_t>& received) {
  const int64_t count = std::accumulate(received.begin(), received.end(), int64_t{0});
  at::Tensor output = EmptyRows(count, rows);
  communicator_->AllToAll(output, rows, sent, received);
  return output;
}

}  // namespace tandem::ranks
