#include "common/base/files/file_stamps.h"

#include <sys/stat.h>

#include <utility>

namespace tandem {

FileStamps::FileStamps(std::vector<std::string> paths)
    : paths_(std::move(paths)), stamps_(Read()) {}

bool FileStamps::Changed() {
  std::vector<Stamp> now = Read();
  return std::exchange(stamps_, now) != now;
}

std::vector<FileStamps::Stamp> FileStamps::Read() const {
  std::vector<Stamp> stamps;
  for (const std::string& path : paths_) {
    struct stat status {};
    if (stat(path.c_str(), &status) != 0) status = {};  // a missing file differs from any other
    stamps.emplace_back(status.st_dev, status.st_ino, status.st_size, status.st_ctim.tv_sec,
                        status.st_ctim.tv_nsec);
  }
  return stamps;
}

}  // namespace tandem
