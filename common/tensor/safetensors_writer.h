// Writer of the safetensors format (common/tensor/safetensors.h).
#ifndef TANDEM_COMMON_TENSOR_SAFETENSORS_WRITER_H_
#define TANDEM_COMMON_TENSOR_SAFETENSORS_WRITER_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/base/file_descriptor.h"
#include "common/tensor/safetensors.h"
#include "common/tensor/weight_spec.h"

namespace tandem {

// Writes one file, tensor by tensor, through a temporary file beside it: fsync, then rename, so
// that a reader sees the old file or the new one. Errors are INVALID_ARGUMENT, which names file and
// tensor, for what does not fit, else those of FileError.
class SafetensorsWriter {
 public:
  // A file of these tensors. Wider items come first, so that every tensor is aligned. No two have
  // the same name.
  static absl::StatusOr<std::unique_ptr<SafetensorsWriter>> Create(
      const std::string& path, absl::Span<const WeightSpec> tensors,
      const std::map<std::string, std::string>& metadata = {});
  // Leaves nothing of a file that is not finished.
  ~SafetensorsWriter();
  SafetensorsWriter(const SafetensorsWriter&) = delete;
  SafetensorsWriter& operator=(const SafetensorsWriter&) = delete;

  // The tensor of that name; nullptr when the file has none.
  const WeightSpec* Find(const std::string& name) const;

  // Any order, each once.
  absl::Status Write(const TensorView& tensor);

  // All tensors must be there.
  absl::Status Finish();

 private:
  struct Place {
    WeightSpec spec;
    int64_t offset = 0;  // in the file
    bool written = false;
  };

  SafetensorsWriter(std::string path, std::string temporary, FileDescriptor file)
      : path_(std::move(path)), temporary_(std::move(temporary)), file_(std::move(file)) {}

  const std::string path_, temporary_;
  const FileDescriptor file_;
  std::map<std::string, Place> places_;
  bool finished_ = false;
};

// Writes tensors that are all there.
absl::Status WriteSafetensors(const std::string& path, absl::Span<const TensorView> tensors,
                              const std::map<std::string, std::string>& metadata = {});

}  // namespace tandem

#endif  // TANDEM_COMMON_TENSOR_SAFETENSORS_WRITER_H_
