#include "common/rpc/transfer/blob_sender.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "common/base/errors/status_macros.h"
#include "common/rpc/calls/error_table.h"
#include "common/rpc/client/channel.h"
#include "common/rpc/transfer/blob_store.h"

namespace tandem::rpc {
namespace {

absl::Status SendBlob(const CallScope& call, absl::Duration rpc_timeout, const std::string& digest,
                      const std::string& bytes, blobs::v1::BlobService::StubInterface& receiver) {
  blobs::v1::UploadBlobResponse response;
  CallContext context(call, rpc_timeout);
  const auto stream = receiver.UploadBlob(context.get(), &response);
  blobs::v1::UploadBlobRequest message;
  message.mutable_header()->set_digest(digest);
  message.mutable_header()->set_total_bytes(static_cast<int64_t>(bytes.size()));
  bool writable = stream->Write(message);
  for (size_t begin = 0; writable && begin < bytes.size(); begin += BlobStore::kMaxChunkBytes) {
    message.set_chunk(bytes.substr(begin, BlobStore::kMaxChunkBytes));
    writable = stream->Write(message);
  }
  stream->WritesDone();
  return FromGrpcStatus(stream->Finish());  // says why a write failed
}

}  // namespace

absl::Status SendMissingBlobs(const CallScope& call, absl::Duration rpc_timeout, const Blobs& blobs,
                              blobs::v1::BlobService::StubInterface& receiver) {
  blobs::v1::FindMissingBlobsRequest request;
  for (const auto& [digest, blob] : blobs) request.add_digests(digest);
  blobs::v1::FindMissingBlobsResponse response;
  CallContext context(call, rpc_timeout);
  TANDEM_RETURN_IF_ERROR(
      FromGrpcStatus(receiver.FindMissingBlobs(context.get(), request, &response)));
  for (const std::string& digest : response.missing()) {
    const auto found = blobs.find(digest);
    if (found == blobs.end()) {
      return absl::InternalError(
          absl::StrCat("the receiver lacks a blob that was not named: ", digest));
    }
    TANDEM_RETURN_IF_ERROR(SendBlob(call, rpc_timeout, digest, *found->second, receiver));
  }
  return absl::OkStatus();
}

}  // namespace tandem::rpc
