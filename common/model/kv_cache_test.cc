#include "common/model/kv_cache.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "common/model/testing/models.h"

namespace tandem {
namespace {

const std::vector<LayerCache> kLayers = {{.heads = 2, .head_dim = 10}, {.heads = 1, .head_dim = 4}};

TEST(KvCacheTest, LayersMayDiffer) {
  const KvCache cache(kLayers, 3, 16);
  EXPECT_EQ(cache.keys(0).sizes(), at::IntArrayRef({3, 2, 16, 10}));
  EXPECT_EQ(cache.values(1).sizes(), at::IntArrayRef({3, 1, 16, 4}));
}

TEST(KvCacheTest, AShardHoldsItsHeads) {
  const auto even = nlohmann::json{{"vocab_size", 62}, {"intermediate_size", 44}};
  const auto whole = TinyModel("llama", even);
  const auto half = TinyModel("llama", even, {.placement = {.shard_count = 2}});
  const KvCache cache(whole->CacheLayout(), 2, 16), half_cache(half->CacheLayout(), 2, 16);
  EXPECT_EQ(cache.keys(0).sizes(), at::IntArrayRef({2, 2, 16, 10}));
  EXPECT_EQ(half_cache.keys(0).sizes(), at::IntArrayRef({2, 1, 16, 10}));
  EXPECT_EQ(half_cache.values(1).nbytes(), cache.values(1).nbytes() / 2);
}

TEST(KvCacheTest, SlotsAreHandedOutAndTakenBack) {
  KvCache cache(kLayers, /*num_slots=*/2, /*max_model_len=*/16);
  const int64_t a = cache.Allocate().value(), b = cache.Allocate().value();
  EXPECT_NE(a, b);
  EXPECT_EQ(cache.Allocate().status().code(), absl::StatusCode::kResourceExhausted);
  cache.Advance(a, 5);
  cache.Free(a);
  EXPECT_EQ(cache.Allocate().value(), a);
  EXPECT_EQ(cache.cursor(a), 0);
}

TEST(KvCacheTest, CursorsMoveWithinTheSlot) {
  KvCache cache(kLayers, 1, 16);
  const int64_t slot = cache.Allocate().value();
  cache.Advance(slot, 16);
  EXPECT_THROW(cache.Advance(slot, 1), c10::Error);
  cache.Truncate(slot, 3);
  EXPECT_EQ(cache.cursor(slot), 3);
  EXPECT_THROW(cache.Truncate(slot, 4), c10::Error);
}

}  // namespace
}  // namespace tandem
