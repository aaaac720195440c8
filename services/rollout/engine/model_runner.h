// The generator's interface to a model: slots that hold sequences, and a ragged forward pass. No
// tensors, so that tests of the generator use a fake.
#ifndef TANDEM_SERVICES_ROLLOUT_ENGINE_MODEL_RUNNER_H_
#define TANDEM_SERVICES_ROLLOUT_ENGINE_MODEL_RUNNER_H_

#include <cstdint>
#include <functional>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace tandem::rollout {

// The tokens that a pass consumes, continuing `slot`. It computes logits of the last
// `num_output_rows` of them (0: none).
struct RunnerInput {
  int64_t slot = 0;
  std::span<const int32_t> tokens;
  int64_t num_output_rows = 0;
};

// Takes one row of logits [V]: output row `row` of input `input`. Threads may call it concurrently
// for different rows. The row is valid during the call.
using RowSink = std::function<void(int64_t input, int64_t row, std::span<const float> logits)>;

class ModelRunner {
 public:
  virtual ~ModelRunner() = default;

  // Returns an empty slot. RESOURCE_EXHAUSTED if all slots are taken.
  virtual absl::StatusOr<int64_t> AllocateSlot() = 0;
  virtual void FreeSlot(int64_t slot) = 0;
  // Forgets the tokens from `length` on.
  virtual absl::Status Truncate(int64_t slot, int64_t length) = 0;
  // Copies the first `length` tokens of slot `from` into the empty slot `to`.
  virtual absl::Status CopyPrefix(int64_t from, int64_t to, int64_t length) = 0;
  // Runs one pass. After an error, here or above, the slots may only be freed.
  virtual absl::Status Forward(std::span<const RunnerInput> inputs, const RowSink& sink) = 0;
};

}  // namespace tandem::rollout

#endif  // TANDEM_SERVICES_ROLLOUT_ENGINE_MODEL_RUNNER_H_
