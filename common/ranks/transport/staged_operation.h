// Operations of Gloo on tensors of a GPU, which travel through the host's memory.
#ifndef TANDEM_COMMON_RANKS_TRANSPORT_STAGED_OPERATION_H_
#define TANDEM_COMMON_RANKS_TRANSPORT_STAGED_OPERATION_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <utility>
#include <vector>

namespace tandem::ranks {

// One operation. As one of NCCL it has a stream of its own, which begins behind what the current
// stream has to do, and at the end the current stream waits for it: code that lacks a wait is as
// wrong with Gloo as it is with NCCL. The tensors live until the end.
class StagedOperation {
 public:
  explicit StagedOperation(c10::Device device);
  // Lets the current stream wait for an operation that did not end.
  ~StagedOperation();
  StagedOperation(const StagedOperation&) = delete;
  StagedOperation& operator=(const StagedOperation&) = delete;

  // Return the host's memory for a tensor that the operation reads, writes, or both.
  at::Tensor Read(const at::Tensor& tensor);
  at::Tensor Write(const at::Tensor& tensor);
  at::Tensor Update(const at::Tensor& tensor);

  // Copies back what the host has received.
  void End();

 private:
  void LetCurrentStreamWait();

  const c10::Stream stream_;
  std::vector<at::Tensor> read_;
  std::vector<std::pair<at::Tensor, at::Tensor>> written_;  // on the device, and on the host
  bool ended_ = false;
};

}  // namespace tandem::ranks

#endif  // TANDEM_COMMON_RANKS_TRANSPORT_STAGED_OPERATION_H_
