#include "common/rpc/server/reflection_service.h"

#include <gmock/gmock.h>
#include <google/protobuf/descriptor.pb.h>
#include <google/protobuf/unknown_field_set.h>
#include <grpcpp/support/status_code_enum.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "grpc/health/v1/health.pb.h"
#include "tandem/weights/v1/weights.pb.h"

namespace tandem::rpc {
namespace {

using grpc::reflection::v1::ServerReflectionRequest;
using grpc::reflection::v1::ServerReflectionResponse;
using testing::Contains;
using testing::ElementsAre;

std::vector<std::string> FileNames(const ServerReflectionResponse& response) {
  std::vector<std::string> names;
  for (const std::string& bytes : response.file_descriptor_response().file_descriptor_proto()) {
    google::protobuf::FileDescriptorProto file;
    EXPECT_TRUE(file.ParseFromString(bytes));
    names.push_back(file.name());
  }
  return names;
}

TEST(ReflectionTest, ListsTheNamesThatItWasGiven) {
  ServerReflectionRequest request;
  request.set_host("h");
  request.set_list_services("*");
  const ServerReflectionResponse response = Reflect(request, {"a.B", "c.D"});
  ASSERT_EQ(response.list_services_response().service_size(), 2);
  EXPECT_EQ(response.list_services_response().service(0).name(), "a.B");
  EXPECT_EQ(response.list_services_response().service(1).name(), "c.D");
  EXPECT_EQ(response.valid_host(), "h");
  EXPECT_EQ(response.original_request().list_services(), "*");
}

// grpcurl calls a server by its reflection.
TEST(ReflectionTest, DescribesHealthByItsSymbol) {
  (void)grpc::health::v1::HealthCheckRequest::descriptor();  // links the description
  ServerReflectionRequest request;
  request.set_file_containing_symbol("grpc.health.v1.Health");
  EXPECT_THAT(FileNames(Reflect(request, {})), ElementsAre("grpc/health/v1/health.proto"));
}

TEST(ReflectionTest, AFileComesWithAllThatItImportsOnce) {
  const google::protobuf::FileDescriptor& file = *weights::v1::WeightManifest::descriptor()->file();
  ServerReflectionRequest request;
  request.set_file_by_filename(file.name());
  const std::vector<std::string> names = FileNames(Reflect(request, {}));
  EXPECT_EQ(names.at(0), file.name());
  for (int i = 0; i < file.dependency_count(); ++i) {
    EXPECT_THAT(names, Contains(file.dependency(i)->name()).Times(1));
  }
}

TEST(ReflectionTest, UnknownNamesAreNotFound) {
  const std::string unknown = "no.such.Thing";
  std::vector<ServerReflectionRequest> requests(3);
  requests[0].set_file_by_filename(unknown);
  requests[1].set_file_containing_symbol(unknown);
  requests[2].set_all_extension_numbers_of_type(unknown);
  for (const ServerReflectionRequest& request : requests) {
    const ServerReflectionResponse response = Reflect(request, {});
    EXPECT_EQ(response.error_response().error_code(), grpc::StatusCode::NOT_FOUND);
    EXPECT_EQ(response.error_response().error_message(),
              "no.such.Thing is not known to this server");
  }
}

TEST(ReflectionTest, ARequestWithoutAQuestionIsRefused) {
  EXPECT_EQ(Reflect({}, {}).error_response().error_code(), grpc::StatusCode::INVALID_ARGUMENT);
}

// Proto3 has extensions of options alone: google.api's and others'.
TEST(ReflectionTest, ExtensionsAreFoundByTypeAndNumber) {
  ServerReflectionRequest request;
  request.set_all_extension_numbers_of_type("google.protobuf.FileOptions");
  EXPECT_EQ(Reflect(request, {}).all_extension_numbers_response().base_type_name(),
            "google.protobuf.FileOptions");
  ServerReflectionRequest extension;
  extension.mutable_file_containing_extension()->set_containing_type("google.protobuf.FileOptions");
  extension.mutable_file_containing_extension()->set_extension_number(50'000);
  EXPECT_EQ(Reflect(extension, {}).error_response().error_message(),
            "extension 50000 of google.protobuf.FileOptions is not known to this server");
}

TEST(ReflectionTest, TheAnswerRepeatsNoUnknownFields) {
  ServerReflectionRequest request;
  request.set_list_services("");
  request.GetReflection()->MutableUnknownFields(&request)->AddLengthDelimited(15, "x");
  EXPECT_EQ(Reflect(request, {}).original_request().SerializeAsString(),
            std::string("\x3a\x00", 2));
}

}  // namespace
}  // namespace tandem::rpc
