// An engine's part of weight updates that records what it is told.
#ifndef TANDEM_COMMON_WEIGHTS_TESTING_TOLD_WEIGHTS_H_
#define TANDEM_COMMON_WEIGHTS_TESTING_TOLD_WEIGHTS_H_

#include <cstddef>
#include <memory>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "common/weights/staged_weight_receiver.h"

namespace tandem {

// A record of the updates of a receiver, and the statuses that it gets.
struct Told {
  std::vector<std::byte> added;    // the tensors of the last update
  std::vector<std::byte> applied;  // those of the update in force
  absl::Status add_status, apply_status;
  std::thread::id adder;
  int alive = 0;  // parts of updates that have not ended
};

// `told` outlives it.
class ToldWeights : public NextWeights {
 public:
  explicit ToldWeights(Told& told) : told_(told) {
    told_.added.clear();
    ++told_.alive;
  }
  ~ToldWeights() override { --told_.alive; }

  absl::Status Add(const WeightSpec& spec, TensorBytes bytes) override {
    told_.adder = std::this_thread::get_id();
    told_.added.insert(told_.added.end(), bytes.get(), bytes.get() + spec.bytes());
    return told_.add_status;
  }
  absl::Status Apply(const WeightManifest&, const CallScope&) override {
    if (told_.apply_status.ok()) told_.applied = told_.added;
    return told_.apply_status;
  }

 private:
  Told& told_;
};

inline StagedWeightReceiver::Start Tell(Told& told) {
  return [&told] { return std::make_unique<ToldWeights>(told); };
}

}  // namespace tandem

#endif  // TANDEM_COMMON_WEIGHTS_TESTING_TOLD_WEIGHTS_H_
