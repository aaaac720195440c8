#include "common/rpc/stream_message.h"

#include <grpcpp/impl/codegen/proto_utils.h>

namespace tandem::rpc {

absl::Status ParseMessage(grpc::ByteBuffer& bytes, google::protobuf::Message& message) {
  using Traits = grpc::SerializationTraits<google::protobuf::Message>;
  const bool parsed = Traits::Deserialize(&bytes, &message).ok();
  bytes.Clear();
  if (parsed) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("the bytes are not a ", message.GetDescriptor()->full_name()));
}

grpc::ByteBuffer SerializeMessage(const google::protobuf::Message& message) {
  using Traits = grpc::SerializationTraits<google::protobuf::Message>;
  grpc::ByteBuffer bytes;
  bool own_buffer = false;
  Traits::Serialize(message, &bytes, &own_buffer).IgnoreError();
  return bytes;
}

}  // namespace tandem::rpc
