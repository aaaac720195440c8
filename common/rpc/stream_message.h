// Messages of streams as bytes. To the reader of a stream grpc++ reports a message that it cannot
// parse exactly as it reports the client's half-close, so streams are read as bytes and parsed
// here.
#ifndef TANDEM_COMMON_RPC_STREAM_MESSAGE_H_
#define TANDEM_COMMON_RPC_STREAM_MESSAGE_H_

#include <google/protobuf/arena.h>
#include <google/protobuf/message.h>
#include <grpcpp/support/byte_buffer.h>

#include <cstddef>
#include <cstdint>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/base/error.h"
#include "common/base/status_macros.h"

namespace tandem::rpc {

// Empties `bytes`. INVALID_ARGUMENT names the message type.
absl::Status ParseMessage(grpc::ByteBuffer& bytes, google::protobuf::Message& message);

// `message` must be below 2 GiB; what a server answers to requests of 4 MiB is.
grpc::ByteBuffer SerializeMessage(const google::protobuf::Message& message);

// Parses message number `index` of a stream, gives it to `use` and forgets it. Its memory comes in
// large blocks that go back to the system as a whole: a message of empty parts takes a hundred
// times its bytes.
template <typename Message>
absl::Status UseMessage(int64_t index, grpc::ByteBuffer& bytes,
                        absl::FunctionRef<absl::Status(const Message& message)> use) {
  google::protobuf::ArenaOptions options;
  options.max_block_size = size_t{1} << 20;
  google::protobuf::Arena arena(options);
  auto* const message = google::protobuf::Arena::CreateMessage<Message>(&arena);
  TANDEM_RETURN_IF_ERROR(
      PrependFieldPath(absl::StrCat("messages[", index, "]"), ParseMessage(bytes, *message)));
  return use(*message);
}

}  // namespace tandem::rpc

#endif  // TANDEM_COMMON_RPC_STREAM_MESSAGE_H_
