#include "common/rpc/calls/stream_message.h"

#include <grpcpp/impl/codegen/proto_utils.h>
#include <grpcpp/support/proto_buffer_reader.h>

#include "absl/strings/str_cat.h"
#include "common/rpc/calls/decoded_size.h"

namespace tandem::rpc {

absl::Status ParseMessage(grpc::ByteBuffer& bytes, google::protobuf::Message& message) {
  using Traits = grpc::SerializationTraits<google::protobuf::Message>;
  const google::protobuf::Descriptor& type = *message.GetDescriptor();
  {
    grpc::ProtoBufferReader reader(&bytes);
    if (DecodedBytes(type, reader) > kMaxDecodedBytes) {
      const size_t size = bytes.Length();
      bytes.Clear();
      return absl::ResourceExhaustedError(absl::StrCat(
          "the message (", size, " bytes of type ", type.full_name(), ") takes more than ",
          kMaxDecodedBytes, " bytes in memory once it is parsed"));
    }
  }
  const bool parsed = Traits::Deserialize(&bytes, &message).ok();
  bytes.Clear();
  if (parsed) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("the bytes are not a ", type.full_name()));
}

grpc::ByteBuffer SerializeMessage(const google::protobuf::Message& message) {
  using Traits = grpc::SerializationTraits<google::protobuf::Message>;
  grpc::ByteBuffer bytes;
  bool own_buffer = false;
  Traits::Serialize(message, &bytes, &own_buffer).IgnoreError();
  return bytes;
}

}  // namespace tandem::rpc
