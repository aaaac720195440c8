// Counts, times, names and logs every call of a server.
#ifndef TANDEM_COMMON_RPC_SERVER_RPC_INTERCEPTOR_H_
#define TANDEM_COMMON_RPC_SERVER_RPC_INTERCEPTOR_H_

#include <grpcpp/support/server_interceptor.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "common/rpc/metrics/metrics.h"

namespace tandem::rpc {

// The methods that a server has: full name of the request by path ("/package.Service/Method").
using MethodTable = std::map<std::string, std::string>;

// For every call: the RED metrics of metric_names.h, the request id (request_id.h), a log line when
// it failed (ten a second at most), and a text where grpc++ answers without one: to a request that
// it cannot parse and to an unknown method. Calls are counted from 0 by every method of `methods`
// and every status code; those of other methods are counted together. `live_calls` counts the calls
// in progress, health and reflection left out; it must outlive the server, like `metrics`.
std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface> MakeRpcInterceptor(
    MethodTable methods, Metrics* metrics, std::atomic<int64_t>* live_calls);

}  // namespace tandem::rpc

#endif  // TANDEM_COMMON_RPC_SERVER_RPC_INTERCEPTOR_H_
