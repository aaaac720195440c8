#include "common/parallel/rank_agreement.h"

#include <map>
#include <string>
#include <vector>

#include "absl/strings/cord.h"
#include "absl/strings/string_view.h"
#include "common/base/status_macros.h"
#include "common/base/struct_bytes.h"

namespace tandem::parallel {
namespace {

struct PlainStatus {
  int code = 0;
  std::string message;
  std::map<std::string, std::string> payloads;
};

PlainStatus ToPlain(const absl::Status& status) {
  PlainStatus plain = {
      .code = status.raw_code(), .message = std::string(status.message()), .payloads = {}};
  status.ForEachPayload([&](absl::string_view url, const absl::Cord& payload) {
    plain.payloads[std::string(url)] = std::string(payload);
  });
  return plain;
}

absl::Status FromPlain(const PlainStatus& plain) {
  absl::Status status(static_cast<absl::StatusCode>(plain.code), plain.message);
  for (const auto& [url, payload] : plain.payloads) status.SetPayload(url, absl::Cord(payload));
  return status;
}

}  // namespace

absl::Status Agree(Communicator& ranks, const absl::Status& status) {
  if (ranks.size() == 1) return status;
  for (const std::string& bytes : ranks.AllGatherBytes(ToBytes(ToPlain(status)))) {
    TANDEM_ASSIGN_OR_RETURN(const PlainStatus theirs, FromBytes<PlainStatus>(bytes));
    if (theirs.code != 0) return FromPlain(theirs);
  }
  return absl::OkStatus();
}

}  // namespace tandem::parallel
