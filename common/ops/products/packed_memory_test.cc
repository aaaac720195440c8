#include "common/ops/products/packed_memory.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <vector>

namespace tandem::ops {
namespace {

TEST(PackedMemoryTest, IsZeroAlignedAndApart) {
  std::vector<std::pair<std::shared_ptr<void>, int64_t>> taken;
  for (const int64_t bytes : {1, 64, 1000, 3 << 20, 65, 20 << 20, 50 << 20, 17}) {
    taken.emplace_back(AllocatePacked(bytes), bytes);
    const auto* const at = static_cast<const char*>(taken.back().first.get());
    EXPECT_EQ(reinterpret_cast<uintptr_t>(at) % 64, 0u);
    EXPECT_TRUE(std::all_of(at, at + bytes, [](char c) { return c == 0; })) << bytes;
    std::memset(taken.back().first.get(), static_cast<int>(taken.size()),
                static_cast<size_t>(bytes));
  }
  for (size_t i = 0; i < taken.size(); ++i) {
    const auto* const at = static_cast<const char*>(taken[i].first.get());
    EXPECT_TRUE(std::all_of(at, at + taken[i].second, [&](char c) {
      return c == static_cast<char>(i + 1);
    })) << i;
  }
}

TEST(PackedMemoryTest, OthersKeepTheirMemoryWhenOneIsReleased) {
  std::shared_ptr<void> first = AllocatePacked(100), second = AllocatePacked(100);
  EXPECT_EQ(static_cast<char*>(second.get()) - static_cast<char*>(first.get()), 128);
  std::memset(second.get(), 7, 100);
  first.reset();
  EXPECT_EQ(static_cast<char*>(second.get())[99], 7);
  second.reset();  // and the region with it
  EXPECT_EQ(static_cast<char*>(AllocatePacked(100).get())[99], 0);
}

// Whether the process has a page there.
bool IsMapped(void* address) {
  unsigned char resident = 0;
  const auto page = reinterpret_cast<uintptr_t>(address) & ~uintptr_t{4095};
  return mincore(reinterpret_cast<void*>(page), 1, &resident) == 0;
}

TEST(PackedMemoryTest, NewWeightsTakeWhatTheOldOnesGaveBack) {
  constexpr int64_t kBytes = 40 << 20;
  const std::shared_ptr<void> served = AllocatePacked(kBytes);
  std::shared_ptr<void> next = AllocatePacked(kBytes);
  void* const place = next.get();
  std::memset(place, 7, kBytes);
  next.reset();
  EXPECT_TRUE(IsMapped(place));
  next = AllocatePacked(kBytes);
  EXPECT_EQ(next.get(), place);
  const auto* const at = static_cast<const char*>(place);
  EXPECT_TRUE(std::all_of(at, at + kBytes, [](char c) { return c == 0; }));
}

TEST(PackedMemoryTest, NoMoreIsKeptThanIsTaken) {
  constexpr int64_t kBytes = 44 << 20;
  std::vector<std::shared_ptr<void>> taken;
  std::vector<void*> places;
  for (int i = 0; i < 4; ++i) {
    taken.push_back(AllocatePacked(kBytes));
    places.push_back(taken.back().get());
  }
  taken.resize(1);
  EXPECT_EQ(std::ranges::count_if(places, IsMapped), 2);
  taken.clear();
  EXPECT_EQ(std::ranges::count_if(places, IsMapped), 0);
}

TEST(PackedMemoryTest, MoreThanThereIsThrows) {
  EXPECT_THROW(AllocatePacked(std::numeric_limits<int64_t>::max() / 2), std::bad_alloc);
}

}  // namespace
}  // namespace tandem::ops
