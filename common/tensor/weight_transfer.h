// The two ends of a weight transfer, as plain interfaces: engines implement them with tensors,
// common/rpc moves the bytes. Mirrors tandem.weights.v1.
#ifndef TANDEM_COMMON_TENSOR_WEIGHT_TRANSFER_H_
#define TANDEM_COMMON_TENSOR_WEIGHT_TRANSFER_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/base/call_scope.h"
#include "common/base/weights_version.h"
#include "common/tensor/weight_spec.h"

namespace tandem {

// The tensors' bytes, little endian and concatenated in this order, form one byte stream, which
// travels in chunks.
struct WeightManifest {
  int64_t version = 0;
  std::vector<WeightSpec> tensors;
  int64_t total_bytes = 0;
  int64_t chunk_bytes = 1 << 20;  // of every chunk but the last, which may be shorter
  std::string digest;             // XXH3-128 of the stream, 32 hexadecimal digits

  bool operator==(const WeightManifest&) const = default;

  int64_t num_chunks() const { return (total_bytes + chunk_bytes - 1) / chunk_bytes; }
};

// An immutable copy of a model's weights.
class WeightSource {
 public:
  virtual ~WeightSource() = default;
  virtual const WeightManifest& manifest() const = 0;
  // Copies the stream's bytes [offset, offset + out.size()); the range must lie inside the stream.
  // Thread-safe. An error is one of the copy itself, as of the disk that it is on.
  virtual absl::Status Read(int64_t offset, absl::Span<std::byte> out) const = 0;
};

// Takes one update at a time. Thread-safe. Nothing changes what is served before Commit returns OK.
class WeightReceiver {
 public:
  virtual ~WeightReceiver() = default;
  // Opens an update, or goes on with the open one of that id and manifest: returns the first chunk
  // that it does not hold yet, num_chunks() for the weights that are served: nothing is left to
  // send, and the commit is answered at once. INVALID_ARGUMENT names a tensor that does not fit the
  // model; FAILED_PRECONDITION (reason STALE_WEIGHT_VERSION) for a version not above the one
  // served, or below that of another open update (which is replaced otherwise). `allow_rollback`
  // takes such a version all the same; the update that it replaces cannot be begun again without.
  virtual absl::StatusOr<int64_t> Begin(const std::string& update_id,
                                        const WeightManifest& manifest, bool allow_rollback) = 0;
  // Takes the next chunk; returns the one after it. NOT_FOUND for an update that is not open;
  // INVALID_ARGUMENT names chunk_index (reason CHUNK_OUT_OF_ORDER) or data, of a wrong length.
  virtual absl::StatusOr<int64_t> Append(const std::string& update_id, int64_t chunk_index,
                                         absl::Span<const std::byte> data) = 0;
  // Verifies the digest (DATA_LOSS leaves the old weights in place and drops the update), swaps at
  // the next step boundary and blocks until that has happened. A call that ends before its turn
  // (DEADLINE_EXCEEDED, CANCELLED) leaves the update open. Repeating the last commit is OK.
  virtual absl::StatusOr<WeightsVersion> Commit(const std::string& update_id,
                                                const CallScope& call) = 0;
  virtual absl::Status Abort(const std::string& update_id) = 0;
  virtual WeightsVersion Version() const = 0;
  // The open update, or empty.
  virtual std::string OpenUpdateId() const = 0;
};

}  // namespace tandem

#endif  // TANDEM_COMMON_TENSOR_WEIGHT_TRANSFER_H_
