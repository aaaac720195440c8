#include "common/model/kv_cache.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "common/model/testing/models.h"

namespace tandem {
namespace {

TEST(KvCacheTest, AShardHoldsItsHeads) {
  const KvCache whole(TinyConfig(), 2, 16);
  const KvCache half(TinyConfig(), 2, 16, at::kCPU, at::kFloat, /*shard_count=*/2);
  EXPECT_EQ(half.keys(0).size(1), whole.keys(0).size(1) / 2);
  EXPECT_EQ(half.values(1).nbytes(), whole.values(1).nbytes() / 2);
}

TEST(KvCacheTest, SlotsAreHandedOutAndTakenBack) {
  KvCache cache(TinyConfig(), /*num_slots=*/2, /*max_model_len=*/16);
  const int64_t a = cache.Allocate().value(), b = cache.Allocate().value();
  EXPECT_NE(a, b);
  EXPECT_EQ(cache.Allocate().status().code(), absl::StatusCode::kResourceExhausted);
  cache.Advance(a, 5);
  cache.Free(a);
  EXPECT_EQ(cache.Allocate().value(), a);
  EXPECT_EQ(cache.cursor(a), 0);
}

TEST(KvCacheTest, CursorsMoveWithinTheSlot) {
  KvCache cache(TinyConfig(), 1, 16);
  const int64_t slot = cache.Allocate().value();
  cache.Advance(slot, 16);
  EXPECT_THROW(cache.Advance(slot, 1), c10::Error);
  cache.Truncate(slot, 3);
  EXPECT_EQ(cache.cursor(slot), 3);
  EXPECT_THROW(cache.Truncate(slot, 4), c10::Error);
}

}  // namespace
}  // namespace tandem
