// A ModelRunner without tensors. Its logits are a hash of all consumed tokens, so a wrong cursor,
// slot or prefix shows at once.
#ifndef TANDEM_SERVICES_ROLLOUT_ENGINE_TESTING_FAKE_RUNNER_H_
#define TANDEM_SERVICES_ROLLOUT_ENGINE_TESTING_FAKE_RUNNER_H_

#include <algorithm>
#include <cstdint>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "services/rollout/engine/model_runner.h"

namespace tandem::rollout {

class FakeRunner : public ModelRunner {
 public:
  FakeRunner(uint64_t weights, int32_t vocab_size, int64_t num_slots = 1024)
      : weights_(weights), vocab_size_(vocab_size), num_slots_(num_slots) {}

  // Returns the row of logits after `tokens`.
  std::vector<float> Logits(std::span<const int32_t> tokens) const {
    uint64_t state = weights_ * 0x9E3779B97F4A7C15;
    for (const int32_t token : tokens) state = Mix(state ^ static_cast<uint64_t>(token + 1));
    std::vector<float> logits(vocab_size_);
    for (int32_t id = 0; id < vocab_size_; ++id) {
      logits[id] = static_cast<float>(Mix(state + id) % 4096) / 1024.0f;
    }
    return logits;
  }

  absl::StatusOr<int64_t> AllocateSlot() override {
    if (static_cast<int64_t>(slots_.size()) == num_slots_) {
      return absl::ResourceExhaustedError("slots");
    }
    slots_[next_slot_] = {};
    return next_slot_++;
  }
  void FreeSlot(int64_t slot) override { slots_.erase(slot); }
  absl::Status Truncate(int64_t slot, int64_t length) override {
    slots_.at(slot).resize(length);
    return std::exchange(fail_next_truncate, absl::OkStatus());
  }
  absl::Status CopyPrefix(int64_t from, int64_t to, int64_t length) override {
    const std::vector<int32_t>& source = slots_.at(from);
    slots_.at(to).assign(source.begin(), source.begin() + length);
    return std::exchange(fail_next_copy, absl::OkStatus());
  }
  absl::Status Forward(std::span<const RunnerInput> inputs, const RowSink& sink) override {
    ++passes;
    int64_t pass_tokens = 0;
    for (size_t i = 0; i < inputs.size(); ++i) {
      std::vector<int32_t>& held = slots_.at(inputs[i].slot);
      held.insert(held.end(), inputs[i].tokens.begin(), inputs[i].tokens.end());
      pass_tokens += static_cast<int64_t>(inputs[i].tokens.size());
    }
    consumed += pass_tokens;
    largest_pass = std::max(largest_pass, pass_tokens);
    if (!fail_next.ok()) return std::exchange(fail_next, absl::OkStatus());
    for (size_t i = 0; i < inputs.size(); ++i) {
      const std::vector<int32_t>& held = slots_.at(inputs[i].slot);
      for (int64_t row = 0; row < inputs[i].num_output_rows; ++row) {
        const size_t length = held.size() - inputs[i].num_output_rows + row + 1;
        sink(static_cast<int64_t>(i), row, Logits(std::span(held).first(length)));
      }
    }
    return absl::OkStatus();
  }

  void set_weights(uint64_t weights) { weights_ = weights; }
  int64_t slots_in_use() const { return static_cast<int64_t>(slots_.size()); }

  int64_t passes = 0;
  int64_t consumed = 0;
  int64_t largest_pass = 0;
  absl::Status fail_next;
  absl::Status fail_next_copy;
  absl::Status fail_next_truncate;

 private:
  static uint64_t Mix(uint64_t x) {
    x ^= x >> 33;
    x *= 0xFF51AFD7ED558CCD;
    x ^= x >> 33;
    x *= 0xC4CEB9FE1A85EC53;
    return x ^ x >> 33;
  }

  uint64_t weights_;
  const int32_t vocab_size_;
  const int64_t num_slots_;
  int64_t next_slot_ = 0;
  std::map<int64_t, std::vector<int32_t>> slots_;
};

}  // namespace tandem::rollout

#endif  // TANDEM_SERVICES_ROLLOUT_ENGINE_TESTING_FAKE_RUNNER_H_
