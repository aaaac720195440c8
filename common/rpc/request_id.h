// Names of calls. Request ids: taken from the metadata "x-request-id", made up where it is absent,
// echoed in the trailing metadata under the same key and written in logs. Trace contexts: taken
// from "traceparent" and written in logs.
#ifndef TANDEM_COMMON_RPC_REQUEST_ID_H_
#define TANDEM_COMMON_RPC_REQUEST_ID_H_

#include <grpcpp/server_context.h>

#include <string>

namespace tandem::rpc {

inline constexpr char kRequestIdKey[] = "x-request-id";

// The client's id if it is short, printable text, else a new one.
std::string ChooseRequestId(const grpc::ServerContextBase& context);

// The same, and written into the trailing metadata, where the server's interceptor finds it. Once
// per call, before it is finished.
std::string AssignRequestId(grpc::ServerContextBase* context);

inline constexpr char kTraceparentKey[] = "traceparent";

// The client's trace context if it is well formed (W3C Trace Context, version 00), else "".
std::string TraceparentOf(const grpc::ServerContextBase& context);

}  // namespace tandem::rpc

#endif  // TANDEM_COMMON_RPC_REQUEST_ID_H_
