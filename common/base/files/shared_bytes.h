// Bytes of another process of this machine: of its file (shared_file.h), or of its GPU's memory.
#ifndef TANDEM_COMMON_BASE_FILES_SHARED_BYTES_H_
#define TANDEM_COMMON_BASE_FILES_SHARED_BYTES_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"

namespace tandem {

class SharedBytes {
 public:
  virtual ~SharedBytes() = default;
  // Copies bytes [offset, offset + out.size()) to the host; waits for them. Thread-safe. DATA_LOSS
  // for bytes beyond the end.
  virtual absl::Status Read(int64_t offset, absl::Span<std::byte> out) const = 0;
  // Whether the bytes are in a GPU's memory, as those of a PeerMemory.
  virtual bool on_gpu() const { return false; }
};

}  // namespace tandem

#endif  // TANDEM_COMMON_BASE_FILES_SHARED_BYTES_H_
