#include "tests/gpu/simulated/memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <new>

#include "tests/gpu/simulated/counts.h"
#include "tests/gpu/simulated/graph.h"
#include "tests/gpu/simulated/stream.h"

namespace tandem::simulated_gpu {
namespace {

constexpr size_t kAlignment = 512, kPage = 4096;
// Memory that comes back goes back to the system from so many bytes on.
constexpr size_t kReleased = 64 << 10;
constexpr auto kAllPools = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);

thread_local c10::DeviceIndex current_device = 0;

char* Map(int protection, int flags, int file) {
  void* const address =
      mmap(nullptr, kDevices * kMemoryBytes, protection, flags | MAP_NORESERVE, file, 0);
  TORCH_CHECK(address != MAP_FAILED, "the simulated GPU cannot reserve addresses");
  return static_cast<char*>(address);
}

int MakeFile() {
  const int file = memfd_create("tandem_simulated_gpu", MFD_CLOEXEC);
  TORCH_CHECK(file >= 0 && ftruncate(file, kDevices * kMemoryBytes) == 0,
              "the simulated GPU has no file for its memory");
  return file;
}

// The addresses of the devices, and as many bytes of the simulation.
struct Mappings {
  int file = MakeFile();
  char* device = Map(PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
  char* host = Map(PROT_READ | PROT_WRITE, MAP_SHARED, file);
};

// Leaked, as all that libtorch may call while the process ends.
const Mappings& TheMappings() {
  static const Mappings& mappings = *new Mappings;
  return mappings;
}

// First fit, over the free ranges of one device.
class Ranges {
 public:
  explicit Ranges(size_t begin) : free_{{begin, kMemoryBytes}} {}

  // Returns the begin of a range, or SIZE_MAX.
  size_t Take(size_t bytes) {
    if (bytes > free()) return SIZE_MAX;
    for (auto range = free_.begin(); range != free_.end(); ++range) {
      if (range->second < bytes) continue;
      const auto [begin, length] = *range;
      free_.erase(range);
      if (length > bytes) free_[begin + bytes] = length - bytes;
      taken_[begin] = bytes;
      used_ += bytes;
      peak_ = std::max(peak_, used_);
      return begin;
    }
    return SIZE_MAX;
  }

  // Gives the range from `begin` back; returns its length.
  size_t GiveBack(size_t begin) {
    const auto taken = taken_.find(begin);
    TORCH_CHECK(taken != taken_.end(), "the simulated GPU frees memory twice");
    const size_t bytes = taken->second;
    taken_.erase(taken);
    used_ -= bytes;
    auto range = free_.emplace(begin, bytes).first;
    const auto next = std::next(range);
    if (next != free_.end() && begin + bytes == next->first) {
      range->second += next->second;
      free_.erase(next);
    }
    if (range != free_.begin()) {
      const auto before = std::prev(range);
      if (before->first + before->second == begin) {
        before->second += range->second;
        free_.erase(range);
      }
    }
    return bytes;
  }

  size_t used() const { return used_; }
  size_t free() const { return std::max(limit_, used_) - used_; }
  void SetLimit(size_t bytes) { limit_ = bytes; }
  size_t peak() const { return peak_; }
  void ResetPeak() { peak_ = used_; }

 private:
  std::map<size_t, size_t> free_, taken_;  // the length of a range, by its begin
  size_t used_ = 0, peak_ = 0, limit_ = kMemoryBytes;
};

void Free(void* address);

class Memory final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const c10::DeviceIndex index = current_device;
    const c10::Device device(c10::DeviceType::CUDA, index);
    if (bytes == 0) return {nullptr, device};
    const size_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    size_t begin = 0;
    {
      const std::lock_guard lock(mutex_);
      begin = ranges_[index].Take(rounded);
      TORCH_CHECK_WITH(OutOfMemoryError, begin != SIZE_MAX,
                       "CUDA out of memory. Tried to allocate ", bytes, " bytes. GPU ",
                       static_cast<int>(index), " has a total capacity of ", kMemoryBytes,
                       " bytes of which ", ranges_[index].free(), " bytes is free.");
    }
    std::memset(TheMappings().host + begin, kUnwritten, rounded);
    char* const address = TheMappings().device + begin;
    OnAllocated(address, rounded, CurrentStream(index));
    AllocatedInCapture(address);
    ++TheCounts().allocations;
    return {address, address, &Free, device};
  }

  void GiveBack(void* address) {
    if (IsKeptByGraph(address)) return;
    OnFreed(address);
    const auto begin = static_cast<size_t>(static_cast<char*>(address) - TheMappings().device);
    const std::lock_guard lock(mutex_);
    const size_t bytes = ranges_[begin / kMemoryBytes].GiveBack(begin);
    // Whole pages go back to the system.
    const size_t first = (begin + kPage - 1) / kPage * kPage, end = (begin + bytes) / kPage * kPage;
    if (bytes >= kReleased) madvise(TheMappings().host + first, end - first, MADV_REMOVE);
  }

  c10::DeleterFnPtr raw_deleter() const override { return &Free; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(OnHost(to), OnHost(from), bytes);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t /*pool*/) override {}
  void recordStream(const c10::DataPtr& memory, c10::Stream stream) override {
    if (memory.get() != nullptr)
      OnRecorded(memory.get(), StreamOf(stream.device_index(), stream.id()));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    const std::lock_guard lock(mutex_);
    c10::CachingDeviceAllocator::DeviceStats stats;
    auto& bytes = stats.allocated_bytes[kAllPools];
    bytes.current = static_cast<int64_t>(ranges_[device].used());
    bytes.peak = static_cast<int64_t>(ranges_[device].peak());
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex /*device*/) override {}
  void resetPeakStats(c10::DeviceIndex device) override {
    const std::lock_guard lock(mutex_);
    ranges_[device].ResetPeak();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    const std::lock_guard lock(mutex_);
    return {ranges_[device].free(), kMemoryBytes};
  }
  void SetLimit(c10::DeviceIndex device, size_t bytes) {
    const std::lock_guard lock(mutex_);
    ranges_[device].SetLimit(bytes);
  }

 private:
  std::mutex mutex_;
  Ranges ranges_[kDevices] = {Ranges(0), Ranges(kMemoryBytes)};
};

void FreePinned(void* address);

class Pinned final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, c10::DeviceType::CPU};
    ++TheCounts().allocations;
    void* const address = ::operator new (bytes, std::align_val_t{kAlignment});
    const std::lock_guard lock(mutex_);
    bytes_[static_cast<char*>(address)] = bytes;
    return {address, address, &FreePinned, c10::DeviceType::CPU};
  }

  void GiveBack(void* address) {
    {
      const std::lock_guard lock(mutex_);
      bytes_.erase(static_cast<char*>(address));
    }
    ::operator delete (address, std::align_val_t{kAlignment});
  }

  bool Has(const void* address) {
    const std::lock_guard lock(mutex_);
    const auto* const byte = static_cast<const char*>(address);
    auto after = bytes_.upper_bound(const_cast<char*>(byte));
    return after != bytes_.begin() && byte < (--after)->first + after->second;
  }

  c10::DeleterFnPtr raw_deleter() const override { return &FreePinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
  bool record_event(void* /*address*/, void* /*context*/, c10::Stream /*stream*/) override {
    return true;
  }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}

 private:
  std::mutex mutex_;
  std::map<char*, size_t> bytes_;
};

Memory& TheMemory() {
  static Memory& memory = *new Memory;
  return memory;
}

Pinned& ThePinned() {
  static Pinned& pinned = *new Pinned;
  return pinned;
}

void Free(void* address) { TheMemory().GiveBack(address); }
void FreePinned(void* address) { ThePinned().GiveBack(address); }

}  // namespace

c10::DeviceIndex CurrentDevice() { return current_device; }

void SetCurrentDevice(c10::DeviceIndex device) {
  TORCH_CHECK(device >= 0 && device < kDevices, "there is no GPU ", static_cast<int>(device));
  current_device = device;
}

bool IsOfDevice(const void* address) {
  const auto byte = reinterpret_cast<uintptr_t>(address);
  const auto begin = reinterpret_cast<uintptr_t>(TheMappings().device);
  return byte >= begin && byte - begin < kDevices * kMemoryBytes;
}

c10::DeviceIndex DeviceOf(const void* device_address) {
  const auto offset = static_cast<const char*>(device_address) - TheMappings().device;
  return static_cast<c10::DeviceIndex>(static_cast<size_t>(offset) / kMemoryBytes);
}

void* OnHost(const void* device_address) {
  if (device_address == nullptr) return nullptr;
  TORCH_CHECK(IsOfDevice(device_address), "a tensor of a GPU has memory of the host");
  return TheMappings().host + (static_cast<const char*>(device_address) - TheMappings().device);
}

int FileOfMemory() { return TheMappings().file; }

int64_t PlaceInFile(const void* device_address) {
  return static_cast<const char*>(device_address) - TheMappings().device;
}

void SetMemoryLimit(c10::DeviceIndex device, size_t bytes) {
  TheMemory().SetLimit(device, bytes == 0 ? kMemoryBytes : bytes);
}

bool IsPinned(const void* address) { return ThePinned().Has(address); }

c10::DeviceAllocator& DeviceMemory() { return TheMemory(); }
at::HostAllocator& PinnedMemory() { return ThePinned(); }

}  // namespace tandem::simulated_gpu
