#include "common/model/passes/kv_cache.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "common/kernels/cpu/cpu_kernels.h"
#include "common/model/testing/models.h"

namespace tandem {
namespace {

static_assert(kKvBlockTokens == kernels::kAttentionBlock);

const std::vector<LayerCache> kLayers = {{.heads = 2, .head_dim = 10}, {.heads = 1, .head_dim = 4}};

TEST(KvCacheTest, LayersMayDiffer) {
  const KvCache cache(kLayers, 3);
  EXPECT_EQ(cache.keys(0).sizes(), at::IntArrayRef({3, 2, 64, 10}));
  EXPECT_EQ(cache.values(1).sizes(), at::IntArrayRef({3, 1, 64, 4}));
}

TEST(KvCacheTest, AShardHoldsItsHeads) {
  const auto even = nlohmann::json{{"vocab_size", 62}, {"intermediate_size", 44}};
  const auto whole = TinyModel("llama", even);
  const auto half = TinyModel("llama", even, {.placement = {.shard_count = 2}});
  const KvCache cache(whole->CacheLayout(), 2), half_cache(half->CacheLayout(), 2);
  EXPECT_EQ(cache.keys(0).sizes(), at::IntArrayRef({2, 2, 64, 10}));
  EXPECT_EQ(half_cache.keys(0).sizes(), at::IntArrayRef({2, 1, 64, 10}));
  EXPECT_EQ(half_cache.values(1).nbytes(), cache.values(1).nbytes() / 2);
}

// Latent attention: the latent and the rotated part of a key, of any number of heads and shards.
TEST(KvCacheTest, ALatentIsCachedOnceAndHoldsItsValues) {
  for (const int64_t shards : {1, 2}) {
    const auto model = TinyModel("deepseek_v3", {{"vocab_size", 62}, {"intermediate_size", 44}},
                                 {.placement = {.shard_count = shards}});
    const LatentAttentionOptions& latent = *model->config().decoder.latent;
    for (const auto& [type, bytes] : {std::pair{at::kFloat, 4}, {at::kBFloat16, 2}}) {
      const KvCache cache(model->CacheLayout(), 2, at::kCPU, type);
      EXPECT_EQ(
          cache.keys(0).nbytes(),
          static_cast<size_t>(2 * 64 * (latent.kv_lora_rank + latent.qk_rope_head_dim) * bytes));
      EXPECT_TRUE(cache.values(0).is_alias_of(cache.keys(0)));
      EXPECT_EQ(cache.values(1).size(3), latent.kv_lora_rank);
    }
  }
}

TEST(KvCacheTest, ABlockIsCopiedInAllLayers) {
  KvCache cache(kLayers, 2);
  for (int64_t layer = 0; layer < 2; ++layer) {
    cache.keys(layer).select(0, 0).fill_(static_cast<double>(1 + layer));
    cache.values(layer).select(0, 0).fill_(static_cast<double>(3 + layer));
  }
  cache.CopyBlock(0, 1);
  for (int64_t layer = 0; layer < 2; ++layer) {
    EXPECT_TRUE(at::equal(cache.keys(layer)[0], cache.keys(layer)[1]));
    EXPECT_TRUE(at::equal(cache.values(layer)[0], cache.values(layer)[1]));
  }
  EXPECT_EQ(cache.values(1)[1][0][63][3].item<float>(), 4);
}

}  // namespace
}  // namespace tandem
