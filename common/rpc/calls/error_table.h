// The one table between absl::Status and gRPC: codes map one to one, the details of
// common/base/errors/error.h become google.rpc details (field path → BadRequest, reason →
// ErrorInfo, retry hint → RetryInfo) and back.
#ifndef TANDEM_COMMON_RPC_CALLS_ERROR_TABLE_H_
#define TANDEM_COMMON_RPC_CALLS_ERROR_TABLE_H_

#include <grpcpp/support/status.h>

#include "absl/status/status.h"
#include "google/rpc/status.pb.h"

namespace tandem::rpc {

// Domain of every google.rpc.ErrorInfo that we send.
inline constexpr char kErrorDomain[] = "tandem";

grpc::Status ToGrpcStatus(const absl::Status& status);
absl::Status FromGrpcStatus(const grpc::Status& status);

google::rpc::Status ToRpcStatus(const absl::Status& status);
absl::Status FromRpcStatus(const google::rpc::Status& status);

}  // namespace tandem::rpc

#endif  // TANDEM_COMMON_RPC_CALLS_ERROR_TABLE_H_
