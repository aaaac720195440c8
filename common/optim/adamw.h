// AdamW (arXiv 1711.05101) on fp32 tensors, with the results of torch.optim.AdamW.
#ifndef TANDEM_COMMON_OPTIM_ADAMW_H_
#define TANDEM_COMMON_OPTIM_ADAMW_H_

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "common/optim/optimizer_options.h"
#include "common/tensor/aten/named_tensors.h"

namespace tandem::training {

// Suffixes of the names of a parameter's two moments, and the name of the number of updates.
inline constexpr char kFirstMoment[] = ".exp_avg";
inline constexpr char kSecondMoment[] = ".exp_avg_sq";
inline constexpr char kOptimizerSteps[] = "optimizer.steps";

// A tensor that the optimizer updates in place: a parameter, or a shard of one.
struct AdamWParameter {
  std::string name;
  at::Tensor values;   // float32
  bool decays = true;  // whether weight decay applies (DecaysWeight)
};

// Whether weight decay applies to a parameter: to matrices (two dimensions or more), not to norms
// and biases.
inline bool DecaysWeight(int64_t dimensions) { return dimensions >= 2; }

class AdamW {
 public:
  // Allocates both moments in fp32, on the device of the values.
  AdamW(std::vector<AdamWParameter> parameters, const OptimizerOptions& options);

  // Makes one update; `gradients` are parallel to the parameters. May throw c10::Error.
  void Step(const std::vector<at::Tensor>& gradients, double learning_rate) {
    Step(gradients, learning_rate, options_);
  }
  // The same with other betas, epsilon and weight decay than the constructor's. The learning rate
  // is that of the argument.
  void Step(const std::vector<at::Tensor>& gradients, double learning_rate,
            const OptimizerOptions& options);

  int64_t steps() const { return steps_; }

  // Returns the moments of every parameter and the number of updates (int64 scalar). The tensors
  // share memory with the optimizer.
  NamedTensors State() const;
  // Copies a state in. DATA_LOSS names the tensor that is missing, unexpected, of another size, or
  // holds numbers that no update leaves (not finite, a negative second moment or number of steps);
  // then nothing has changed.
  absl::Status LoadState(const NamedTensors& state);
  // Returns the error that LoadState would return, and copies nothing.
  absl::Status CheckState(const NamedTensors& state) const;
  // Sets moments and the number of updates to 0.
  void Reset();

 private:
  struct Group {
    bool decays = false;
    std::vector<size_t> members;  // indices of parameters
  };

  OptimizerOptions options_;
  std::vector<AdamWParameter> parameters_;
  std::vector<at::Tensor> exp_avg_, exp_avg_sq_;
  std::vector<Group> groups_;
  int64_t steps_ = 0;
};

// Returns the Euclidean norm of all gradients together, summed in double.
double GlobalNorm(const std::vector<at::Tensor>& gradients);

}  // namespace tandem::training

#endif  // TANDEM_COMMON_OPTIM_ADAMW_H_
