// Notices that files were rewritten or replaced.
#ifndef TANDEM_COMMON_BASE_FILES_FILE_STAMPS_H_
#define TANDEM_COMMON_BASE_FILES_FILE_STAMPS_H_

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

namespace tandem {

// Compares device, inode, size and time of change (of contents, owner or mode), behind symbolic
// links: Kubernetes replaces the files of a secret by turning a link. Not thread-safe.
class FileStamps {
 public:
  explicit FileStamps(std::vector<std::string> paths);

  // Whether a file is not what it was at the last call, or at the construction.
  bool Changed();

 private:
  using Stamp = std::tuple<uint64_t, uint64_t, int64_t, int64_t, int64_t>;
  std::vector<Stamp> Read() const;

  std::vector<std::string> paths_;
  std::vector<Stamp> stamps_;
};

}  // namespace tandem

#endif  // TANDEM_COMMON_BASE_FILES_FILE_STAMPS_H_
