// For tests: trains a tiny model under any strategy, to compare strategies.
#ifndef TANDEM_COMMON_PARALLEL_TESTING_STRATEGY_RUNS_H_
#define TANDEM_COMMON_PARALLEL_TESTING_STRATEGY_RUNS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "common/model/model.h"
#include "common/optim/optimizer_options.h"
#include "common/parallel/strategy.h"

namespace tandem::parallel {

// An optimizer that moves parameters far, clips and decays.
inline OptimizerOptions FastOptimizer() {
  return {.learning_rate = 1e-2,
          .beta1 = 0.9,
          .beta2 = 0.999,
          .epsilon = 1e-8,
          .max_grad_norm = 0.5,
          .weight_decay = 0.1};
}

// Loads the model in `directory` for training on ranks::DeviceOfTests(). All functions here abort
// on an error.
void Prepare(Strategy& strategy, const std::string& directory, const LoadOptions& load = {},
             const OptimizerOptions& optimizer = FastOptimizer());

struct StepNumbers {
  double loss = 0;
  double longest = 0;  // a maximum: tokens of the longest micro-batch
  double grad_norm = 0;
  double router_loss = 0;  // both losses of the routers, with their coefficients
};

// Does one step on the batch of `seed`: `micro_batches` of sequences of different lengths. The loss
// is the mean cross-entropy of a language model, or the squared error of a critic; for a model with
// experts also both losses of its routers.
StepNumbers Step(Strategy& strategy, int64_t micro_batches, uint64_t seed);

std::vector<StepNumbers> Steps(Strategy& strategy, int count, int64_t micro_batches = 5);

// Returns copies of the whole parameters on rank 0, nothing on the other ranks.
NamedTensors WholeParameters(Strategy& strategy);

// Returns log-probabilities or values of the batch of `seed`.
std::vector<std::vector<double>> Outputs(Strategy& strategy, int64_t micro_batches, uint64_t seed);

}  // namespace tandem::parallel

#endif  // TANDEM_COMMON_PARALLEL_TESTING_STRATEGY_RUNS_H_
