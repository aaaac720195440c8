#include "common/rpc/calls/error_table.h"

#include <string>

#include "common/base/errors/error.h"
#include "google/rpc/error_details.pb.h"

namespace tandem::rpc {

google::rpc::Status ToRpcStatus(const absl::Status& status) {
  google::rpc::Status proto;
  proto.set_code(static_cast<int>(status.code()));
  proto.set_message(std::string(status.message()));
  if (status.ok()) return proto;
  if (const auto path = FieldPath(status)) {
    google::rpc::BadRequest details;
    auto* violation = details.add_field_violations();
    violation->set_field(*path);
    violation->set_description(std::string(status.message()));
    proto.add_details()->PackFrom(details);
  }
  if (const auto reason = Reason(status)) {
    google::rpc::ErrorInfo details;
    details.set_reason(*reason);
    details.set_domain(kErrorDomain);
    proto.add_details()->PackFrom(details);
  }
  if (const auto milliseconds = RetryAfterMilliseconds(status)) {
    google::rpc::RetryInfo details;
    details.mutable_retry_delay()->set_seconds(*milliseconds / 1000);
    details.mutable_retry_delay()->set_nanos(static_cast<int>(*milliseconds % 1000) * 1000000);
    proto.add_details()->PackFrom(details);
  }
  return proto;
}

absl::Status FromRpcStatus(const google::rpc::Status& proto) {
  // Codes outside the table are UNKNOWN, as gRPC has it.
  const bool known = proto.code() >= 0 && proto.code() <= 16;
  absl::Status status(
      known ? static_cast<absl::StatusCode>(proto.code()) : absl::StatusCode::kUnknown,
      proto.message());
  if (status.ok()) return status;
  for (const google::protobuf::Any& any : proto.details()) {
    google::rpc::BadRequest bad_request;
    google::rpc::ErrorInfo info;
    google::rpc::RetryInfo retry;
    if (any.UnpackTo(&bad_request)) {
      if (bad_request.field_violations_size() == 0) continue;
      // FieldError writes the path into the message, which already has it.
      const absl::Status with_path =
          FieldError(status.code(), bad_request.field_violations(0).field(), "");
      with_path.ForEachPayload([&](absl::string_view url, const absl::Cord& payload) {
        status.SetPayload(url, payload);
      });
    } else if (any.UnpackTo(&info)) {
      status = WithReasonNamed(status, info.reason());
    } else if (any.UnpackTo(&retry)) {
      status = WithRetryAfter(
          status, retry.retry_delay().seconds() * 1000 + retry.retry_delay().nanos() / 1000000);
    }
  }
  return status;
}

grpc::Status ToGrpcStatus(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  const google::rpc::Status proto = ToRpcStatus(status);
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()), proto.message(),
                      proto.details_size() == 0 ? std::string() : proto.SerializeAsString());
}

absl::Status FromGrpcStatus(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  google::rpc::Status proto;
  if (status.error_details().empty() || !proto.ParseFromString(status.error_details())) {
    proto.Clear();
  }
  proto.set_code(static_cast<int>(status.error_code()));
  proto.set_message(status.error_message());
  return FromRpcStatus(proto);
}

}  // namespace tandem::rpc
