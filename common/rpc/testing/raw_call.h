// For tests: a call whose messages are bytes, as a client that is broken, or means harm, sends
// them.
#ifndef TANDEM_COMMON_RPC_TESTING_RAW_CALL_H_
#define TANDEM_COMMON_RPC_TESTING_RAW_CALL_H_

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/completion_queue.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/support/byte_buffer.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "common/rpc/calls/error_table.h"

namespace tandem::rpc {

inline grpc::ByteBuffer ToByteBuffer(const std::string& bytes) {
  const grpc::Slice slice(bytes);
  return grpc::ByteBuffer(&slice, 1);
}

inline std::string ToString(const grpc::ByteBuffer& buffer) {
  std::vector<grpc::Slice> slices;
  std::string bytes;
  if (!buffer.Dump(&slices).ok()) return bytes;
  for (const grpc::Slice& slice : slices) {
    bytes.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  }
  return bytes;
}

// Blocks in every operation; any kind of method.
class RawCall {
 public:
  // `path`: "/package.Service/Method".
  RawCall(const std::shared_ptr<grpc::Channel>& channel, const std::string& path,
          const std::map<std::string, std::string>& metadata = {})
      : stub_(channel) {
    for (const auto& [key, value] : metadata) context_.AddMetadata(key, value);
    call_ = stub_.PrepareCall(&context_, path, &queue_);
    call_->StartCall(this);
    Wait();
  }
  ~RawCall() {
    if (!finished_) {
      context_.TryCancel();
      (void)Finish();
    }
    queue_.Shutdown();
  }
  RawCall(const RawCall&) = delete;
  RawCall& operator=(const RawCall&) = delete;

  bool Write(const std::string& bytes) {
    call_->Write(ToByteBuffer(bytes), this);
    return Wait();
  }
  void WritesDone() {
    call_->WritesDone(this);
    Wait();
  }
  // nullopt at the end.
  std::optional<std::string> Read() {
    grpc::ByteBuffer message;
    call_->Read(&message, this);
    if (!Wait()) return std::nullopt;
    return ToString(message);
  }
  // Drops what is left to read.
  absl::Status Finish() {
    while (Read().has_value()) {
    }
    grpc::Status status;
    call_->Finish(&status, this);
    Wait();
    finished_ = true;
    return FromGrpcStatus(status);
  }

 private:
  bool Wait() {
    void* tag = nullptr;
    bool ok = false;
    return queue_.Next(&tag, &ok) && ok;
  }

  grpc::ClientContext context_;
  grpc::CompletionQueue queue_;
  grpc::GenericStub stub_;
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> call_;
  bool finished_ = false;
};

}  // namespace tandem::rpc

#endif  // TANDEM_COMMON_RPC_TESTING_RAW_CALL_H_
