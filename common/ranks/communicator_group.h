// A communicator as the group of ranks that hold the shards of one model, or its experts.
#ifndef TANDEM_COMMON_RANKS_COMMUNICATOR_GROUP_H_
#define TANDEM_COMMON_RANKS_COMMUNICATOR_GROUP_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "common/ops/experts/expert_parallel_group.h"
#include "common/ops/shards/tensor_parallel_group.h"
#include "common/ranks/communicator.h"

namespace tandem::ranks {

class CommunicatorGroup : public ops::TensorParallelGroup {
 public:
  // Tensors are on the communicator's device.
  explicit CommunicatorGroup(std::shared_ptr<Communicator> communicator);

  int64_t size() const override { return communicator_->size(); }
  int64_t rank() const override { return communicator_->rank(); }
  at::Tensor AllGather(const at::Tensor& shard) override;
  at::Tensor ReduceScatter(const at::Tensor& whole) override;
  at::Tensor Sum(const at::Tensor& values) override;
  at::Tensor Max(const at::Tensor& values) override;

 private:
  const std::shared_ptr<Communicator> communicator_;
};

// Tensors are on the communicator's device.
class ExpertCommunicatorGroup : public ops::ExpertParallelGroup {
 public:
  explicit ExpertCommunicatorGroup(std::shared_ptr<Communicator> communicator);

  int64_t size() const override { return communicator_->size(); }
  int64_t rank() const override { return communicator_->rank(); }
  at::Tensor AllToAll(const at::Tensor& rows, const std::vector<int64_t>& sent,
                      const std::vector<int64_t>& received) override;

 private:
  const std::shared_ptr<Communicator> communicator_;
};

}  // namespace tandem::ranks

#endif  // TANDEM_COMMON_RANKS_COMMUNICATOR_GROUP_H_
