// Request ids: taken from the metadata "x-request-id", made up where it is absent, echoed in the
// trailing metadata under the same key and written in logs.
#ifndef TANDEM_COMMON_RPC_REQUEST_ID_H_
#define TANDEM_COMMON_RPC_REQUEST_ID_H_

#include <grpcpp/server_context.h>

#include <string>

namespace tandem::rpc {

inline constexpr char kRequestIdKey[] = "x-request-id";

// The id of a live call; the rpc interceptor of common/rpc/server.h must be installed, else "".
std::string RequestId(const grpc::ServerContextBase* context);

}  // namespace tandem::rpc

#endif  // TANDEM_COMMON_RPC_REQUEST_ID_H_
