// For tests: the bytes of CPU tensors that a thread has made, while any thread holds them, and
// their peak.
#ifndef TANDEM_COMMON_PARALLEL_TESTING_MEMORY_METER_H_
#define TANDEM_COMMON_PARALLEL_TESTING_MEMORY_METER_H_

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

namespace tandem::parallel {

// Counts what libtorch's CPU allocator hands out to the calling thread, from construction on, until
// any thread gives it back: one of the process group may be the last that holds a tensor.
class MemoryMeter {
 public:
  MemoryMeter() { c10::SetAllocator(c10::kCPU, &counting_, kPriority); }
  ~MemoryMeter() { c10::SetAllocator(c10::kCPU, counting_.inner(), kPriority); }
  MemoryMeter(const MemoryMeter&) = delete;
  MemoryMeter& operator=(const MemoryMeter&) = delete;

  int64_t held_bytes() const { return counting_.counter()->Held(); }
  // Since the last ResetPeak.
  int64_t peak_bytes() const { return counting_.counter()->Peak(); }
  void ResetPeak() { counting_.counter()->ResetPeak(); }

 private:
  static constexpr uint8_t kPriority = std::numeric_limits<uint8_t>::max();

  class Counter {
   public:
    void Add(int64_t bytes) {
      const std::lock_guard<std::mutex> lock(mutex_);
      held_ += bytes;
      peak_ = std::max(peak_, held_);
    }
    int64_t Held() {
      const std::lock_guard<std::mutex> lock(mutex_);
      return held_;
    }
    int64_t Peak() {
      const std::lock_guard<std::mutex> lock(mutex_);
      return peak_;
    }
    void ResetPeak() {
      const std::lock_guard<std::mutex> lock(mutex_);
      peak_ = held_;
    }

   private:
    std::mutex mutex_;
    int64_t held_ = 0, peak_ = 0;
  };

  // The memory of one tensor, which may outlive the meter.
  struct Allocation {
    c10::DataPtr memory;
    int64_t bytes = 0;
    std::shared_ptr<Counter> counter;
  };

  // The allocations of all meters by address: libtorch's raw_allocate() wants the address itself as
  // the context of its memory.
  class Registry {
   public:
    void Put(void* data, Allocation allocation) {
      const std::lock_guard<std::mutex> lock(mutex_);
      allocations_.emplace(data, std::move(allocation));
    }
    // Returns an allocation without a counter for an address that is not there.
    Allocation Take(void* data) {
      const std::lock_guard<std::mutex> lock(mutex_);
      const auto node = allocations_.extract(data);
      return node.empty() ? Allocation{} : std::move(node.mapped());
    }

   private:
    std::mutex mutex_;
    std::map<void*, Allocation> allocations_;
  };

  class CountingAllocator final : public c10::Allocator {
   public:
    c10::DataPtr allocate(size_t bytes) override {
      if (std::this_thread::get_id() != thread_) return inner_->allocate(bytes);
      Allocation allocation = {inner_->allocate(bytes), static_cast<int64_t>(bytes), counter_};
      void* const data = allocation.memory.get();
      if (data == nullptr) return {nullptr, c10::kCPU};
      counter_->Add(allocation.bytes);
      Registered().Put(data, std::move(allocation));
      return {data, data, &Free, c10::kCPU};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &Free; }
    void copy_data(void* to, const void* from, size_t bytes) const override {
      default_copy_data(to, from, bytes);
    }
    c10::Allocator* inner() const { return inner_; }
    Counter* counter() const { return counter_.get(); }

   private:
    static Registry& Registered() {
      static Registry* const registry = new Registry;  // tensors may outlive every static object
      return *registry;
    }
    static void Free(void* data) {
      const Allocation allocation = Registered().Take(data);
      if (allocation.counter == nullptr) {  // another thread's
        c10::GetDefaultCPUAllocator()->raw_deallocate(data);
        return;
      }
      allocation.counter->Add(-allocation.bytes);
    }

    const std::thread::id thread_ = std::this_thread::get_id();
    c10::Allocator* const inner_ = c10::GetAllocator(c10::kCPU);
    const std::shared_ptr<Counter> counter_ = std::make_shared<Counter>();
  };

  CountingAllocator counting_;
};

}  // namespace tandem::parallel

#endif  // TANDEM_COMMON_PARALLEL_TESTING_MEMORY_METER_H_
