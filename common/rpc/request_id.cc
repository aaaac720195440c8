#include "common/rpc/request_id.h"

#include <algorithm>
#include <random>

#include "absl/strings/ascii.h"
#include "absl/strings/str_format.h"

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

}  // namespace tandem::rpc
