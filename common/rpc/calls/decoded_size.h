// The memory that a message takes once it is parsed, known before it is parsed.
#ifndef TANDEM_COMMON_RPC_CALLS_DECODED_SIZE_H_
#define TANDEM_COMMON_RPC_CALLS_DECODED_SIZE_H_

#include <google/protobuf/descriptor.h>
#include <google/protobuf/io/zero_copy_stream.h>

#include <cstdint>

namespace tandem::rpc {

// Memory that one message may take. Its size on the wire does not bound it: an empty sub-message is
// two bytes there and a hundred or more in memory.
inline constexpr int64_t kMaxDecodedBytes = 64 << 20;

// Bytes in memory of the `type` message whose wire format `bytes` holds: its sub-messages, strings,
// elements and unknown fields. Stops counting above kMaxDecodedBytes, and where the bytes are not
// valid.
int64_t DecodedBytes(const google::protobuf::Descriptor& type,
                     google::protobuf::io::ZeroCopyInputStream& bytes);

}  // namespace tandem::rpc

#endif  // TANDEM_COMMON_RPC_CALLS_DECODED_SIZE_H_
