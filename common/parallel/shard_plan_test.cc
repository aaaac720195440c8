#include "common/parallel/shard_plan.h"

#include <gtest/gtest.h>

#include <map>
#include <string>

#include "common/model/testing/models.h"

namespace tandem::parallel {
namespace {

// Every value of every parameter is in exactly one part, where it lies in the buffer.
TEST(ShardPlanTest, PartsCoverEveryParameterOnce) {
  constexpr int64_t kParts = 3;
  const auto model =
      TinyModel("qwen2", {}, {.requires_grad = true, .placement = {.buffer_parts = kParts}});
  std::map<std::string, int64_t> covered;  // from the start on
  for (int64_t block = 0; block < model->num_blocks(); ++block) {
    const at::Tensor& buffer = model->BlockBuffers()[static_cast<size_t>(block)];
    ASSERT_EQ(buffer.numel() % kParts, 0);
    for (int64_t index = 0; index < kParts; ++index) {
      for (const ShardPiece& piece :
           PlanShard(model->DeclaredParameters(), block, buffer.numel(), kParts, index)) {
        int64_t& end = covered[piece.parameter->spec.name];
        EXPECT_EQ(piece.offset, end);
        EXPECT_GT(piece.numel, 0);
        EXPECT_LE(piece.shard_offset + piece.numel, buffer.numel() / kParts);
        EXPECT_EQ(index * buffer.numel() / kParts + piece.shard_offset,
                  piece.parameter->value.storage_offset() + piece.offset);
        end += piece.numel;
      }
    }
  }
  for (const Parameter& parameter : model->DeclaredParameters()) {
    EXPECT_EQ(covered[parameter.spec.name], parameter.value.numel()) << parameter.spec.name;
  }
}

}  // namespace
}  // namespace tandem::parallel
