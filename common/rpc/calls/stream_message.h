// Messages as bytes. grpc++ parses a request whatever memory that takes, and to the reader of a
// stream it reports a message that it cannot parse exactly as it reports the client's half-close,
// so messages are received as bytes and parsed here.
#ifndef TANDEM_COMMON_RPC_CALLS_STREAM_MESSAGE_H_
#define TANDEM_COMMON_RPC_CALLS_STREAM_MESSAGE_H_

#include <google/protobuf/arena.h>
#include <google/protobuf/message.h>
#include <grpcpp/support/byte_buffer.h>

#include <cstddef>
#include <cstdint>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/base/errors/error.h"
#include "common/base/errors/status_macros.h"

namespace tandem::rpc {

// Parses `bytes` as `message`, and empties `bytes`. INVALID_ARGUMENT when they are not such a
// message, RESOURCE_EXHAUSTED when it would take more than kMaxDecodedBytes of memory; both name
// the message type.
absl::Status ParseMessage(grpc::ByteBuffer& bytes, google::protobuf::Message& message);

// `message` must be below 2 GiB, as the answers to requests of at most 4 MiB are.
grpc::ByteBuffer SerializeMessage(const google::protobuf::Message& message);

// Parses a message, gives it to `use` and forgets it. Its memory comes in large blocks, which go
// back to the system as a whole.
template <typename Message>
absl::Status UseMessage(grpc::ByteBuffer& bytes,
                        absl::FunctionRef<absl::Status(const Message& message)> use) {
  google::protobuf::ArenaOptions options;
  options.max_block_size = size_t{1} << 20;
  google::protobuf::Arena arena(options);
  auto* const message = google::protobuf::Arena::CreateMessage<Message>(&arena);
  TANDEM_RETURN_IF_ERROR(ParseMessage(bytes, *message));
  return use(*message);
}

// The same for message number `index` of a stream, whose path is in the error if it cannot be
// parsed.
template <typename Message>
absl::Status UseMessage(int64_t index, grpc::ByteBuffer& bytes,
                        absl::FunctionRef<absl::Status(const Message& message)> use) {
  bool parsed = false;
  absl::Status status = UseMessage<Message>(bytes, [&](const Message& message) {
    parsed = true;
    return use(message);
  });
  return parsed ? status
                : PrependFieldPath(absl::StrCat("messages[", index, "]"), std::move(status));
}

}  // namespace tandem::rpc

#endif  // TANDEM_COMMON_RPC_CALLS_STREAM_MESSAGE_H_
