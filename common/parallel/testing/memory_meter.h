// For tests: the bytes of CPU tensors that the calling thread holds, and their peak.
#ifndef TANDEM_COMMON_PARALLEL_TESTING_MEMORY_METER_H_
#define TANDEM_COMMON_PARALLEL_TESTING_MEMORY_METER_H_

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <algorithm>
#include <cstdint>
#include <memory>

namespace tandem::parallel {

// Counts allocations of libtorch's CPU allocator as its profiler does, from construction on, those
// of other threads left out.
class MemoryMeter {
 public:
  MemoryMeter() : guard_(c10::DebugInfoKind::PROFILER_STATE, counter_) {}

  int64_t held_bytes() const { return counter_->held; }
  // Since the last ResetPeak.
  int64_t peak_bytes() const { return counter_->peak; }
  void ResetPeak() { counter_->peak = counter_->held; }

 private:
  struct Counter : c10::MemoryReportingInfoBase {
    int64_t held = 0, peak = 0;

    void reportMemoryUsage(void*, int64_t size, size_t, size_t, c10::Device) override {
      held += size;
      peak = std::max(peak, held);
    }
    bool memoryProfilingEnabled() const override { return true; }
  };

  const std::shared_ptr<Counter> counter_ = std::make_shared<Counter>();
  const c10::DebugInfoGuard guard_;
};

}  // namespace tandem::parallel

#endif  // TANDEM_COMMON_PARALLEL_TESTING_MEMORY_METER_H_
