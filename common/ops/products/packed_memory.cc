#include "common/ops/products/packed_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <mutex>
#include <new>

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

// Zeros that start with a huge page.
class Region {
 public:
  explicit Region(int64_t bytes)
      : bytes_(RoundUp(bytes, kHugePage)),
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

  // Returns nullptr if fewer than `bytes` are left.
  void* Take(int64_t bytes) {
    if (bytes > bytes_ - used_) return nullptr;
    void* const taken = begin_ + used_;
    used_ += RoundUp(bytes, kCacheLine);
    return taken;
  }

 private:
  const int64_t bytes_;
  const size_t mapped_bytes_;
  void* const mapping_;
  char* begin_;
  int64_t used_ = 0;
};

}  // namespace

std::shared_ptr<void> AllocatePacked(int64_t bytes) {
  static std::mutex mutex;
  static std::weak_ptr<Region> last;  // keeps no memory that nobody uses
  const std::lock_guard<std::mutex> lock(mutex);
  std::shared_ptr<Region> region = last.lock();
  void* memory = region != nullptr ? region->Take(bytes) : nullptr;
  if (memory == nullptr) {
    region = std::make_shared<Region>(std::max(bytes, kRegionBytes));
    memory = region->Take(bytes);
    last = region;
  }
  return {region, memory};
}

}  // namespace tandem::ops
