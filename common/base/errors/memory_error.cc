#include "common/base/errors/memory_error.h"

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"

namespace tandem {
namespace {

constexpr char kMemoryUrl[] = "tandem/out_of_memory";

}  // namespace

absl::Status OutOfMemoryError(absl::string_view what, absl::string_view memory) {
  absl::Status status =
      absl::ResourceExhaustedError(absl::StrCat(what, ": ", memory, " is used up"));
  status.SetPayload(kMemoryUrl, absl::Cord(memory));
  return status;
}

absl::Status NameMemorySettings(absl::Status status, absl::string_view settings) {
  if (!status.GetPayload(kMemoryUrl).has_value()) return status;
  absl::Status named =
      absl::ResourceExhaustedError(absl::StrCat(status.message(), "; remedies: ", settings));
  status.ForEachPayload([&](absl::string_view url, const absl::Cord& payload) {
    if (url != kMemoryUrl) named.SetPayload(url, payload);  // the settings are named once
  });
  return named;
}

}  // namespace tandem
