// For tests: HTTP/2 frames of a client that means harm.
#ifndef TANDEM_COMMON_RPC_TESTING_HTTP2_FRAMES_H_
#define TANDEM_COMMON_RPC_TESTING_HTTP2_FRAMES_H_

#include <cstdint>
#include <string>

namespace tandem::rpc {

inline constexpr char kHttp2Preface[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

inline constexpr uint8_t kDataFrame = 0, kHeadersFrame = 1, kResetFrame = 3, kSettingsFrame = 4,
                         kPingFrame = 6, kContinuationFrame = 9;
inline constexpr uint8_t kEndStreamFlag = 0x1, kAckFlag = 0x1, kEndHeadersFlag = 0x4,
                         kPaddedFlag = 0x8;

// Big-endian.
inline std::string Bytes(uint32_t value, int count) {
  std::string bytes;
  for (int i = count - 1; i >= 0; --i) bytes.push_back(static_cast<char>(value >> (8 * i)));
  return bytes;
}

inline std::string Frame(uint8_t type, uint8_t flags, uint32_t stream,
                         const std::string& payload = "") {
  return Bytes(static_cast<uint32_t>(payload.size()), 3) + Bytes(type, 1) + Bytes(flags, 1) +
         Bytes(stream, 4) + payload;
}

// The first `size` bytes of a gRPC message of `announced` bytes.
inline std::string Message(uint32_t announced, size_t size) {
  return Bytes(0, 1) + Bytes(announced, 4) + std::string(size, 'x');
}

}  // namespace tandem::rpc

#endif  // TANDEM_COMMON_RPC_TESTING_HTTP2_FRAMES_H_
