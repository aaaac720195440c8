#include "common/rpc/request_id.h"

#include <algorithm>
#include <random>

#include "absl/strings/ascii.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"

namespace tandem::rpc {
namespace {

constexpr size_t kMaxRequestIdBytes = 128;

std::string NewRequestId() {
  thread_local std::mt19937_64 generator{std::random_device{}()};
  return absl::StrFormat("%016x%016x", generator(), generator());
}

}  // namespace

std::string ChooseRequestId(const grpc::ServerContextBase& context) {
  const auto found = context.client_metadata().find(kRequestIdKey);
  if (found == context.client_metadata().end()) return NewRequestId();
  std::string id(found->second.data(), found->second.size());
  const bool usable = !id.empty() && id.size() <= kMaxRequestIdBytes &&
                      std::all_of(id.begin(), id.end(), absl::ascii_isgraph);
  return usable ? id : NewRequestId();
}

std::string AssignRequestId(grpc::ServerContextBase* context) {
  std::string id = ChooseRequestId(*context);
  context->AddTrailingMetadata(kRequestIdKey, id);
  return id;
}

std::string TraceparentOf(const grpc::ServerContextBase& context) {
  const auto found = context.client_metadata().find(kTraceparentKey);
  if (found == context.client_metadata().end()) return "";
  const absl::string_view text(found->second.data(), found->second.size());
  constexpr absl::string_view kForm = "00-xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx-xxxxxxxxxxxxxxxx-xx";
  const auto fits = [](char c, char form) {
    return form == 'x' ? absl::ascii_isdigit(c) || (c >= 'a' && c <= 'f') : c == form;
  };
  const bool well_formed =
      text.size() == kForm.size() && std::equal(text.begin(), text.end(), kForm.begin(), fits);
  return well_formed ? std::string(text) : "";
}

}  // namespace tandem::rpc
