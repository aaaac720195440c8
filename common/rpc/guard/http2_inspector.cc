#include "common/rpc/guard/http2_inspector.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace tandem::rpc {
namespace {

constexpr absl::string_view kPreface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

constexpr uint8_t kData = 0;
constexpr uint8_t kHeaders = 1;
constexpr uint8_t kResetStream = 3;
constexpr uint8_t kSettings = 4;
constexpr uint8_t kPing = 6;
constexpr uint8_t kContinuation = 9;
constexpr uint8_t kEndStream = 0x1;
constexpr uint8_t kAck = 0x1;
constexpr uint8_t kEndHeaders = 0x4;
constexpr uint8_t kPadded = 0x8;

// Whether an error code of RFC 9113 section 7 says that the client broke the protocol:
// PROTOCOL_ERROR, FLOW_CONTROL_ERROR, STREAM_CLOSED or FRAME_SIZE_ERROR. A call that fails has
// another one.
bool BreaksProtocol(uint32_t error) { return error == 1 || error == 3 || error == 5 || error == 6; }

}  // namespace

void Http2FrameReader::Read(
    absl::string_view bytes, absl::FunctionRef<void(const Http2Frame&)> on_frame,
    absl::FunctionRef<void(const Http2Frame&, absl::string_view)> on_payload) {
  while (!bytes.empty()) {
    if (payload_left_ > 0) {
      const absl::string_view payload = bytes.substr(0, payload_left_);
      payload_left_ -= static_cast<uint32_t>(payload.size());
      on_payload(frame_, payload);
      bytes.remove_prefix(payload.size());
      continue;
    }
    header_[header_size_++] = static_cast<uint8_t>(bytes.front());
    bytes.remove_prefix(1);
    if (header_size_ < header_.size()) continue;
    header_size_ = 0;
    frame_.length = uint32_t{header_[0]} << 16 | uint32_t{header_[1]} << 8 | header_[2];
    frame_.type = header_[3];
    frame_.flags = header_[4];
    frame_.stream = (uint32_t{header_[5]} & 0x7f) << 24 | uint32_t{header_[6]} << 16 |
                    uint32_t{header_[7]} << 8 | header_[8];
    payload_left_ = frame_.length;
    on_frame(frame_);
  }
}

absl::Status Http2Inspector::OnClientBytes(absl::string_view bytes) {
  if (preface_size_ < kPreface.size()) {
    const absl::string_view preface = bytes.substr(0, kPreface.size() - preface_size_);
    if (kPreface.substr(preface_size_, preface.size()) != preface) {
      return absl::InvalidArgumentError("the client does not speak HTTP/2");
    }
    preface_size_ += preface.size();
    bytes.remove_prefix(preface.size());
  }
  client_frames_.Read(
      bytes, [this](const Http2Frame& frame) { OnClientFrame(frame); },
      [this](const Http2Frame& frame, absl::string_view payload) {
        if (frame.type != kData) return;
        if (!padding_known_) {
          padding_known_ = true;
          const uint32_t padding = static_cast<uint8_t>(payload.front());
          --frame_left_;
          data_left_ = frame_left_ - std::min(frame_left_, padding);
          payload.remove_prefix(1);
        }
        frame_left_ -= static_cast<uint32_t>(payload.size());
        payload = payload.substr(0, data_left_);
        data_left_ -= static_cast<uint32_t>(payload.size());
        const auto stream = streams_.find(frame.stream);
        if (stream != streams_.end()) OnClientData(stream->second, payload);
        if (frame_left_ == 0 && (frame.flags & kEndStream) != 0) OnClientEnd(frame.stream);
      });
  return status_;
}

void Http2Inspector::OnServerBytes(absl::string_view bytes) {
  server_has_spoken_ = true;
  server_frames_.Read(
      bytes,
      [this](const Http2Frame& frame) {
        server_error_ = 0;
        server_error_size_ = 0;
        const bool ends =
            (frame.type == kData || frame.type == kHeaders) && (frame.flags & kEndStream) != 0;
        if (ends || frame.type == kResetStream) Close(frame.stream);
      },
      [this](const Http2Frame& frame, absl::string_view payload) {
        if (frame.type != kResetStream) return;
        for (const char byte : payload) {
          server_error_ = server_error_ << 8 | static_cast<uint8_t>(byte);
          if (++server_error_size_ == 4 && BreaksProtocol(server_error_)) ++resets_;
        }
      });
}

void Http2Inspector::OnClientFrame(const Http2Frame& frame) {
  switch (frame.type) {
    case kHeaders:
      header_block_bytes_ = 0;
      OnClientHeaders(frame);
      if (frame.stream > last_stream_) {
        last_stream_ = frame.stream;
        streams_.emplace(frame.stream, Stream{});
      }
      if ((frame.flags & kEndStream) != 0) OnClientEnd(frame.stream);
      break;
    case kContinuation:
      OnClientHeaders(frame);
      break;
    case kSettings:
    case kPing:
      if ((frame.flags & kAck) == 0) ++control_frames_;
      break;
    case kData:
      padding_known_ = (frame.flags & kPadded) == 0;
      frame_left_ = data_left_ = frame.length;
      if (frame.length == 0 && (frame.flags & kEndStream) != 0) OnClientEnd(frame.stream);
      break;
    case kResetStream:
      if (streams_.contains(frame.stream)) ++resets_;
      Close(frame.stream);
      break;
    default:
      break;
  }
}

void Http2Inspector::OnClientHeaders(const Http2Frame& frame) {
  header_block_bytes_ += frame.length;
  if (header_block_bytes_ > kMaxHeaderBlockBytes) {
    status_ = absl::InvalidArgumentError(absl::StrCat("the headers of stream ", frame.stream,
                                                      " have more than ", kMaxHeaderBlockBytes,
                                                      " bytes"));
  }
  if ((frame.flags & kEndHeaders) != 0) header_block_bytes_ = 0;
}

void Http2Inspector::OnClientData(Stream& stream, absl::string_view data) {
  while (!data.empty()) {
    size_t taken = 1;
    if (stream.prefix_size < stream.prefix.size()) {
      stream.prefix[stream.prefix_size++] = static_cast<uint8_t>(data.front());
      if (stream.prefix_size == stream.prefix.size()) {
        stream.message_left = uint32_t{stream.prefix[1]} << 24 | uint32_t{stream.prefix[2]} << 16 |
                              uint32_t{stream.prefix[3]} << 8 | stream.prefix[4];
      }
    } else {
      taken = std::min<size_t>(data.size(), stream.message_left);
      stream.message_left -= static_cast<uint32_t>(taken);
    }
    data.remove_prefix(taken);
    stream.unfinished_bytes += static_cast<int64_t>(taken);
    unfinished_bytes_ += static_cast<int64_t>(taken);
    if (stream.prefix_size == stream.prefix.size() && stream.message_left == 0) {
      unfinished_bytes_ -= stream.unfinished_bytes;
      stream = Stream{};
    }
  }
}

void Http2Inspector::OnClientEnd(uint32_t id) {
  const auto stream = streams_.find(id);
  if (stream == streams_.end() || stream->second.prefix_size == 0) return;
  status_ = absl::InvalidArgumentError(absl::StrCat("stream ", id, " ends inside a message"));
}

void Http2Inspector::Close(uint32_t id) {
  const auto stream = streams_.find(id);
  if (stream == streams_.end()) return;
  unfinished_bytes_ -= stream->second.unfinished_bytes;
  streams_.erase(stream);
}

}  // namespace tandem::rpc
