#include "common/model/vision/prompt_images.h"

#include <atomic>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/errors/error.h"
#include "common/base/errors/status_macros.h"

namespace tandem {
namespace {

ImageShape ShapeOf(const VisionReference& reference) {
  return {
      .grid = {.frames = reference.grid_t, .height = reference.grid_h, .width = reference.grid_w},
      .is_video = reference.is_video,
      .seconds_per_grid = reference.seconds_per_grid,
      .first_token = reference.first_token};
}

// Whether no float32 in `bytes` is NaN or infinite: none has all bits of the exponent.
bool AllFinite(const std::string& bytes) {
  constexpr uint32_t kExponent = 0x7f800000;
  uint32_t found = 0;
  for (size_t i = 0; i + sizeof(uint32_t) <= bytes.size(); i += sizeof(uint32_t)) {
    uint32_t bits = 0;
    std::memcpy(&bits, bytes.data() + i, sizeof(bits));
    found |= static_cast<uint32_t>((bits & kExponent) == kExponent);
  }
  return found == 0;
}

absl::StatusOr<Blob> FindPixels(const VisionConfig& vision, const VisionReference& reference,
                                const Blobs& blobs) {
  const auto found = blobs.find(reference.digest);
  if (found == blobs.end()) {
    return WithReason(FieldError(absl::StatusCode::kFailedPrecondition, "digest",
                                 absl::StrCat("the blob ", reference.digest, " is missing")),
                      reason::kBlobMissing);
  }
  const VisionGrid grid = ShapeOf(reference).grid;
  const int64_t bytes =
      grid.patches() * vision.patch_values() * static_cast<int64_t>(sizeof(float));
  if (static_cast<int64_t>(found->second->size()) == bytes) {
    if (AllFinite(*found->second)) return found->second;
    return InvalidField("digest", absl::StrCat("the blob ", reference.digest,
                                               " has pixels that are NaN or infinite"));
  }
  return InvalidField(
      "digest", absl::StrCat("the blob has ", found->second->size(), " bytes, and ", grid.frames,
                             " x ", grid.height, " x ", grid.width, " patches of ",
                             vision.patch_values(), " values have ", bytes));
}

}  // namespace

absl::StatusOr<std::shared_ptr<const PromptImages>> MakePromptImages(
    const VisionConfig* vision, absl::Span<const int32_t> prompt,
    absl::Span<const int32_t> response, absl::Span<const VisionReference> references,
    const Blobs& blobs) {
  if (vision == nullptr) {
    if (references.empty()) return nullptr;
    return InvalidField("vision_inputs", "the model takes no images");
  }
  std::vector<ImageShape> shapes;
  for (const VisionReference& reference : references) shapes.push_back(ShapeOf(reference));
  auto images = std::make_shared<PromptImages>();
  TANDEM_ASSIGN_OR_RETURN(images->found, FindImages(*vision, prompt, response, shapes));
  if (references.empty()) return nullptr;
  static std::atomic<uint64_t> last_id = 0;
  images->id = ++last_id;
  for (size_t i = 0; i < references.size(); ++i) {
    absl::StatusOr<Blob> pixels = FindPixels(*vision, references[i], blobs);
    if (!pixels.ok()) {
      return PrependFieldPath(absl::StrCat("vision_inputs[", i, "]"), pixels.status());
    }
    images->inputs.push_back(
        {.shape = shapes[i], .digest = references[i].digest, .pixels = *std::move(pixels)});
  }
  return images;
}

absl::Status CheckImagesOfTurns(const VisionConfig& vision, const PromptImages* images,
                                int64_t prompt_tokens, absl::string_view field,
                                absl::Span<const int32_t> response,
                                absl::FunctionRef<bool(size_t t)> is_drawn) {
  std::vector<bool> shown(response.size(), false);
  for (size_t i = 0; images != nullptr && i < images->inputs.size(); ++i) {
    for (int64_t p = images->found.first_tokens[i]; p < images->found.end_tokens[i]; ++p) {
      if (p < prompt_tokens) continue;
      const auto t = static_cast<size_t>(p - prompt_tokens);
      shown[t] = true;
      if (!is_drawn(t)) continue;
      return InvalidField(absl::StrCat("vision_inputs[", i, "].first_token"),
                          absl::StrCat("a model wrote token ", t,
                                       " of the response: only an environment shows images"));
    }
  }
  for (size_t t = 0; t < response.size(); ++t) {
    if (shown[t] || is_drawn(t) || !vision.IsImageToken(response[t])) continue;
    return InvalidField(absl::StrCat(field, "[", t, "]"),
                        "stands for an image or a video of the environment, but no vision input "
                        "has it (vision_inputs[i].first_token)");
  }
  return absl::OkStatus();
}

bool TakesSamePixels(const VisionConfig& a, const VisionConfig& b) {
  return a.image_token_id == b.image_token_id && a.video_token_id == b.video_token_id &&
         a.spatial_merge_size == b.spatial_merge_size && a.patch_values() == b.patch_values();
}

bool TakesSameImages(const VisionConfig& a, const VisionConfig& b) {
  return TakesSamePixels(a, b) && a.tokens_per_second == b.tokens_per_second;
}

}  // namespace tandem
