// Counts the allocations of libtorch, for tests.
#ifndef TANDEM_COMMON_LOSS_TESTING_METERED_MEMORY_H_
#define TANDEM_COMMON_LOSS_TESTING_METERED_MEMORY_H_

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace tandem::loss {

// Forwards to another allocator, and counts live bytes and their peak. Thread-safe.
class MeteredAllocator : public c10::Allocator {
 public:
  explicit MeteredAllocator(c10::Allocator* inner) : inner_(inner) {}

  c10::DataPtr allocate(size_t bytes) override {
    auto* block = new Block{inner_->allocate(bytes), bytes, this};
    const int64_t live = live_ += static_cast<int64_t>(bytes);
    int64_t peak = peak_;
    while (live > peak && !peak_.compare_exchange_weak(peak, live)) {
    }
    void* data = block->data.get();
    return {data, block, &Delete, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

  void Restart() { peak_ = live_.load(); }
  int64_t live() const { return live_; }
  int64_t peak() const { return peak_; }

 private:
  struct Block {
    c10::DataPtr data;
    size_t bytes;
    MeteredAllocator* owner;
  };
  static void Delete(void* context) {
    auto* block = static_cast<Block*>(context);
    block->owner->live_ -= static_cast<int64_t>(block->bytes);
    delete block;
  }
  c10::Allocator* inner_;
  std::atomic<int64_t> live_{0}, peak_{0};
};

// Counts everything that is allocated during its lifetime.
class MeteredMemory {
 public:
  MeteredMemory() : before_(c10::GetCPUAllocator()) {
    // The allocator is never destroyed: tensors may outlive the test.
    static auto* const meter = new MeteredAllocator(before_);
    meter_ = meter;
    c10::SetCPUAllocator(meter_, /*priority=*/1);
  }
  ~MeteredMemory() { c10::SetCPUAllocator(before_, /*priority=*/1); }
  MeteredMemory(const MeteredMemory&) = delete;
  MeteredMemory& operator=(const MeteredMemory&) = delete;

  MeteredAllocator* operator->() const { return meter_; }

 private:
  c10::Allocator* const before_;
  MeteredAllocator* meter_;
};

}  // namespace tandem::loss

#endif  // TANDEM_COMMON_LOSS_TESTING_METERED_MEMORY_H_
