// The runner of a lane whose model is sharded over ranks: rank 0 announces a pass, and all ranks
// compute it. Ranks do not compare outcomes: an error of the request (a bad slot, too many tokens)
// is the same on every rank, and any other error ends the server.
#ifndef TANDEM_SERVICES_ROLLOUT_ENGINE_RANKED_RUNNER_H_
#define TANDEM_SERVICES_ROLLOUT_ENGINE_RANKED_RUNNER_H_

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/ranks/server_ranks.h"
#include "common/tandem/authorship_mask.h"
#include "services/rollout/engine/model_runner.h"
#include "services/rollout/engine/torch_runner.h"

namespace tandem::rollout {

// The name of the command whose request is a RankedPass.
inline constexpr char kPassCommand[] = "pass";

// A change of the slots of a KV cache.
struct SlotChange {
  enum class Kind : uint8_t { kAllocate, kFree, kTruncate, kCopyPrefix };
  Kind kind = Kind::kAllocate;
  int64_t slot = 0;
  int64_t from = 0;    // kCopyPrefix
  int64_t length = 0;  // kTruncate, kCopyPrefix
};

// A pass, and the changes of slots since the last pass.
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

// The runner on rank 0.
class RankedRunner : public ModelRunner {
 public:
  // `shard` runs rank 0's shard of the lane's model. Both outlive the runner.
  RankedRunner(Author lane, ranks::ServerRanks* ranks, TorchRunner* shard);

  absl::StatusOr<int64_t> AllocateSlot() override;
  void FreeSlot(int64_t slot) override;
  absl::Status Truncate(int64_t slot, int64_t length) override;
  absl::Status CopyPrefix(int64_t from, int64_t to, int64_t length) override;
  absl::Status Forward(std::span<const RunnerInput> inputs, const RowSink& sink) override;

 private:
  ranks::ServerRanks* const ranks_;
  TorchRunner* const shard_;
  RankedPass next_;  // collects the changes for the next announcement
};

// Executes `pass` on a rank other than 0. INTERNAL, or the errors of TorchRunner, if this rank's
// slots are not those of rank 0.
absl::Status FollowPass(const RankedPass& pass, TorchRunner& shard);

}  // namespace tandem::rollout

#endif  // TANDEM_SERVICES_ROLLOUT_ENGINE_RANKED_RUNNER_H_
