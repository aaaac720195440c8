// An image or a video of a sequence, as requests name it. Plain data.
#ifndef TANDEM_COMMON_TENSOR_VISION_REFERENCE_H_
#define TANDEM_COMMON_TENSOR_VISION_REFERENCE_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>

namespace tandem {

// Mirrors tandem.types.v1.VisionInput.
struct VisionReference {
  bool is_video = false;
  std::string digest;  // SHA-256 of the blob of its pixels, 64 hexadecimal digits
  // Patches in time, height and width.
  int64_t grid_t = 0;
  int64_t grid_h = 0;
  int64_t grid_w = 0;
  double seconds_per_grid = 1.0;  // from one patch in time to the next
  // Index in the sequence of its first token, in an environment's turn; nullopt: in the prompt.
  std::optional<int64_t> first_token = std::nullopt;

  bool operator==(const VisionReference&) const = default;
};

// The bytes of a blob, never null. Requests share them with the server's store.
using Blob = std::shared_ptr<const std::string>;
// The blobs that a request names, by digest.
using Blobs = std::map<std::string, Blob>;

}  // namespace tandem

#endif  // TANDEM_COMMON_TENSOR_VISION_REFERENCE_H_
