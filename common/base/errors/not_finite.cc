#include "common/base/errors/not_finite.h"

#include "absl/strings/cord.h"

namespace tandem {
namespace {

constexpr char kUrl[] = "tandem/not_finite";

}  // namespace

absl::Status NotFiniteError(absl::string_view message) {
  absl::Status status = absl::InternalError(message);
  status.SetPayload(kUrl, absl::Cord());
  return status;
}

bool IsNotFinite(const absl::Status& status) { return status.GetPayload(kUrl).has_value(); }

}  // namespace tandem
