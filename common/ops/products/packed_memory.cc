#include "common/ops/products/packed_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <new>
#include <vector>

namespace tandem::ops {
namespace {

constexpr int64_t kHugePage = int64_t{2} << 20;
// Many matrices of a small model. What is not used of a region takes no memory, but for the rest of
// a huge page.
constexpr int64_t kRegionBytes = 16 * kHugePage;
constexpr int64_t kCacheLine = 64;

constexpr int64_t RoundUp(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Memory that starts with a huge page; zeros at first.
class Region {
 public:
  explicit Region(int64_t bytes)
      : bytes_(bytes),
        mapped_bytes_(static_cast<size_t>(bytes_ + kHugePage)),
        mapping_(mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                      -1, 0)) {
    if (mapping_ == MAP_FAILED) throw std::bad_alloc();
    const auto address = reinterpret_cast<int64_t>(mapping_);
    begin_ = static_cast<char*>(mapping_) + (RoundUp(address, kHugePage) - address);
#ifdef MADV_HUGEPAGE
    // Without huge pages products are slower; there is nothing else to do about a refusal.
    static_cast<void>(madvise(begin_, static_cast<size_t>(bytes_), MADV_HUGEPAGE));
#endif
  }
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;
  ~Region() { munmap(mapping_, mapped_bytes_); }

  int64_t bytes() const { return bytes_; }

  // Returns zeros, or nullptr if fewer than `bytes` are left.
  void* Take(int64_t bytes) {
    if (bytes > bytes_ - used_) return nullptr;
    void* const taken = begin_ + used_;
    used_ += RoundUp(bytes, kCacheLine);
    if (was_used_) std::memset(taken, 0, static_cast<size_t>(bytes));
    return taken;
  }

  // Everything may be taken again.
  void Clear() {
    used_ = 0;
    was_used_ = true;
  }

 private:
  const int64_t bytes_;
  const size_t mapped_bytes_;
  void* const mapping_;
  char* begin_;
  int64_t used_ = 0;
  bool was_used_ = false;
};

class Regions {
 public:
  std::shared_ptr<void> Take(int64_t bytes) {
    std::shared_ptr<Region> region;  // whose last reference calls Release: never within the lock
    {
      const std::lock_guard lock(mutex_);
      region = last_.lock();
      void* const memory = region != nullptr ? region->Take(bytes) : nullptr;
      if (memory != nullptr) return {region, memory};
    }
    region = {NewRegion(RoundUp(std::max(bytes, kRegionBytes), kHugePage)),
              [this](Region* released) { Release(released); }};
    void* const memory = region->Take(bytes);  // nobody else has it yet
    const std::lock_guard lock(mutex_);
    last_ = region;
    return {region, memory};
  }

 private:
  Region* NewRegion(int64_t bytes) {
    const std::lock_guard lock(mutex_);
    const auto spare = std::ranges::find(spare_, bytes, &Region::bytes);
    std::unique_ptr<Region> region;
    if (spare == spare_.end()) {
      region = std::make_unique<Region>(bytes);
      spare_.reserve(static_cast<size_t>(++regions_));  // so that Release cannot fail
    } else {
      region = std::move(*spare);
      spare_.erase(spare);
      spare_bytes_ -= bytes;
    }
    taken_bytes_ += bytes;
    return region.release();
  }

  void Release(Region* released) {
    const std::lock_guard lock(mutex_);
    spare_.emplace_back(released)->Clear();
    spare_bytes_ += released->bytes();
    taken_bytes_ -= released->bytes();
    while (spare_bytes_ > taken_bytes_) {
      spare_bytes_ -= spare_.back()->bytes();
      spare_.pop_back();
      --regions_;
    }
  }

  std::mutex mutex_;
  std::weak_ptr<Region> last_;
  std::vector<std::unique_ptr<Region>> spare_;
  int64_t spare_bytes_ = 0, taken_bytes_ = 0;
  int64_t regions_ = 0;  // taken and spare
};

}  // namespace

std::shared_ptr<void> AllocatePacked(int64_t bytes) {
  static Regions& regions = *new Regions;  // outlives all who take from it
  return regions.Take(bytes);
}

}  // namespace tandem::ops
