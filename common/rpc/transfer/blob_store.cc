#include "common/rpc/transfer/blob_store.h"

#include <openssl/sha.h>

#include <algorithm>
#include <array>
#include <set>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/base/errors/error.h"
#include "common/base/errors/status_macros.h"

namespace tandem::rpc {
namespace {

constexpr int64_t kRetryMilliseconds = 1000;

// What a blob takes beside its bytes (411 bytes, measured) is not counted, so there are at most as
// many blobs as there would be of this size; no image is smaller.
constexpr int64_t kSmallestBlobBytes = 1024;
constexpr int64_t kFewestBlobs = 64;

}  // namespace

std::string Sha256Hex(absl::string_view bytes) {
  std::array<uint8_t, SHA256_DIGEST_LENGTH> hash;
  SHA256(reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size(), hash.data());
  return absl::BytesToHexString(
      absl::string_view(reinterpret_cast<const char*>(hash.data()), hash.size()));
}

absl::Status CheckBlobDigest(absl::string_view path, absl::string_view digest) {
  const bool is_hex = std::all_of(digest.begin(), digest.end(), [](char c) {
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f');
  });
  if (is_hex && digest.size() == 2 * SHA256_DIGEST_LENGTH) return absl::OkStatus();
  return InvalidField(path, "must be a SHA-256, 64 lower-case hexadecimal digits");
}

void BlobStore::SetCapacity(int64_t bytes) {
  const std::lock_guard lock(mutex_);
  stats_.capacity_bytes = bytes;
}

BlobStore::Stats BlobStore::stats() const {
  const std::lock_guard lock(mutex_);
  return stats_;
}

const Blob* BlobStore::Find(const std::string& digest) {
  const auto found = places_.find(digest);
  if (found == places_.end()) return nullptr;
  entries_.splice(entries_.end(), entries_, found->second);
  return &found->second->blob;
}

std::vector<std::string> BlobStore::FindMissing(absl::Span<const std::string> digests) {
  const std::lock_guard lock(mutex_);
  std::vector<std::string> missing;
  std::set<absl::string_view> seen;
  for (const std::string& digest : digests) {
    if (Find(digest) == nullptr && seen.insert(digest).second) missing.push_back(digest);
  }
  return missing;
}

absl::Status BlobStore::Collect(absl::Span<const VisionReference> references, Blobs& blobs) {
  const std::lock_guard lock(mutex_);
  if (stats_.capacity_bytes == 0 && !references.empty()) {
    return InvalidField("vision_inputs", "the server's model takes no images");
  }
  std::set<std::string> missing;
  size_t first = 0;
  for (size_t i = 0; i < references.size(); ++i) {
    if (blobs.contains(references[i].digest)) continue;
    if (const Blob* const blob = Find(references[i].digest)) {
      blobs.emplace(references[i].digest, *blob);
      continue;
    }
    if (missing.empty()) first = i;
    missing.insert(references[i].digest);
  }
  if (missing.empty()) return absl::OkStatus();
  return WithReason(
      FieldError(absl::StatusCode::kFailedPrecondition,
                 absl::StrCat("vision_inputs[", first, "].digest"),
                 absl::StrCat("the server does not hold ", absl::StrJoin(missing, ", "))),
      reason::kBlobMissing);
}

absl::StatusOr<std::unique_ptr<BlobStore::Upload>> BlobStore::Begin(const std::string& digest,
                                                                    int64_t total_bytes) {
  TANDEM_RETURN_IF_ERROR(CheckBlobDigest("digest", digest));
  if (total_bytes < 1) {
    return InvalidField("total_bytes", absl::StrCat("must be at least 1, got ", total_bytes));
  }
  const std::lock_guard lock(mutex_);
  if (stats_.capacity_bytes == 0) {
    return WithReason(FieldError(absl::StatusCode::kFailedPrecondition, "digest",
                                 "the server's model takes no images, so it keeps no blobs"),
                      reason::kNoImages);
  }
  if (total_bytes > stats_.capacity_bytes) {
    return FieldError(absl::StatusCode::kOutOfRange, "total_bytes",
                      absl::StrCat(total_bytes, " bytes, but server.blob_cache_bytes is ",
                                   stats_.capacity_bytes));
  }
  return std::unique_ptr<Upload>(new Upload(*this, digest, total_bytes));
}

absl::Status BlobStore::Reserve(int64_t bytes) {
  const std::lock_guard lock(mutex_);
  const auto most_blobs =
      static_cast<size_t>(std::max(stats_.capacity_bytes / kSmallestBlobBytes, kFewestBlobs));
  const auto is_full = [&] {
    return stats_.used_bytes + bytes > stats_.capacity_bytes || entries_.size() >= most_blobs;
  };
  for (auto entry = entries_.begin(); entry != entries_.end() && is_full();) {
    if (entry->blob.use_count() > 1) {  // a request holds it
      ++entry;
      continue;
    }
    stats_.used_bytes -= static_cast<int64_t>(entry->blob->size());
    ++stats_.dropped_blobs;
    places_.erase(entry->digest);
    entry = entries_.erase(entry);
  }
  if (is_full()) {
    return WithRetryAfter(
        absl::ResourceExhaustedError(absl::StrCat(
            "requests and uploads in progress hold ", stats_.used_bytes, " bytes of pixels in ",
            entries_.size(), " blobs, and no more than ", stats_.capacity_bytes, " bytes in ",
            most_blobs, " blobs may be held (server.blob_cache_bytes)")),
        kRetryMilliseconds);
  }
  stats_.used_bytes += bytes;
  stats_.received_bytes += bytes;
  return absl::OkStatus();
}

void BlobStore::GiveBack(int64_t bytes) {
  const std::lock_guard lock(mutex_);
  stats_.used_bytes -= bytes;
}

void BlobStore::Put(const std::string& digest, std::string bytes) {
  const std::lock_guard lock(mutex_);
  if (Find(digest) != nullptr) {
    stats_.used_bytes -= static_cast<int64_t>(bytes.size());
    return;
  }
  entries_.push_back(
      {.digest = digest, .blob = std::make_shared<const std::string>(std::move(bytes))});
  places_.emplace(digest, std::prev(entries_.end()));
}

BlobStore::Upload::Upload(BlobStore& store, const std::string& digest, int64_t total_bytes)
    : store_(store), digest_(digest), total_bytes_(total_bytes) {}

BlobStore::Upload::~Upload() { store_.GiveBack(static_cast<int64_t>(bytes_.size())); }

absl::Status BlobStore::Upload::Append(absl::string_view chunk) {
  const auto size = static_cast<int64_t>(chunk.size());
  const auto received = static_cast<int64_t>(bytes_.size());
  if (size < 1 || size > kMaxChunkBytes) {
    return InvalidField("chunk",
                        absl::StrCat("must have 1 to ", kMaxChunkBytes, " bytes, has ", size));
  }
  if (size > total_bytes_ - received) {
    return InvalidField("chunk",
                        absl::StrCat("the blob has ", total_bytes_, " bytes, but more were sent"));
  }
  TANDEM_RETURN_IF_ERROR(store_.Reserve(size));
  // Pages that are not written take no memory.
  if (received == 0) bytes_.reserve(static_cast<size_t>(total_bytes_));
  bytes_.append(chunk.data(), chunk.size());
  return absl::OkStatus();
}

absl::Status BlobStore::Upload::Finish() {
  const auto received = static_cast<int64_t>(bytes_.size());
  if (received != total_bytes_) {
    return InvalidField("chunk",
                        absl::StrCat("only ", received, " of ", total_bytes_, " bytes arrived"));
  }
  if (const std::string digest = Sha256Hex(bytes_); digest != digest_) {
    return FieldError(absl::StatusCode::kDataLoss, "digest",
                      absl::StrCat("the bytes received have the SHA-256 ", digest));
  }
  store_.Put(digest_, std::exchange(bytes_, {}));
  return absl::OkStatus();
}

}  // namespace tandem::rpc
