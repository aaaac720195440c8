// The blobs that a server keeps: bytes under their SHA-256, as many as a bound allows. The blob
// that was used least recently goes first; one that a request holds stays.
#ifndef TANDEM_COMMON_RPC_TRANSFER_BLOB_STORE_H_
#define TANDEM_COMMON_RPC_TRANSFER_BLOB_STORE_H_

#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "common/tensor/vision_reference.h"

namespace tandem::rpc {

// Returns the SHA-256 of the bytes, 64 lower-case hexadecimal digits.
std::string Sha256Hex(absl::string_view bytes);

// INVALID_ARGUMENT with `path` unless `digest` has the form of Sha256Hex.
absl::Status CheckBlobDigest(absl::string_view path, absl::string_view digest);

// Thread-safe.
class BlobStore {
 public:
  static constexpr int64_t kMaxChunkBytes = 1 << 20;

  class Upload;

  // Sets the bound of the bytes; 0, the initial one, is that of a server whose model takes no
  // images.
  void SetCapacity(int64_t bytes);

  struct Stats {
    int64_t capacity_bytes = 0;
    int64_t used_bytes = 0;  // of the blobs and of uploads in progress
    int64_t received_bytes = 0;
    int64_t dropped_blobs = 0;  // to make room for others
  };
  Stats stats() const;

  // Returns the digests of blobs that are not here, each once. The others count as used now.
  std::vector<std::string> FindMissing(absl::Span<const std::string> digests);

  // Adds the blobs of the references to `blobs`, which keeps them here. FAILED_PRECONDITION
  // (BLOB_MISSING), with the field of the first reference whose blob is not here and the digests of
  // all of them; INVALID_ARGUMENT for references where the bound is 0.
  absl::Status Collect(absl::Span<const VisionReference> references, Blobs& blobs);

  // Begins the upload of a blob. Errors have the fields "digest" and "total_bytes":
  // INVALID_ARGUMENT; OUT_OF_RANGE for a blob that is larger than the store; FAILED_PRECONDITION
  // (NO_IMAGES) where the bound is 0. The store outlives the upload.
  absl::StatusOr<std::unique_ptr<Upload>> Begin(const std::string& digest, int64_t total_bytes);

 private:
  struct Entry {
    std::string digest;
    Blob blob;
  };

  // Makes room for `bytes` and counts them. RESOURCE_EXHAUSTED, with a retry hint, if requests and
  // uploads in progress hold too much.
  absl::Status Reserve(int64_t bytes);
  void GiveBack(int64_t bytes);
  // Keeps a blob whose bytes are counted; those of one that is here already are given back.
  void Put(const std::string& digest, std::string bytes);
  // Returns the blob, as used now; nullptr if it is not here. Needs the mutex.
  const Blob* Find(const std::string& digest);

  mutable std::mutex mutex_;
  Stats stats_;
  std::list<Entry> entries_;  // the blob that was used least recently is at the front
  std::unordered_map<std::string, std::list<Entry>::iterator> places_;
};

// One blob that comes in chunks. Used by one thread at a time.
class BlobStore::Upload {
 public:
  ~Upload();
  Upload(const Upload&) = delete;
  Upload& operator=(const Upload&) = delete;

  // INVALID_ARGUMENT ("chunk") for a chunk that is empty, larger than kMaxChunkBytes, or beyond the
  // blob's length; RESOURCE_EXHAUSTED as the memory of the store.
  absl::Status Append(absl::string_view chunk);
  // Keeps the blob. INVALID_ARGUMENT ("chunk") if bytes are missing; DATA_LOSS if they do not have
  // the digest.
  absl::Status Finish();

 private:
  friend class BlobStore;
  Upload(BlobStore& store, const std::string& digest, int64_t total_bytes);

  BlobStore& store_;
  const std::string digest_;
  const int64_t total_bytes_;
  std::string bytes_;
};

}  // namespace tandem::rpc

#endif  // TANDEM_COMMON_RPC_TRANSFER_BLOB_STORE_H_
