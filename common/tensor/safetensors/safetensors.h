// Reader of the safetensors format (https://github.com/huggingface/safetensors):
// 8 bytes of little-endian header length, a JSON header, then the tensors back to back.
//
// It trusts nothing. Every error names the file, and the tensor where there is one, in the form
// "<file>: tensor '<name>': <what>". Codes: NOT_FOUND for a missing file, DATA_LOSS for a file
// shorter than it says, INVALID_ARGUMENT for everything else.
#ifndef TANDEM_COMMON_TENSOR_SAFETENSORS_SAFETENSORS_H_
#define TANDEM_COMMON_TENSOR_SAFETENSORS_SAFETENSORS_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/tensor/dtype.h"

namespace tandem {

// One tensor in memory that it does not own: a mapped file, or the caller's buffer when writing
// (safetensors_writer.h). Little-endian, row-major, contiguous; `bytes` is the product of `shape`
// times the item size.
struct TensorView {
  std::string name;
  DType dtype = DType::kFloat32;
  std::vector<int64_t> shape;  // empty for a scalar
  const std::byte* data = nullptr;
  size_t bytes = 0;
  std::string file;  // where it was read from, for error messages
};

// One mapped .safetensors file. Views stay valid as long as the object lives.
class SafetensorsFile {
 public:
  // Longest accepted header; the reference implementation has the same limit.
  static constexpr uint64_t kMaxHeaderBytes = 100'000'000;

  static absl::StatusOr<std::unique_ptr<SafetensorsFile>> Open(const std::string& path);
  ~SafetensorsFile();
  SafetensorsFile(const SafetensorsFile&) = delete;
  SafetensorsFile& operator=(const SafetensorsFile&) = delete;

  const std::string& path() const { return path_; }
  // Returns the tensors in the order of their bytes in the file.
  const std::vector<TensorView>& tensors() const { return tensors_; }
  // Returns nullptr for an unknown name.
  const TensorView* Find(absl::string_view name) const;
  // Returns the header's "__metadata__".
  const std::map<std::string, std::string>& metadata() const { return metadata_; }

 private:
  SafetensorsFile() = default;
  absl::Status ParseHeader(absl::string_view header, const std::byte* data, size_t data_bytes);

  std::string path_;
  void* mapping_ = nullptr;
  size_t mapping_bytes_ = 0;
  std::vector<TensorView> tensors_;
  std::map<std::string, size_t> by_name_;
  std::map<std::string, std::string> metadata_;
};

// The weights of a Hugging Face directory: `model.safetensors`, or the shards that
// `model.safetensors.index.json` names (plain file names inside the same directory only).
// Further errors: the index names a tensor that the shard lacks, a shard holds one that the index
// does not name, a shard is missing, two files hold the same tensor.
class SafetensorsDirectory {
 public:
  static absl::StatusOr<std::unique_ptr<SafetensorsDirectory>> Open(const std::string& directory);

  const std::string& directory() const { return directory_; }
  // Returns the tensors of all files, sorted by name.
  const std::vector<TensorView>& tensors() const { return tensors_; }
  const TensorView* Find(absl::string_view name) const;

 private:
  SafetensorsDirectory() = default;
  absl::Status AddFile(const std::string& path);

  std::string directory_;
  std::vector<std::unique_ptr<SafetensorsFile>> files_;
  std::vector<TensorView> tensors_;
};

}  // namespace tandem

#endif  // TANDEM_COMMON_TENSOR_SAFETENSORS_SAFETENSORS_H_
