// The sending side of blobs, for a server that names them in its calls of another.
#ifndef TANDEM_COMMON_RPC_TRANSFER_BLOB_SENDER_H_
#define TANDEM_COMMON_RPC_TRANSFER_BLOB_SENDER_H_

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "common/base/call_scope.h"
#include "common/base/errors/error.h"
#include "common/tensor/vision_reference.h"
#include "tandem/blobs/v1/blobs.grpc.pb.h"

namespace tandem::rpc {

// Uploads those of the blobs that the receiver does not hold. Errors of BlobService.
absl::Status SendMissingBlobs(const CallScope& call, absl::Duration rpc_timeout, const Blobs& blobs,
                              blobs::v1::BlobService::StubInterface& receiver);

// Makes a call that names `blobs`, and returns its StatusOr: uploads what is missing before it, and
// once more if the receiver has dropped blobs since.
template <typename Attempt>
auto CallWithBlobs(const CallScope& call, absl::Duration rpc_timeout, const Blobs& blobs,
                   blobs::v1::BlobService::StubInterface& receiver, Attempt&& attempt)
    -> decltype(attempt()) {
  if (blobs.empty()) return attempt();
  for (bool is_second = false;; is_second = true) {
    absl::Status sent = SendMissingBlobs(call, rpc_timeout, blobs, receiver);
    if (!sent.ok()) return sent;
    auto result = attempt();
    if (is_second || !HasReason(result.status(), reason::kBlobMissing)) return result;
  }
}

}  // namespace tandem::rpc

#endif  // TANDEM_COMMON_RPC_TRANSFER_BLOB_SENDER_H_
