// A listener that holds the engine in the middle of a response.
#ifndef TANDEM_SERVICES_ROLLOUT_ENGINE_TESTING_GATE_H_
#define TANDEM_SERVICES_ROLLOUT_ENGINE_TESTING_GATE_H_

#include <gtest/gtest.h>

#include <future>
#include <utility>

#include "services/rollout/engine/types.h"

namespace tandem::rollout {

// Holds the engine thread at the second token of one sample, when the first step is over, until it
// is opened. For a request with stream_tokens.
class Gate final : public PromptListener {
 public:
  void OnTokens(TokensDelta delta) override {
    if (delta.offset != 1) return;
    arrived_.set_value();
    opened_.get_future().wait();
  }
  void OnFinished(Trajectory trajectory, SampleDrafts) override {
    finished_.set_value(std::move(trajectory));
  }
  void OnFailed(absl::Status status) override { ADD_FAILURE() << status; }

  void WaitUntilHeld() { arrived_.get_future().wait(); }
  void Open() { opened_.set_value(); }
  Trajectory WaitUntilFinished() { return finished_.get_future().get(); }

 private:
  std::promise<void> arrived_, opened_;
  std::promise<Trajectory> finished_;
};

}  // namespace tandem::rollout

#endif  // TANDEM_SERVICES_ROLLOUT_ENGINE_TESTING_GATE_H_
