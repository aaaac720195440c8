#include "common/ops/products/packed_memory.h"

#include <gtest/gtest.h>

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

TEST(PackedMemoryTest, MoreThanThereIsThrows) {
  EXPECT_THROW(AllocatePacked(std::numeric_limits<int64_t>::max() / 2), std::bad_alloc);
}

}  // namespace
}  // namespace tandem::ops
