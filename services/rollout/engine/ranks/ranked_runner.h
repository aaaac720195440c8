// The runner of a lane whose model is sharded over ranks: rank 0 announces a pass, and all ranks
// compute it. Ranks do not compare outcomes: an error of the request (a bad block, a bad token) is
// the same on every rank, and any other error ends the server.
#ifndef TANDEM_SERVICES_ROLLOUT_ENGINE_RANKS_RANKED_RUNNER_H_
#define TANDEM_SERVICES_ROLLOUT_ENGINE_RANKS_RANKED_RUNNER_H_

#include <cstdint>
#include <list>
#include <map>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "common/coauthoring/author.h"
#include "common/model/vision/prompt_images.h"
#include "common/ranks/server_ranks.h"
#include "services/rollout/engine/models/model_runner.h"
#include "services/rollout/engine/models/torch_runner.h"

namespace tandem::rollout {

// The name of the command whose request is a RankedPass.
inline constexpr char kPassCommand[] = "pass";

// A pass without what rank 0 alone does with its rows.
struct RankedPass {
  // A DecodeInput that owns its values, and names the images by their id.
  struct Sequence {
    std::vector<int32_t> blocks;
    int64_t start = 0;
    std::vector<int32_t> tokens;
    std::vector<int64_t> output_rows;
    bool records_routing = false;
    uint64_t images = 0;  // PromptImages::id; 0: text alone
  };
  Author lane = Author::kSenior;
  std::vector<BlockCopy> copies;
  std::vector<Sequence> sequences;
  // Images that the other ranks do not hold yet, and ids of those that they can drop.
  std::vector<PromptImages> new_images;
  std::vector<uint64_t> dropped_images;
};

// The runner on rank 0.
class RankedRunner : public ModelRunner {
 public:
  // Bound for the pixels that other ranks hold beside those of the pass that runs.
  static constexpr int64_t kMaxHeldBytes = 256 << 20;

  // `shard` runs rank 0's shard of the lane's model. Both outlive the runner.
  RankedRunner(Author lane, ranks::ServerRanks* ranks, TorchRunner* shard);

  absl::Status Run(const Pass& pass, PassResults& results) override;
  // Runs on rank 0 alone, which has the hidden states that every rank has.
  absl::Status Draft(std::span<const DraftRequest> requests, int64_t count,
                     std::vector<int32_t>& drafts) override {
    return shard_->Draft(requests, count, drafts);
  }
  // Runs on rank 0 alone, which has what every rank has recorded.
  absl::Status ReadRouting(std::span<const int32_t> blocks, int64_t count,
                           TokenExperts& experts) override {
    return shard_->ReadRouting(blocks, count, experts);
  }

 private:
  // Images that the other ranks hold.
  struct HeldImages {
    uint64_t id = 0;
    int64_t bytes = 0;
  };

  // Adds to the pass what the other ranks need of its images.
  void AnnounceImages(const Pass& pass, RankedPass& announced);

  ranks::ServerRanks* const ranks_;
  TorchRunner* const shard_;
  const Author lane_;
  std::list<HeldImages> held_;  // those that were read least recently are at the front
  int64_t held_bytes_ = 0;
};

// Executes `pass` on a rank other than 0, which holds `images` by id from pass to pass. Errors of
// TorchRunner, but for those of the request.
absl::Status FollowPass(const RankedPass& pass, TorchRunner& shard,
                        std::map<uint64_t, PromptImages>& images);

}  // namespace tandem::rollout

#endif  // TANDEM_SERVICES_ROLLOUT_ENGINE_RANKS_RANKED_RUNNER_H_
