#include "common/parallel/optimizer/shard_plan.h"

#include <gtest/gtest.h>

#include <map>
#include <string>

#include "common/model/testing/models.h"

namespace tandem::parallel {
namespace {

// Every value of every parameter lies in exactly one shard, at its place in the buffer.
TEST(ShardPlanTest, ShardsCoverEveryParameterOnce) {
  constexpr int64_t kShards = 3;
  const auto model =
      TinyModel("qwen2", {}, {.requires_grad = true, .placement = {.buffer_shards = kShards}});
  std::map<std::string, int64_t> covered;  // values of each parameter so far, from its first one on
  for (int64_t block = 0; block < model->num_blocks(); ++block) {
    const at::Tensor& buffer = model->BlockBuffers()[static_cast<size_t>(block)];
    ASSERT_EQ(buffer.numel() % kShards, 0);
    for (int64_t index = 0; index < kShards; ++index) {
      for (const ShardRange& range :
           PlanShard(model->DeclaredParameters(), block, buffer.numel(), kShards, index)) {
        int64_t& end = covered[range.parameter->spec.name];
        EXPECT_EQ(range.offset, end);
        EXPECT_GT(range.numel, 0);
        EXPECT_LE(range.shard_offset + range.numel, buffer.numel() / kShards);
        EXPECT_EQ(index * buffer.numel() / kShards + range.shard_offset,
                  range.parameter->value.storage_offset() + range.offset);
        end += range.numel;
      }
    }
  }
  for (const Parameter& parameter : model->DeclaredParameters()) {
    EXPECT_EQ(covered[parameter.spec.name], parameter.value.numel()) << parameter.spec.name;
  }
}

}  // namespace
}  // namespace tandem::parallel
