// AdamW (arXiv 1711.05101) on fp32 tensors, the numbers of torch.optim.AdamW.
#ifndef TANDEM_COMMON_TRAINING_ADAMW_H_
#define TANDEM_COMMON_TRAINING_ADAMW_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "common/tensor/named_tensors.h"
#include "common/training/optimizer_options.h"

namespace tandem::training {

class AdamW {
 public:
  // Weight decay applies to matrices (two dimensions or more), not to norms and biases. The
  // parameters are updated in place; moments are allocated here, in fp32.
  AdamW(const NamedTensors& parameters, const OptimizerOptions& options);

  // One update. `gradients` parallel to the parameters. May throw c10::Error.
  void Step(const std::vector<at::Tensor>& gradients, double learning_rate);

  int64_t steps() const { return steps_; }

  // "<parameter>.exp_avg", "<parameter>.exp_avg_sq" and "optimizer.steps" (int64 scalar). The
  // tensors share memory with the optimizer.
  NamedTensors State() const;
  // Copies a state in. DATA_LOSS names the tensor that is missing, unexpected, mis-shaped, or holds
  // what no update leaves (numbers that are not finite, a negative second moment or number of
  // steps); then nothing has changed.
  absl::Status LoadState(const NamedTensors& state);
  // As if no update had been done.
  void Reset();

 private:
  struct Group {
    double weight_decay = 0;
    std::vector<size_t> members;  // indices of parameters
  };

  OptimizerOptions options_;
  NamedTensors parameters_;
  std::vector<at::Tensor> exp_avg_, exp_avg_sq_;
  std::vector<Group> groups_;
  int64_t steps_ = 0;
};

// The Euclidean norm of all gradients together, summed in double.
double GlobalNorm(const std::vector<at::Tensor>& gradients);

}  // namespace tandem::training

#endif  // TANDEM_COMMON_TRAINING_ADAMW_H_
