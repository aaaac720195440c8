// A lane whose model is shared out among ranks: rank 0 says what it is about to compute, and all
// compute it. On the way nobody asks whether the others could: an error of the request (a bad slot,
// too many tokens) is every rank's, and any other one ends the server.
#ifndef TANDEM_SERVICES_ROLLOUT_ENGINE_RANKED_RUNNER_H_
#define TANDEM_SERVICES_ROLLOUT_ENGINE_RANKED_RUNNER_H_

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/parallel/server_ranks.h"
#include "common/tandem/authorship_mask.h"
#include "services/rollout/engine/model_runner.h"
#include "services/rollout/engine/torch_runner.h"

namespace tandem::rollout {

// The name of the command whose request is a RankedPass.
inline constexpr char kPassCommand[] = "pass";

// Something that happened to the slots of a KV cache.
struct SlotChange {
  enum class Kind : uint8_t { kAllocate, kFree, kTruncate, kCopyPrefix };
  Kind kind = Kind::kAllocate;
  int64_t slot = 0;
  int64_t from = 0;    // kCopyPrefix
  int64_t length = 0;  // kTruncate, kCopyPrefix
};

// A pass, and what happened to the slots since the last one.
struct RankedPass {
  struct Input {
    int64_t slot = 0;
    std::vector<int32_t> tokens;
    int64_t num_output_rows = 0;
  };
  Author lane = Author::kSenior;
  std::vector<SlotChange> changes;
  std::vector<Input> inputs;
};

// Rank 0's.
class RankedRunner : public ModelRunner {
 public:
  // `shard` is rank 0's part of the lane's model. Both outlive the runner.
  RankedRunner(Author lane, parallel::ServerRanks* ranks, TorchRunner* shard);

  absl::StatusOr<int64_t> AllocateSlot() override;
  void FreeSlot(int64_t slot) override;
  absl::Status Truncate(int64_t slot, int64_t length) override;
  absl::Status CopyPrefix(int64_t from, int64_t to, int64_t length) override;
  absl::Status Forward(std::span<const RunnerInput> inputs, const RowSink& sink) override;

 private:
  parallel::ServerRanks* const ranks_;
  TorchRunner* const shard_;
  RankedPass next_;  // what the others have not heard of
};

// Does on another rank what rank 0 does with `pass`. INTERNAL, or as TorchRunner, if this rank is
// not where rank 0 is any more.
absl::Status FollowPass(const RankedPass& pass, TorchRunner& shard);

}  // namespace tandem::rollout

#endif  // TANDEM_SERVICES_ROLLOUT_ENGINE_RANKED_RUNNER_H_
