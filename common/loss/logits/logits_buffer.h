// The memory in which a loss has its logits.
#ifndef TANDEM_COMMON_LOSS_LOGITS_LOGITS_BUFFER_H_
#define TANDEM_COMMON_LOSS_LOGITS_LOGITS_BUFFER_H_

#include <ATen/ATen.h>

#include <cstdint>

namespace tandem::loss {

// Memory that is kept from call to call, because fresh memory is slow. Losses of one output layer
// that run one after the other may share it: none reads what a call before has left there.
class LogitsBuffer {
 public:
  // Returns at least `numel` values.
  const at::Tensor& AtLeast(int64_t numel, const at::TensorOptions& options) {
    if (!memory_.defined() || memory_.numel() < numel) {
      memory_.reset();  // before there is a larger one
      memory_ = at::empty({numel}, options);
    }
    return memory_;
  }

 private:
  at::Tensor memory_;
};

}  // namespace tandem::loss

#endif  // TANDEM_COMMON_LOSS_LOGITS_LOGITS_BUFFER_H_
