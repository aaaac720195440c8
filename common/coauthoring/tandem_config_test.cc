#include "common/coauthoring/tandem_config.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <vector>

#include "common/base/errors/error.h"

namespace tandem {
namespace {

TEST(TandemConfigTest, DefaultsAreValid) {
  EXPECT_TRUE(Validate(TandemConfig(), 10).ok());
  EXPECT_TRUE(Validate(SamplingParams(), 10).ok());
}

TEST(TandemConfigTest, ErrorsNameTheField) {
  EXPECT_EQ(FieldPath(Validate(TandemConfig{.prob_senior = NAN}, 10)), "prob_senior");
  EXPECT_EQ(FieldPath(Validate(TandemConfig{.prob_senior = 1.01}, 10)), "prob_senior");
  EXPECT_EQ(FieldPath(Validate(TandemConfig{.selection_strategy = SelectionStrategy::kChunk}, 10)),
            "chunk_size");
  EXPECT_EQ(
      FieldPath(Validate(
          TandemConfig{.selection_strategy = SelectionStrategy::kWord, .max_gap_tokens = 0}, 10)),
      "max_gap_tokens");
  EXPECT_EQ(FieldPath(Validate(TandemConfig{.boundary_token_ids = {1, 10}}, 10)),
            "boundary_token_ids[1]");
  EXPECT_EQ(FieldPath(Validate(TandemConfig{.boundary_token_ids = {-1}}, 10)),
            "boundary_token_ids[0]");
}

TEST(SamplingParamsTest, ErrorsNameTheField) {
  EXPECT_EQ(FieldPath(Validate(SamplingParams{.temperature = -1}, 10)), "temperature");
  EXPECT_EQ(FieldPath(Validate(SamplingParams{.temperature = INFINITY}, 10)), "temperature");
  EXPECT_EQ(FieldPath(Validate(SamplingParams{.temperature = NAN}, 10)), "temperature");
  EXPECT_EQ(FieldPath(Validate(SamplingParams{.top_k = -1}, 10)), "top_k");
  EXPECT_EQ(FieldPath(Validate(SamplingParams{.top_p = 0}, 10)), "top_p");
  EXPECT_EQ(FieldPath(Validate(SamplingParams{.min_p = 1.5}, 10)), "min_p");
  EXPECT_EQ(FieldPath(Validate(SamplingParams{.max_tokens = 0}, 10)), "max_tokens");
  EXPECT_EQ(FieldPath(Validate(SamplingParams{.stop_token_ids = {3, 11}}, 10)),
            "stop_token_ids[1]");
}

// Every trajectory repeats these lists: a megabyte of them would be held once per sample.
TEST(IdListsTest, AreBoundedAndHoldNoIdTwice) {
  std::vector<int32_t> ids(kMaxStopTokenIds);
  std::iota(ids.begin(), ids.end(), 0);
  EXPECT_TRUE(Validate(SamplingParams{.stop_token_ids = ids}, 10000).ok());
  ids.push_back(kMaxStopTokenIds);
  EXPECT_EQ(FieldPath(Validate(SamplingParams{.stop_token_ids = ids}, 10000)), "stop_token_ids");
  EXPECT_EQ(FieldPath(Validate(SamplingParams{.stop_token_ids = {3, 4, 3}}, 10)),
            "stop_token_ids[2]");
  std::vector<std::string> texts(kMaxStopTexts, std::string(kMaxStopTextBytes, 'x'));
  EXPECT_TRUE(Validate(SamplingParams{.stop = texts}, 10).ok());
  texts.emplace_back("y");
  EXPECT_EQ(FieldPath(Validate(SamplingParams{.stop = texts}, 10)), "stop");
  EXPECT_EQ(FieldPath(Validate(SamplingParams{.stop = {"x", ""}}, 10)), "stop[1]");
  EXPECT_EQ(
      FieldPath(Validate(SamplingParams{.stop = {std::string(kMaxStopTextBytes + 1, 'x')}}, 10)),
      "stop[0]");

  ids.resize(kMaxBoundaryTokenIds);
  std::iota(ids.begin(), ids.end(), 0);
  EXPECT_TRUE(Validate(TandemConfig{.boundary_token_ids = ids}, 10000).ok());
  ids.push_back(kMaxBoundaryTokenIds);
  EXPECT_EQ(FieldPath(Validate(TandemConfig{.boundary_token_ids = ids}, 10000)),
            "boundary_token_ids");
  EXPECT_EQ(FieldPath(Validate(TandemConfig{.boundary_token_ids = {5, 5}}, 10)),
            "boundary_token_ids[1]");
}

}  // namespace
}  // namespace tandem
