// Writer of the safetensors format (common/tensor/safetensors/safetensors.h).
#ifndef TANDEM_COMMON_TENSOR_SAFETENSORS_SAFETENSORS_WRITER_H_
#define TANDEM_COMMON_TENSOR_SAFETENSORS_SAFETENSORS_WRITER_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/base/files/file_writer.h"
#include "common/tensor/safetensors/safetensors.h"
#include "common/tensor/weight_spec.h"

namespace tandem {

// Writes one file, tensor by tensor, through a temporary file beside it: fsync, then rename, so
// that a reader sees the old file or the new one. A WrittenFiles of the thread (file_writer.h)
// lists it. INVALID_ARGUMENT names file and tensor for a
// tensor that does not fit; else errors of FileError.
class SafetensorsWriter {
 public:
  // Begins a file of these tensors, whose names differ. Wider items come first in the file
  // (InFileOrder), so that every tensor is aligned.
  static absl::StatusOr<std::unique_ptr<SafetensorsWriter>> Create(
      const std::string& path, absl::Span<const WeightSpec> tensors,
      const std::map<std::string, std::string>& metadata = {});
  SafetensorsWriter(const SafetensorsWriter&) = delete;
  SafetensorsWriter& operator=(const SafetensorsWriter&) = delete;

  // Returns the tensor of that name, or nullptr.
  const WeightSpec* Find(const std::string& name) const;

  // Writes one tensor. Tensors come in any order, each once; those that come in the file's order
  // are never read again.
  absl::Status Write(const TensorView& tensor);

  // Write in two steps, for a tensor whose bytes come one after the other: Begin checks name, type
  // and shape, and Append writes the next bytes. The bytes of several tensors may be interleaved.
  absl::Status Begin(const WeightSpec& tensor);
  absl::Status Append(const std::string& name, absl::Span<const std::byte> bytes);

  // Completes the file. All tensors must have been written.
  absl::Status Finish();

 private:
  struct Place {
    WeightSpec spec;
    int64_t offset = 0;  // in the file
    bool begun = false;
    int64_t written = 0;  // bytes
  };

  // Returns the place of a tensor that has not been begun.
  absl::StatusOr<Place*> Expect(const WeightSpec& tensor);
  absl::Status WrongBytes(const Place& place, int64_t bytes) const;

  explicit SafetensorsWriter(FileWriter file) : file_(std::move(file)) {}

  FileWriter file_;
  std::map<std::string, Place> places_;
};

// Returns the order in which a file has the tensors of `dtypes`, by index.
std::vector<size_t> InFileOrder(absl::Span<const DType> dtypes);

}  // namespace tandem

#endif  // TANDEM_COMMON_TENSOR_SAFETENSORS_SAFETENSORS_WRITER_H_
