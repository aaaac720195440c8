// Follows one HTTP/2 connection by its frames, without changing them: which streams are open, how
// many the client has reset, how many bytes of messages are still incomplete, and how many frames
// ask for an acknowledgement. gRPC itself bounds none of these. RFC 9113 section 4 describes
// frames, gRPC's "PROTOCOL-HTTP2.md" messages.
#ifndef TANDEM_COMMON_RPC_GUARD_HTTP2_INSPECTOR_H_
#define TANDEM_COMMON_RPC_GUARD_HTTP2_INSPECTOR_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <unordered_map>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace tandem::rpc {

// The header of a frame.
struct Http2Frame {
  uint32_t length = 0;  // bytes of the payload
  uint8_t type = 0;
  uint8_t flags = 0;
  uint32_t stream = 0;
};

// Cuts the bytes of one direction into frames, wherever reads end.
class Http2FrameReader {
 public:
  // Calls `on_frame` once a frame's header is complete, then `on_payload` for its bytes as they
  // come.
  void Read(absl::string_view bytes, absl::FunctionRef<void(const Http2Frame&)> on_frame,
            absl::FunctionRef<void(const Http2Frame&, absl::string_view)> on_payload);

  // Whether the next byte begins a frame.
  bool between_frames() const { return header_size_ == 0 && payload_left_ == 0; }

 private:
  std::array<uint8_t, 9> header_ = {};
  size_t header_size_ = 0;
  uint32_t payload_left_ = 0;
  Http2Frame frame_;
};

// Bytes of the header block of one request, over all of its frames. gRPC refuses more than 8 KiB of
// headers, but only once it has all of them.
inline constexpr int64_t kMaxHeaderBlockBytes = 64 << 10;

// Not thread-safe.
class Http2Inspector {
 public:
  // Bytes on their way to the server. INVALID_ARGUMENT for what is not HTTP/2, for a header block
  // beyond kMaxHeaderBlockBytes, and for a stream that ends inside a message, which gRPC reports to
  // a server like a complete one.
  absl::Status OnClientBytes(absl::string_view bytes);
  // Bytes on their way to the client.
  void OnServerBytes(absl::string_view bytes);

  // Streams that neither side has ended.
  int64_t open_streams() const { return static_cast<int64_t>(streams_.size()); }
  // Bytes that came of messages that are not complete.
  int64_t unfinished_bytes() const { return unfinished_bytes_; }
  // Streams so far that the client reset before they ended, or made the server reset by breaking
  // the protocol.
  int64_t resets() const { return resets_; }
  // PING and SETTINGS frames of the client so far, each of which the server answers; without those
  // that are themselves answers.
  int64_t control_frames() const { return control_frames_; }

  bool between_server_frames() const { return server_frames_.between_frames(); }
  // Whether a frame of the server has begun; the first holds its settings.
  bool server_has_spoken() const { return server_has_spoken_; }

 private:
  // The client's half of a stream.
  struct Stream {
    std::array<uint8_t, 5> prefix = {};  // of a message: whether it is compressed, its length
    size_t prefix_size = 0;
    uint32_t message_left = 0;
    int64_t unfinished_bytes = 0;
  };

  void OnClientFrame(const Http2Frame& frame);
  void OnClientHeaders(const Http2Frame& frame);
  void OnClientData(Stream& stream, absl::string_view data);
  void OnClientEnd(uint32_t id);
  void Close(uint32_t id);

  absl::Status status_;
  size_t preface_size_ = 0;
  Http2FrameReader client_frames_;
  Http2FrameReader server_frames_;
  uint32_t last_stream_ = 0;
  // The DATA frame that is being read: bytes of its payload that are left, with and without the
  // padding at its end, whose length is the first byte.
  bool padding_known_ = false;
  uint32_t data_left_ = 0;
  uint32_t frame_left_ = 0;
  uint32_t server_error_ = 0;  // of the RST_STREAM that is being read
  size_t server_error_size_ = 0;
  std::unordered_map<uint32_t, Stream> streams_;
  int64_t unfinished_bytes_ = 0;
  int64_t resets_ = 0;
  int64_t control_frames_ = 0;
  int64_t header_block_bytes_ = 0;  // of the block that is being read
  bool server_has_spoken_ = false;
};

}  // namespace tandem::rpc

#endif  // TANDEM_COMMON_RPC_GUARD_HTTP2_INSPECTOR_H_
