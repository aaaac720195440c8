#include "common/model/vision/prompt_images.h"

#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "common/base/errors/error.h"

namespace tandem {
namespace {

constexpr int32_t kImage = 57;

const VisionConfig kVision = {.in_channels = 3,
                              .patch_size = 2,
                              .temporal_patch_size = 2,
                              .spatial_merge_size = 2,
                              .image_token_id = kImage,
                              .video_token_id = 58};

const std::vector<int32_t> kPrompt = {5, kImage, kImage, 6};

VisionReference Reference(const std::string& digest) {
  return {.digest = digest, .grid_t = 1, .grid_h = 2, .grid_w = 4};
}

Blobs BlobOf(size_t bytes) { return {{"a", std::make_shared<const std::string>(bytes, '\0')}}; }

constexpr size_t kBytes = 8 * 24 * sizeof(float);  // 8 patches of 3 x 2 x 2 x 2 values

TEST(PromptImagesTest, AnImageIsFoundWithItsPixels) {
  const Blobs blobs = BlobOf(kBytes);
  const auto images = MakePromptImages(&kVision, kPrompt, {}, {Reference("a")}, blobs);
  ASSERT_TRUE(images.ok()) << images.status();
  ASSERT_EQ((*images)->inputs.size(), 1);
  EXPECT_EQ((*images)->inputs[0].pixels, blobs.at("a")) << "the bytes are shared";
  EXPECT_EQ((*images)->found.first_tokens[0], 1);
  EXPECT_EQ((*images)->found.end_tokens[0], 3);
  EXPECT_EQ((*images)->num_placed(), 4);
}

TEST(PromptImagesTest, TextHasNoImages) {
  EXPECT_EQ(*MakePromptImages(&kVision, {1, 2}, {}, {}, {}), nullptr);
  // To a model without a tower every id is text.
  EXPECT_EQ(*MakePromptImages(nullptr, kPrompt, {}, {}, {}), nullptr);
}

TEST(PromptImagesTest, OnlyAnEnvironmentShowsImagesBehindThePrompt) {
  const std::vector<int32_t> prompt = {5, 6}, response = {kImage, 7, kImage, kImage};
  VisionReference reference = Reference("a");
  reference.first_token = 4;
  const auto images =
      MakePromptImages(&kVision, prompt, response, {reference}, BlobOf(kBytes)).value();
  EXPECT_EQ(images->num_placed(), 6);
  const auto field = [&](const PromptImages* shown, size_t environment) {
    const absl::Status status =
        CheckImagesOfTurns(kVision, shown, std::ssize(prompt), "response", response,
                           [&](size_t t) { return t < environment; });
    return status.ok() ? "" : FieldPath(status).value_or("no field");
  };
  // The first token is a model's, as text.
  EXPECT_EQ(field(images.get(), 2), "");
  EXPECT_EQ(field(images.get(), 3), "vision_inputs[0].first_token");
  EXPECT_EQ(field(images.get(), 0), "response[0]");
  EXPECT_EQ(field(nullptr, 3), "response[3]");
  EXPECT_EQ(field(nullptr, 4), "");
}

void ExpectRefused(const VisionConfig* vision, const VisionReference& reference, const Blobs& blobs,
                   absl::StatusCode code, const char* field) {
  const absl::Status status = MakePromptImages(vision, kPrompt, {}, {reference}, blobs).status();
  EXPECT_EQ(status.code(), code) << status;
  EXPECT_EQ(FieldPath(status), field);
}

TEST(PromptImagesTest, WhatDoesNotFitIsRefusedByName) {
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  ExpectRefused(nullptr, Reference("a"), BlobOf(kBytes), kInvalid, "vision_inputs");
  ExpectRefused(&kVision, Reference("a"), BlobOf(kBytes - 4), kInvalid, "vision_inputs[0].digest");
  ExpectRefused(&kVision, Reference("b"), BlobOf(kBytes), absl::StatusCode::kFailedPrecondition,
                "vision_inputs[0].digest");
  for (const float value :
       {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()}) {
    std::string pixels(kBytes, '\0');
    std::memcpy(pixels.data() + kBytes - sizeof(value), &value, sizeof(value));
    ExpectRefused(&kVision, Reference("a"), {{"a", std::make_shared<const std::string>(pixels)}},
                  kInvalid, "vision_inputs[0].digest");
  }
  VisionReference wide = Reference("a");
  wide.grid_w = 8;
  ExpectRefused(&kVision, wide, BlobOf(kBytes), kInvalid, "vision_inputs[0]");
  wide.grid_w = 3;
  ExpectRefused(&kVision, wide, BlobOf(kBytes), kInvalid, "vision_inputs[0].grid");
  VisionReference frames = Reference("a");
  frames.grid_t = 2;
  ExpectRefused(&kVision, frames, BlobOf(kBytes), kInvalid, "vision_inputs[0].grid");
  for (const double seconds : {0.0, -1.0, 61.0}) {
    VisionReference slow = Reference("a");
    slow.seconds_per_grid = seconds;
    ExpectRefused(&kVision, slow, BlobOf(kBytes), kInvalid, "vision_inputs[0].seconds_per_grid");
  }
}

}  // namespace
}  // namespace tandem
