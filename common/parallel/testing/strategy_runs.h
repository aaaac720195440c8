// Training of a tiny model under any strategy, for comparing them.
#ifndef TANDEM_COMMON_PARALLEL_TESTING_STRATEGY_RUNS_H_
#define TANDEM_COMMON_PARALLEL_TESTING_STRATEGY_RUNS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "common/model/model.h"
#include "common/parallel/strategy.h"

namespace tandem::parallel {

// Loads `directory` for training. Aborts on an error, as all of these do.
void Prepare(Strategy& strategy, const std::string& directory, const LoadOptions& load = {},
             const OptimizerOptions& optimizer = {});

struct StepNumbers {
  double loss = 0;
  double longest = 0;  // a maximum: tokens of the longest micro-batch
  double grad_norm = 0;
};

// One step on the batch of `seed`: `micro_batches` of sequences of different lengths; the mean
// cross-entropy of a language model, or squared error of a critic.
StepNumbers Step(Strategy& strategy, int64_t micro_batches, uint64_t seed);

std::vector<StepNumbers> Steps(Strategy& strategy, int count, int64_t micro_batches = 5);

// Copies, on rank 0; none on the others.
NamedTensors WholeParameters(Strategy& strategy);

// Log-probabilities or values of the batch of `seed`.
std::vector<std::vector<double>> Outputs(Strategy& strategy, int64_t micro_batches, uint64_t seed);

}  // namespace tandem::parallel

#endif  // TANDEM_COMMON_PARALLEL_TESTING_STRATEGY_RUNS_H_
