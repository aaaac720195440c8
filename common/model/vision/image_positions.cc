#include "common/model/vision/image_positions.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "common/base/errors/error.h"
#include "common/base/errors/field_check.h"
#include "common/base/errors/status_macros.h"

namespace tandem {
namespace {

// So that no product of sizes overflows.
constexpr int64_t kMaxSide = int64_t{1} << 20;
// So that positions, for which tables of rotations are made, stay near the length of the prompt.
constexpr double kMaxSecondsPerGrid = 60;

absl::Status CheckShape(const VisionConfig& vision, const ImageShape& image) {
  const VisionGrid& grid = image.grid;
  const int64_t merge = vision.spatial_merge_size;
  for (const int64_t size : {grid.frames, grid.height, grid.width}) {
    if (size >= 1 && size <= kMaxSide) continue;
    return InvalidField("grid",
                        absl::StrCat("must have sizes from 1 to ", kMaxSide, ", got ", size));
  }
  if (!image.is_video && grid.frames != 1) {
    return InvalidField(
        "grid", absl::StrCat("an image must have exactly one patch in time, got ", grid.frames));
  }
  TANDEM_RETURN_IF_ERROR(CheckAbove("seconds_per_grid", image.seconds_per_grid, 0));
  TANDEM_RETURN_IF_ERROR(
      CheckInRange("seconds_per_grid", image.seconds_per_grid, 0, kMaxSecondsPerGrid));
  if (grid.height % merge == 0 && grid.width % merge == 0) return absl::OkStatus();
  return InvalidField("grid",
                      absl::StrCat(grid.height, " x ", grid.width,
                                   " patches do not divide into squares of ", merge, " x ", merge));
}

// Appends the positions of tokens of text.
void AddText(int64_t tokens, ImagePositions& found) {
  for (int64_t i = 0; i < tokens; ++i, ++found.next) {
    for (auto& positions : found.positions) positions.push_back(found.next);
  }
}

int64_t NumPlaced(const ImagePositions& found) {
  return static_cast<int64_t>(found.positions[0].size());
}

// Appends the positions of an image whose first token is at `next`.
void AddImage(const VisionConfig& vision, const ImageShape& image, ImagePositions& found) {
  const int64_t height = image.grid.height / vision.spatial_merge_size,
                width = image.grid.width / vision.spatial_merge_size;
  // In float, as `transformers` rounds it.
  const float interval = image.is_video && vision.tokens_per_second > 0
                             ? static_cast<float>(vision.tokens_per_second) *
                                   static_cast<float>(image.seconds_per_grid)
                             : 1.0F;
  found.first_tokens.push_back(NumPlaced(found));
  for (int64_t frame = 0; frame < image.grid.frames; ++frame) {
    const auto time = static_cast<int64_t>(static_cast<float>(frame) * interval);
    for (int64_t i = 0; i < height * width; ++i) {
      found.positions[0].push_back(found.next + time);
      found.positions[1].push_back(found.next + i / width);
      found.positions[2].push_back(found.next + i % width);
    }
  }
  found.end_tokens.push_back(NumPlaced(found));
  found.next += std::max(height, width);
}

absl::Status MissingTokens(size_t image, int64_t needed, absl::string_view why) {
  return InvalidField(absl::StrCat("vision_inputs[", image, "]"),
                      absl::StrCat("stands for ", needed, " tokens, but ", why));
}

// Returns how many tokens from the first one on are equal to it.
int64_t EqualTokens(absl::Span<const int32_t> tokens) {
  const auto other = [&](int32_t id) { return id != tokens[0]; };
  return std::ranges::find_if(tokens, other) - tokens.begin();
}

// Places the images of the prompt.
absl::Status FindInPrompt(const VisionConfig& vision, absl::Span<const int32_t> prompt,
                          absl::Span<const ImageShape> images, ImagePositions& found) {
  while (NumPlaced(found) < static_cast<int64_t>(prompt.size())) {
    const int64_t token = NumPlaced(found);
    const int64_t id = prompt[token];
    if (!vision.IsImageToken(id)) {
      AddText(1, found);
      continue;
    }
    const size_t i = found.first_tokens.size();
    const char* const kind = id == vision.video_token_id ? "a video" : "an image";
    if (i == images.size()) {
      return InvalidField("vision_inputs",
                          absl::StrCat("token ", token, " of the prompt stands for ", kind,
                                       ", but all ", i, " images are placed before it"));
    }
    const int64_t rows = vision.Rows(images[i].grid);
    if (images[i].is_video != (id == vision.video_token_id)) {
      return MissingTokens(i, rows, absl::StrCat("token ", token, " stands for ", kind));
    }
    if (const int64_t there = EqualTokens(prompt.subspan(token)); there < rows) {
      return MissingTokens(i, rows, absl::StrCat("the prompt has ", there, " from token ", token));
    }
    AddImage(vision, images[i], found);
  }
  const size_t i = found.first_tokens.size();
  if (i == images.size()) return absl::OkStatus();
  return MissingTokens(i, vision.Rows(images[i].grid), "the prompt has none of them");
}

// Places image `i` behind what is placed, among the tokens of the response.
absl::Status FindInResponse(const VisionConfig& vision, int64_t prompt_tokens,
                            absl::Span<const int32_t> response, size_t i, const ImageShape& image,
                            ImagePositions& found) {
  const std::string field = absl::StrCat("vision_inputs[", i, "].first_token");
  const int64_t length = prompt_tokens + static_cast<int64_t>(response.size());
  if (!image.first_token.has_value()) {
    return InvalidField(field, "is required behind an image that has one");
  }
  TANDEM_RETURN_IF_ERROR(
      CheckInRange<int64_t>(field, *image.first_token, NumPlaced(found), length - 1));
  const auto rest = response.subspan(*image.first_token - prompt_tokens);
  const int64_t id = image.is_video ? vision.video_token_id : vision.image_token_id;
  const int64_t rows = vision.Rows(image.grid), there = rest[0] == id ? EqualTokens(rest) : 0;
  if (there < rows) {
    return MissingTokens(
        i, rows, absl::StrCat("the response has ", there, " from token ", *image.first_token));
  }
  AddText(*image.first_token - NumPlaced(found), found);
  AddImage(vision, image, found);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ImagePositions> FindImages(const VisionConfig& vision,
                                          absl::Span<const int32_t> prompt,
                                          absl::Span<const int32_t> response,
                                          absl::Span<const ImageShape> images) {
  for (size_t i = 0; i < images.size(); ++i) {
    const absl::Status status = CheckShape(vision, images[i]);
    if (!status.ok()) return PrependFieldPath(absl::StrCat("vision_inputs[", i, "]"), status);
  }
  const size_t in_prompt =
      std::ranges::find_if(images,
                           [](const ImageShape& one) { return one.first_token.has_value(); }) -
      images.begin();
  ImagePositions found;
  TANDEM_RETURN_IF_ERROR(FindInPrompt(vision, prompt, images.first(in_prompt), found));
  for (size_t i = in_prompt; i < images.size(); ++i) {
    TANDEM_RETURN_IF_ERROR(
        FindInResponse(vision, static_cast<int64_t>(prompt.size()), response, i, images[i], found));
  }
  return found;
}

}  // namespace tandem
