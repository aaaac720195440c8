#include "common/rpc/server/reflection_service.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/descriptor.pb.h>
#include <grpcpp/support/server_callback.h>
#include <grpcpp/support/status.h>

#include <set>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "common/rpc/calls/stream_handlers.h"
#include "grpc/reflection/v1/reflection.grpc.pb.h"
#include "grpc/reflection/v1alpha/reflection.grpc.pb.h"

namespace tandem::rpc {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::DescriptorPool;
using google::protobuf::FieldDescriptor;
using google::protobuf::FileDescriptor;
using grpc::reflection::v1::ServerReflectionRequest;
using grpc::reflection::v1::ServerReflectionResponse;

// Adds `file` and the files that it imports, each once.
void AddFiles(const FileDescriptor* file, std::set<const FileDescriptor*>& added,
              grpc::reflection::v1::FileDescriptorResponse& response) {
  if (!added.insert(file).second) return;
  google::protobuf::FileDescriptorProto proto;
  file->CopyTo(&proto);
  response.add_file_descriptor_proto(proto.SerializeAsString());
  for (int i = 0; i < file->dependency_count(); ++i) {
    AddFiles(file->dependency(i), added, response);
  }
}

// The file that holds the extension, or nullptr.
const FileDescriptor* FileOf(const grpc::reflection::v1::ExtensionRequest& extension) {
  const DescriptorPool* const pool = DescriptorPool::generated_pool();
  const Descriptor* const type = pool->FindMessageTypeByName(extension.containing_type());
  if (type == nullptr) return nullptr;
  const FieldDescriptor* const field =
      pool->FindExtensionByNumber(type, extension.extension_number());
  return field == nullptr ? nullptr : field->file();
}

// One version of the service; `Callbacks` has its method, marked WithRawCallbackMethod_.
template <typename Callbacks>
class Version final : public Callbacks {
 public:
  Version(CallExecutor& executor, std::vector<std::string> names)
      : executor_(executor), names_(std::move(names)) {}

  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* ServerReflectionInfo(
      grpc::CallbackServerContext* context) override {
    return HandleMapStream<ServerReflectionRequest, ServerReflectionResponse>(
        executor_, context,
        [this](const ServerReflectionRequest& request, const CallScope&)
            -> absl::StatusOr<ServerReflectionResponse> { return Reflect(request, names_); });
  }

 private:
  CallExecutor& executor_;
  const std::vector<std::string> names_;
};

using V1 = grpc::reflection::v1::ServerReflection;
using V1Alpha = grpc::reflection::v1alpha::ServerReflection;

}  // namespace

ServerReflectionResponse Reflect(const ServerReflectionRequest& request,
                                 const std::vector<std::string>& names) {
  ServerReflectionResponse response;
  response.set_valid_host(request.host());
  *response.mutable_original_request() = request;
  response.mutable_original_request()->DiscardUnknownFields();
  const auto fail = [&](grpc::StatusCode code, const std::string& message) {
    response.mutable_error_response()->set_error_code(code);
    response.mutable_error_response()->set_error_message(message);
  };
  const auto describe = [&](const FileDescriptor* file, const std::string& wanted) {
    if (file == nullptr) {
      fail(grpc::NOT_FOUND, absl::StrCat(wanted, " is not known to this server"));
      return;
    }
    std::set<const FileDescriptor*> added;
    AddFiles(file, added, *response.mutable_file_descriptor_response());
  };
  const DescriptorPool* const pool = DescriptorPool::generated_pool();
  switch (request.message_request_case()) {
    case ServerReflectionRequest::kFileByFilename:
      describe(pool->FindFileByName(request.file_by_filename()), request.file_by_filename());
      break;
    case ServerReflectionRequest::kFileContainingSymbol:
      describe(pool->FindFileContainingSymbol(request.file_containing_symbol()),
               request.file_containing_symbol());
      break;
    case ServerReflectionRequest::kFileContainingExtension: {
      const auto& extension = request.file_containing_extension();
      describe(FileOf(extension), absl::StrCat("extension ", extension.extension_number(), " of ",
                                               extension.containing_type()));
      break;
    }
    case ServerReflectionRequest::kAllExtensionNumbersOfType: {
      const std::string& name = request.all_extension_numbers_of_type();
      const Descriptor* const type = pool->FindMessageTypeByName(name);
      if (type == nullptr) {
        fail(grpc::NOT_FOUND, absl::StrCat(name, " is not known to this server"));
        break;
      }
      auto& numbers = *response.mutable_all_extension_numbers_response();
      numbers.set_base_type_name(name);
      std::vector<const FieldDescriptor*> extensions;
      pool->FindAllExtensions(type, &extensions);
      for (const FieldDescriptor* extension : extensions) {
        numbers.add_extension_number(extension->number());
      }
      break;
    }
    case ServerReflectionRequest::kListServices:
      for (const std::string& name : names) {
        response.mutable_list_services_response()->add_service()->set_name(name);
      }
      break;
    case ServerReflectionRequest::MESSAGE_REQUEST_NOT_SET:
      fail(grpc::INVALID_ARGUMENT, "message_request is required");
      break;
  }
  return response;
}

ReflectionService::ReflectionService(CallExecutor& executor, std::vector<std::string> names) {
  for (const std::string& name : Names()) names.push_back(name);
  services_.push_back(
      std::make_unique<Version<V1::WithRawCallbackMethod_ServerReflectionInfo<V1::Service>>>(
          executor, names));
  services_.push_back(
      std::make_unique<
          Version<V1Alpha::WithRawCallbackMethod_ServerReflectionInfo<V1Alpha::Service>>>(executor,
                                                                                          names));
}

ReflectionService::~ReflectionService() = default;

std::vector<grpc::Service*> ReflectionService::services() const {
  std::vector<grpc::Service*> services;
  for (const auto& service : services_) services.push_back(service.get());
  return services;
}

std::vector<std::string> ReflectionService::Names() {
  return {V1::service_full_name(), V1Alpha::service_full_name()};
}

}  // namespace tandem::rpc
