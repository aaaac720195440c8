#include "common/tensor/aten/catch_torch_errors.h"

#include <algorithm>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "common/base/errors/memory_error.h"

namespace tandem {
namespace {

// How allocators and libraries say that there is no memory, where libtorch throws a plain
// c10::Error.
constexpr absl::string_view kHostTexts[] = {"DefaultCPUAllocator:"};
constexpr absl::string_view kDeviceTexts[] = {"CUDA error: out of memory",
                                              "CUBLAS_STATUS_ALLOC_FAILED",
                                              "CUDNN_STATUS_ALLOC_FAILED", "Cuda failure 2"};

bool HasAny(absl::string_view text, absl::Span<const absl::string_view> parts) {
  return std::any_of(parts.begin(), parts.end(),
                     [&](absl::string_view part) { return absl::StrContains(text, part); });
}

// Returns the text between two others, or "" where `text` does not have them.
absl::string_view Between(absl::string_view text, absl::string_view before,
                          absl::string_view after) {
  const size_t found = text.find(before);
  if (found == text.npos) return "";
  const size_t begin = found + before.size(), end = text.find(after, begin);
  return end == text.npos ? "" : text.substr(begin, end - begin);
}

// Returns the device's memory with the numbers of the caching allocator's text: "Tried to allocate
// 2.00 GiB. GPU 0 has a total capacity of 79.19 GiB of which 1.50 GiB is free."
std::string DeviceMemory(absl::string_view text) {
  const absl::string_view asked = Between(text, "Tried to allocate ", ". ");
  const absl::string_view total = Between(text, "total capacity of ", " of which ");
  const absl::string_view free = Between(text, " of which ", " is free");
  if (asked.empty() || total.empty() || free.empty()) return "the GPU's memory";
  return absl::StrCat("the GPU's memory (", total, ", of which ", free, " were free when ", asked,
                      " more were needed)");
}

}  // namespace

absl::Status TorchError(absl::string_view what, const c10::Error& error) {
  const std::string text = error.what_without_backtrace();
  if (dynamic_cast<const c10::OutOfMemoryError*>(&error) != nullptr || HasAny(text, kDeviceTexts)) {
    return OutOfMemoryError(what, DeviceMemory(text));
  }
  if (HasAny(text, kHostTexts)) return OutOfMemoryError(what, "the host's memory");
  return absl::InternalError(absl::StrCat(what, ": ", text));
}

}  // namespace tandem
