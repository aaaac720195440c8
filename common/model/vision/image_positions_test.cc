#include "common/model/vision/image_positions.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <vector>

#include "common/base/errors/error.h"

namespace tandem {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

constexpr int32_t kImage = 57, kVideo = 58;

VisionConfig Vision(double tokens_per_second = 0) {
  return {.spatial_merge_size = 2,
          .tokens_per_second = tokens_per_second,
          .image_token_id = kImage,
          .video_token_id = kVideo};
}

// The numbers of get_rope_index, worked out by hand.
TEST(ImagePositionsTest, TextGoesOnBehindTheLongerSideOfAnImage) {
  const std::vector<int32_t> prompt = {5, kImage, kImage, kImage, 6, 7};
  const ImagePositions found =
      FindImages(Vision(), prompt, {}, {ImageShape{.grid = {1, 2, 6}}}).value();
  EXPECT_THAT(found.first_tokens, ElementsAre(1));
  EXPECT_THAT(found.positions[0], ElementsAre(0, 1, 1, 1, 4, 5));
  EXPECT_THAT(found.positions[1], ElementsAre(0, 1, 1, 1, 4, 5));
  EXPECT_THAT(found.positions[2], ElementsAre(0, 1, 2, 3, 4, 5));
  EXPECT_EQ(found.next, 6);
}

TEST(ImagePositionsTest, FramesAreAsFarApartAsTheirTimes) {
  const std::vector<int32_t> prompt = {kVideo, kVideo, kVideo, 6};
  const ImageShape video = {.grid = {3, 2, 2}, .is_video = true, .seconds_per_grid = 0.75};
  // 3 positions from frame to frame; a model without tokens_per_second counts frames.
  EXPECT_THAT(FindImages(Vision(4), prompt, {}, {video})->positions[0], ElementsAre(0, 3, 6, 1));
  EXPECT_THAT(FindImages(Vision(), prompt, {}, {video})->positions[0], ElementsAre(0, 1, 2, 1));
}

TEST(ImagePositionsTest, ImagesSideBySideAreTold) {
  const std::vector<int32_t> prompt = {kImage, kImage, kImage};
  const ImagePositions found =
      FindImages(Vision(), prompt, {},
                 {ImageShape{.grid = {1, 2, 2}}, ImageShape{.grid = {1, 4, 2}}})
          .value();
  EXPECT_THAT(found.first_tokens, ElementsAre(0, 1));
  EXPECT_THAT(found.positions[1], ElementsAre(0, 1, 2));
}

// The positions are those of the same tokens in one prompt; what a model wrote is text.
TEST(ImagePositionsTest, AnImageOfATurnStandsWhereItSays) {
  const std::vector<int32_t> prompt = {5, kImage, kImage, 6};
  const std::vector<int32_t> response = {7, kImage, 8, kImage, kImage, kImage, 9, 10};
  const ImageShape first = {.grid = {1, 4, 2}};
  ImageShape second = {.grid = {1, 2, 6}, .first_token = 7};
  const ImagePositions found = FindImages(Vision(), prompt, response, {first, second}).value();
  EXPECT_THAT(found.first_tokens, ElementsAre(1, 7));
  EXPECT_THAT(found.end_tokens, ElementsAre(3, 10));
  EXPECT_THAT(found.positions[2], ElementsAre(0, 1, 1, 3, 4, 5, 6, 7, 8, 9));

  std::vector<int32_t> whole = {5, kImage, kImage, 6, 7, 7, 8, kImage, kImage, kImage};
  second.first_token.reset();
  const ImagePositions of_prompt = FindImages(Vision(), whole, {}, {first, second}).value();
  EXPECT_EQ(found.positions, of_prompt.positions);
  EXPECT_EQ(found.next, of_prompt.next);
}

void ExpectRefused(const std::vector<int32_t>& prompt, const std::vector<ImageShape>& images,
                   const char* field, const char* why, const std::vector<int32_t>& response = {}) {
  const absl::Status status = FindImages(Vision(), prompt, response, images).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(FieldPath(status), field);
  EXPECT_THAT(std::string(status.message()), HasSubstr(why));
}

TEST(ImagePositionsTest, WhatDoesNotFitIsRefusedByName) {
  const ImageShape two = {.grid = {1, 2, 4}};
  ExpectRefused({1, kImage, 2}, {two}, "vision_inputs[0]",
                "stands for 2 tokens, but the prompt has 1");
  ExpectRefused({1, kImage, kImage}, {two, two}, "vision_inputs[1]", "the prompt has none of them");
  ExpectRefused({1, kImage, kImage, kImage}, {two}, "vision_inputs",
                "token 3 of the prompt stands for an image");
  ExpectRefused({1, kVideo, kVideo}, {two}, "vision_inputs[0]", "token 1 stands for a video");
  ExpectRefused({1, kImage}, {}, "vision_inputs", "all 0 images are placed before it");
  ExpectRefused({1}, {ImageShape{.grid = {1, 3, 4}}}, "vision_inputs[0].grid", "squares of 2 x 2");
  ExpectRefused({1}, {ImageShape{.grid = {0, 2, 4}}}, "vision_inputs[0].grid", "got 0");
  ExpectRefused({1}, {ImageShape{.grid = {1, int64_t{1} << 40, 4}}}, "vision_inputs[0].grid",
                "1048576");
}

TEST(ImagePositionsTest, AnImageOfATurnThatIsNotThereIsRefusedByName) {
  const std::vector<int32_t> response = {7, kImage, kImage, kImage};
  const auto at = [](std::optional<int64_t> token) {
    return ImageShape{.grid = {1, 2, 4}, .first_token = token};
  };
  const auto refused = [&](const std::vector<ImageShape>& images, const char* field,
                           const char* why) {
    ExpectRefused({1, 2}, images, field, why, response);
  };
  refused({at(1)}, "vision_inputs[0].first_token", "must be in [2, 5]");
  refused({at(6)}, "vision_inputs[0].first_token", "must be in [2, 5]");
  refused({at(2)}, "vision_inputs[0]", "stands for 2 tokens, but the response has 0 from token 2");
  refused({at(5)}, "vision_inputs[0]", "the response has 1 from token 5");
  refused({at(3), at(4)}, "vision_inputs[1].first_token", "must be in [5, 5]");
  refused({at(3), at({})}, "vision_inputs[1].first_token", "is required behind an image that");
  refused({at({})}, "vision_inputs[0]", "the prompt has none of them");
}

}  // namespace
}  // namespace tandem
