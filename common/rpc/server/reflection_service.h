// Server reflection, by which grpcurl and others learn a server's methods and messages. grpc++ has
// one, which parses a request before any bound of ours and holds it as long as the stream is open.
#ifndef TANDEM_COMMON_RPC_SERVER_REFLECTION_SERVICE_H_
#define TANDEM_COMMON_RPC_SERVER_REFLECTION_SERVICE_H_

#include <grpcpp/impl/service_type.h>

#include <memory>
#include <string>
#include <vector>

#include "common/rpc/calls/call_executor.h"
#include "grpc/reflection/v1/reflection.pb.h"

namespace tandem::rpc {

// Versions v1 and v1alpha of the protocol, whose messages are the same. Answers while the
// executor's gate is open.
class ReflectionService {
 public:
  // `names` are the full names of the services that clients can list, without those of reflection.
  ReflectionService(CallExecutor& executor, std::vector<std::string> names);
  ~ReflectionService();

  // One for each version.
  std::vector<grpc::Service*> services() const;

  // The full names of the services of both versions.
  static std::vector<std::string> Names();

 private:
  std::vector<std::unique_ptr<grpc::Service>> services_;
};

// The answer to one request about the messages that are linked into this program, where `names` are
// the services to list. What is not known is an error_response with NOT_FOUND.
grpc::reflection::v1::ServerReflectionResponse Reflect(
    const grpc::reflection::v1::ServerReflectionRequest& request,
    const std::vector<std::string>& names);

}  // namespace tandem::rpc

#endif  // TANDEM_COMMON_RPC_SERVER_REFLECTION_SERVICE_H_
