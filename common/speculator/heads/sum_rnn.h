// The recurrence of the MLP speculator, which the method "sum_rnn" of the Arctic LSTM speculator
// has too, under other names of files:
//   state = GELU(ln_i(proj_i(state) + factor emb_i(token))), logits_i = head_i(state).
#ifndef TANDEM_COMMON_SPECULATOR_HEADS_SUM_RNN_H_
#define TANDEM_COMMON_SPECULATOR_HEADS_SUM_RNN_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "common/speculator/heads/recurrence.h"
#include "common/speculator/speculator.h"

namespace tandem::speculator {

struct SumRnnOptions {
  SpeculatorSizes sizes;
  // Whether the steps share embedding, norm and head, and those after the first a projection.
  bool tie_weights = false;
  bool scale_input = false;
  // Names in files are "emb.<step><infix>.weight", the same for proj and ln.
  std::string infix;
  // Whether files repeat what is tied under the name of each step. Heads always are.
  bool files_repeat = false;
  // Returns the standard deviation of the initial values of a matrix of this shape.
  std::function<double(const std::vector<int64_t>& shape)> initializer_range;
};

// Returns the parameters, heads included.
std::vector<SpeculatorParameterSpec> SumRnnParameters(const SumRnnOptions& options);

class SumRnn {
 public:
  // The parameters of `speculator`, which declared them with the same options.
  SumRnn(const SumRnnOptions& options, const Speculator& speculator);

  std::unique_ptr<SpeculatorPass> Begin(const at::Tensor& hidden) const;

 private:
  class Pass;
  struct Step {
    at::Tensor embedding, projection;
    NormWeights norm;
  };

  const bool scale_input_;
  const double factor_;
  std::vector<Step> steps_;
};

}  // namespace tandem::speculator

#endif  // TANDEM_COMMON_SPECULATOR_HEADS_SUM_RNN_H_
