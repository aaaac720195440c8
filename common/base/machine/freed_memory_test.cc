#include "common/base/machine/freed_memory.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <fstream>
#include <memory>
#include <vector>

namespace tandem {
namespace {

int64_t ResidentBytes() {
  int64_t pages = 0;
  int64_t resident = 0;
  std::ifstream("/proc/self/statm") >> pages >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

TEST(FreedMemory, GoesBackAlthoughSomethingBehindItLives) {
  constexpr int kBuffers = 20'000;
  constexpr int kBufferBytes = 8 << 10;
  const int64_t before = ResidentBytes();
  std::vector<std::unique_ptr<char[]>> buffers;
  for (int i = 0; i < kBuffers; ++i) {
    buffers.push_back(std::make_unique<char[]>(kBufferBytes));  // written: it is zeroed
  }
  const std::unique_ptr<char[]> last = std::move(buffers.back());  // keeps the heap's end in use
  buffers.clear();
  ASSERT_GT(ResidentBytes(), before + kMaxFreedBytes) << "glibc keeps it";
  const SteadyTime start = SteadyTime::Now();
  FreedMemory freed;
  EXPECT_FALSE(freed.Look(start));
  EXPECT_FALSE(freed.Look(start + kFreedTime - absl::Seconds(1)));
  EXPECT_TRUE(freed.Look(start + kFreedTime));
  EXPECT_LT(ResidentBytes(), before + (16 << 20));
}

TEST(FreedMemory, MemoryThatIsTakenAgainInBetweenStays) {
  constexpr int kBuffers = 20'000;
  constexpr int kBufferBytes = 8 << 10;
  const SteadyTime start = SteadyTime::Now();
  FreedMemory freed;
  std::vector<std::unique_ptr<char[]>> buffers;
  const auto take = [&] {
    for (int i = 0; i < kBuffers; ++i) buffers.push_back(std::make_unique<char[]>(kBufferBytes));
  };
  take();
  const std::unique_ptr<char[]> last = std::move(buffers.back());
  buffers.clear();
  EXPECT_FALSE(freed.Look(start));
  take();
  EXPECT_FALSE(freed.Look(start + kFreedTime / 2));
  buffers.clear();
  EXPECT_FALSE(freed.Look(start + kFreedTime));
  EXPECT_TRUE(freed.Look(start + 2 * kFreedTime));
}

TEST(FreedMemory, MemoryStaysWhileOtherMemoryComesAndGoes) {
  constexpr int kBuffers = 20'000;
  constexpr int kBufferBytes = 8 << 10;
  std::vector<std::unique_ptr<char[]>> buffers;
  const auto take = [&](int count) {
    for (int i = 0; i < count; ++i) buffers.push_back(std::make_unique<char[]>(kBufferBytes));
  };
  take(2 * kBuffers);
  const std::unique_ptr<char[]> last = std::move(buffers.back());
  buffers.clear();
  const SteadyTime start = SteadyTime::Now();
  FreedMemory freed;
  EXPECT_FALSE(freed.Look(start));
  for (int i = 1; i <= 4; ++i) {
    if (i % 2 == 1) {
      take(kBuffers);
    } else {
      buffers.clear();
    }
    EXPECT_FALSE(freed.Look(start + i * kFreedTime)) << i;
  }
  EXPECT_TRUE(freed.Look(start + 5 * kFreedTime));
}

TEST(FreedMemory, LittleIsKept) {
  FreedMemory freed;
  EXPECT_FALSE(freed.Look(SteadyTime::Now()));
  EXPECT_FALSE(freed.Look(SteadyTime::Now() + absl::Hours(1)));
}

int64_t PageFaults() {
  rusage usage = {};
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_minflt;
}

// The last test: what it sets holds for the process.
TEST(FreedMemory, KeptMemoryIsTakenAgainWithoutPageFaults) {
#ifdef __SANITIZE_ADDRESS__
  GTEST_SKIP() << "the sanitizer has an allocator of its own";
#endif
  constexpr int64_t kBytes = 16 << 20;
  const auto take_and_free = [] {
    std::vector<std::unique_ptr<char[]>> buffers;
    for (int i = 0; i < 3; ++i) buffers.push_back(std::make_unique<char[]>(kBytes));  // written
  };
  KeepFreedMemory();
  take_and_free();
  const int64_t before = PageFaults();
  for (int i = 0; i < 10; ++i) take_and_free();
  EXPECT_LT(PageFaults() - before, kBytes / sysconf(_SC_PAGESIZE));
}

}  // namespace
}  // namespace tandem
