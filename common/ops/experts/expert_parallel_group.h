// Exchanges of rows between the ranks that hold the experts of one model
// (https://arxiv.org/abs/2006.16668). The interface is in common/ops because the decoder needs it;
// common/ranks implements it.
#ifndef TANDEM_COMMON_OPS_EXPERTS_EXPERT_PARALLEL_GROUP_H_
#define TANDEM_COMMON_OPS_EXPERTS_EXPERT_PARALLEL_GROUP_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace tandem::ops {

// All ranks call the same methods in the same order, with tensors on the device of the model.
// Methods that move tensors throw c10::Error; then the group is unusable.
class ExpertParallelGroup {
 public:
  virtual ~ExpertParallelGroup() = default;

  virtual int64_t size() const = 0;
  virtual int64_t rank() const = 0;

  // Sends the next sent[r] of `rows` [sum of sent, ...] to each rank r, and returns those that the
  // ranks sent here, received[r] from rank r: [sum of received, ...].
  virtual at::Tensor AllToAll(const at::Tensor& rows, const std::vector<int64_t>& sent,
                              const std::vector<int64_t>& received) = 0;
};

}  // namespace tandem::ops

#endif  // TANDEM_COMMON_OPS_EXPERTS_EXPERT_PARALLEL_GROUP_H_
