// An engine's part of weight updates that records what it is told.
#ifndef TANDEM_COMMON_WEIGHTS_TESTING_TOLD_WEIGHTS_H_
#define TANDEM_COMMON_WEIGHTS_TESTING_TOLD_WEIGHTS_H_

#include <cstddef>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/base/errors/status_macros.h"
#include "common/base/files/shared_bytes.h"
#include "common/weights/finite_values.h"
#include "common/weights/staged_weight_receiver.h"
#include "common/weights/word_sums.h"

namespace tandem {

// Bytes that pass for memory of a GPU; `bytes` outlives it.
class FakeGpuMemory : public SharedBytes {
 public:
  explicit FakeGpuMemory(const std::string& bytes) : bytes_(bytes) {}
  absl::Status Read(int64_t offset, absl::Span<std::byte> out) const override {
    std::memcpy(out.data(), bytes_.data() + offset, out.size());
    return absl::OkStatus();
  }
  bool on_gpu() const override { return true; }

 private:
  const std::string& bytes_;
};

// A record of the updates of a receiver, and the statuses that it gets.
struct Told {
  std::vector<std::byte> added;    // the tensors of the last update
  std::vector<std::byte> applied;  // those of the update in force
  absl::Status add_status, apply_status;
  std::thread::id adder;
  int shared = 0;  // tensors that were read in memory of a GPU
  int alive = 0;   // parts of updates that have not ended
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
  absl::Status AddShared(const WeightSpec& spec, absl::Span<const SharedRange> ranges) override {
    std::vector<std::byte> bytes(static_cast<size_t>(spec.bytes()));
    absl::Span<std::byte> out = absl::MakeSpan(bytes);
    for (const SharedRange& range : ranges) {
      const auto size = static_cast<size_t>(range.size);
      TANDEM_RETURN_IF_ERROR(range.from->Read(range.offset, out.first(size)));
      out.remove_prefix(size);
    }
    ++told_.shared;
    read_.push_back({.name = spec.name,
                     .sums = SumBytes(0, bytes.data(), spec.bytes()),
                     .not_finite = FirstNotFinite(spec.dtype, bytes)});
    told_.added.insert(told_.added.end(), bytes.begin(), bytes.end());
    return told_.add_status;
  }
  absl::StatusOr<std::vector<ReadTensor>> TakeRead() override { return std::exchange(read_, {}); }
  absl::Status Apply(const WeightManifest&, const CallScope&) override {
    if (told_.apply_status.ok()) told_.applied = told_.added;
    return told_.apply_status;
  }

 private:
  Told& told_;
  std::vector<ReadTensor> read_;
};

inline StagedWeightReceiver::Start Tell(Told& told) {
  return [&told] { return std::make_unique<ToldWeights>(told); };
}

}  // namespace tandem

#endif  // TANDEM_COMMON_WEIGHTS_TESTING_TOLD_WEIGHTS_H_
